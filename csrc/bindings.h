// What the Python modules `resode_kernels_cpu` and `resode_kernels_cuda` have in common: the
// structs of stage.h as Python classes. Callers pass addresses of contiguous memory that they keep
// alive.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stage.h"

namespace py = pybind11;

namespace resode {
namespace {

// The value of this name; with `taken` only if it is one of those.
template <class Enum>
Enum parse(std::string_view name, std::initializer_list<Enum> taken = {}) {
  std::string_view names = kNames<Enum>;
  for (int i = 0; !names.empty(); ++i) {
    const size_t end = std::min(names.find_first_of(", "), names.size());
    const Enum value{i};
    if (names.substr(0, end) == name &&
        (taken.size() == 0 || std::find(taken.begin(), taken.end(), value) != taken.end()))
      return value;
    names.remove_prefix(std::min(names.find_first_not_of(", ", end), names.size()));
  }
  throw py::value_error("unknown name '" + std::string(name) + "'");
}

// The structs that kernels take, with the tables they point to.
struct PyStage : Stage {
  std::vector<void*> table;
};
struct PyReverse : Reverse {
  std::vector<void*> table;
};

// A table of the tensors of all blocks. With strides, the bytes from one block's tensor to the next
// block's, the addresses are those of the first block; without, they are those of all blocks.
std::vector<void*> make_table(const std::vector<uintptr_t>& addresses,
                              const std::vector<int64_t>& strides, int64_t blocks) {
  std::vector<void*> table;
  if (strides.empty()) {
    for (uintptr_t address : addresses) table.push_back(reinterpret_cast<void*>(address));
    return table;
  }
  table.reserve(blocks * addresses.size());
  for (int64_t n = 0; n < blocks; ++n)
    for (size_t k = 0; k < addresses.size(); ++k)
      table.push_back(addresses[k] ? reinterpret_cast<void*>(addresses[k] + n * strides[k])
                                   : nullptr);
  return table;
}

PyStage make_stage(const std::string& block, const std::string& activation,
                   const std::string& scheme, int64_t steps, double step, bool tied, int64_t rows,
                   int64_t dim, int64_t hidden, int64_t height, int64_t width,
                   const std::vector<std::array<int64_t, 3>>& convolutions, double epsilon,
                   const std::string& stream, const std::string& storage,
                   const std::vector<uintptr_t>& parameters, const std::vector<int64_t>& strides,
                   int64_t anchor_every, int threads) {
  PyStage s{};
  s.block = parse<Block>(block);
  s.activation = parse<Activation>(activation);
  s.scheme = parse<Scheme>(scheme);
  s.steps = steps;
  s.step = step;
  s.tied = tied;
  s.rows = rows;
  s.dim = dim;
  s.hidden = hidden;
  s.stream = parse(stream, {DType::float32, DType::float64});
  s.storage = parse<DType>(storage);
  s.height = height;
  s.width = width;
  for (const auto& [in, out, size] : convolutions)
    if (s.layers < kMaxLayers) s.convolutions[s.layers++] = {in, out, int(size)};
  s.epsilon = epsilon;
  s.table = make_table(parameters, strides, s.blocks());
  s.count = int(s.table.size() / s.blocks());
  s.parameters = s.table.data();
  s.anchor_every = anchor_every;
  s.threads = threads;
  return s;
}

PyReverse make_reverse(const std::string& reverse_rule, int order, uintptr_t start,
                       uintptr_t anchors, uintptr_t cotangent, uintptr_t grad_x,
                       const std::vector<uintptr_t>& gradients, const std::vector<int64_t>& strides,
                       int64_t blocks, uintptr_t nonfinite) {
  PyReverse r{};
  r.reverse_rule = parse<ReverseRule>(reverse_rule);
  r.order = order;
  r.start = reinterpret_cast<const void*>(start);
  r.anchors = reinterpret_cast<const void*>(anchors);
  r.cotangent = reinterpret_cast<const void*>(cotangent);
  r.grad_x = reinterpret_cast<void*>(grad_x);
  r.table = make_table(gradients, strides, blocks);
  r.gradients = r.table.data();
  r.nonfinite = reinterpret_cast<int32_t*>(nonfinite);
  return r;
}

// The classes are local to a module: each module has its own.
[[maybe_unused]] void bind_structs(py::module_& m) {
  m.attr("INTERFACE") = kInterface;
  py::class_<PyStage, std::shared_ptr<PyStage>>(m, "Stage", py::module_local())
      .def(py::init(&make_stage), py::kw_only(), py::arg("block"), py::arg("activation"),
           py::arg("scheme"), py::arg("steps"), py::arg("step"), py::arg("tied"), py::arg("rows"),
           py::arg("dim"), py::arg("hidden"), py::arg("height"), py::arg("width"),
           py::arg("convolutions"), py::arg("epsilon"), py::arg("stream"), py::arg("storage"),
           py::arg("parameters"), py::arg("strides"), py::arg("anchor_every"), py::arg("threads"));

  py::class_<Forward, std::shared_ptr<Forward>>(m, "Forward", py::module_local())
      .def(py::init([](uintptr_t x, uintptr_t y, uintptr_t anchors, uintptr_t statistics) {
             return Forward{reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y),
                            reinterpret_cast<void*>(anchors), reinterpret_cast<void*>(statistics)};
           }),
           py::kw_only(), py::arg("x"), py::arg("y"), py::arg("anchors"), py::arg("statistics"));

  py::class_<PyReverse, std::shared_ptr<PyReverse>>(m, "Reverse", py::module_local())
      .def(py::init(&make_reverse), py::kw_only(), py::arg("reverse_rule"), py::arg("order"),
           py::arg("start"), py::arg("anchors"), py::arg("cotangent"), py::arg("grad_x"),
           py::arg("gradients"), py::arg("strides"), py::arg("blocks"), py::arg("nonfinite"));
}

// A pass that is ready to run, with the stage and io that the plan refers to.
template <class Plan, class PyIo>
struct PyPlan {
  std::shared_ptr<PyStage> stage;
  std::shared_ptr<PyIo> io;
  Plan plan;
};

// Adds the function plan(stage, io, …) for one type of io, and the class of its result. `make`
// returns the plan; nothing, and Python None, if the pass cannot be run.
template <class Io, class PyIo, template <class> class Plan, class... More>
auto bind_plan(py::module_& m, const char* name,
               std::optional<Plan<Io>> (*make)(const Stage&, const Io&, const More&...)) {
  using BoundPlan = PyPlan<Plan<Io>, PyIo>;
  m.def("plan",
        [make](std::shared_ptr<PyStage> stage, std::shared_ptr<PyIo> io,
               const More&... more) -> std::optional<BoundPlan> {
          const auto plan = make(*stage, *io, more...);
          if (!plan) return {};
          return BoundPlan{stage, io, *plan};
        });
  return py::class_<BoundPlan>(m, name, py::module_local())
      .def_property_readonly("workspace_bytes",
                             [](const BoundPlan& bound) { return bound.plan.workspace_bytes; })
      .def(
          "run",
          [](const BoundPlan& bound, uintptr_t workspace) {
            bound.plan.run(reinterpret_cast<void*>(workspace));
          },
          py::arg("workspace"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace resode
