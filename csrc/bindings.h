// What the Python modules `resode_kernels_cpu` and `resode_kernels_cuda` have in common: the
// structs of checks.h and stage.h as Python classes. Callers pass contiguous memory, which they
// keep alive, as (address, bytes); the address 0 says that there is none.

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
#include <utility>
#include <vector>

#include "checks.h"

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

using PyMemory = std::pair<uintptr_t, size_t>;

Memory to_native(const PyMemory& memory) { return {memory.first, memory.second}; }

std::vector<Memory> to_native(const std::vector<PyMemory>& memories) {
  std::vector<Memory> result;
  result.reserve(memories.size());
  for (const PyMemory& memory : memories) result.push_back(to_native(memory));
  return result;
}

// A stage with the tables that it points to.
struct PyStage : Stage {
  std::vector<void*> table;
  std::vector<int> bits_table;
};

std::shared_ptr<PyStage> make_stage(const std::string& block, const std::string& activation,
                                    const std::string& scheme, int64_t steps, double step,
                                    bool tied, int64_t rows, int64_t dim, int64_t hidden,
                                    int64_t height, int64_t width,
                                    const std::vector<std::array<int64_t, 3>>& convolutions,
                                    double epsilon, const std::string& stream,
                                    const std::string& storage,
                                    const std::vector<PyMemory>& parameters, int64_t anchor_every,
                                    std::vector<int> bits, int threads) {
  auto s = std::make_shared<PyStage>();
  s->block = parse<Block>(block);
  s->activation = parse<Activation>(activation);
  s->scheme = parse<Scheme>(scheme);
  s->steps = steps;
  s->step = step;
  s->tied = tied;
  s->rows = rows;
  s->dim = dim;
  s->hidden = hidden;
  s->stream = parse(stream, {DType::float32, DType::float64});
  s->storage = parse<DType>(storage);
  s->height = height;
  s->width = width;
  check_between("the number of convolutions", int64_t(convolutions.size()), 0, kMaxLayers);
  for (const auto& [in, out, size] : convolutions) s->convolutions[s->layers++] = {in, out, size};
  s->epsilon = epsilon;
  s->anchor_every = anchor_every;
  s->bits_table = std::move(bits);
  s->bits = s->bits_table.data();
  s->bits_count = int64_t(s->bits_table.size());
  s->threads = threads;
  s->table = complete(*s, to_native(parameters));
  return s;
}

// The classes are local to a module: each module has its own.
[[maybe_unused]] void bind_structs(py::module_& m) {
  m.attr("INTERFACE") = kInterface;
  py::class_<PyStage, std::shared_ptr<PyStage>>(m, "Stage", py::module_local())
      .def(py::init(&make_stage), py::arg("block"), py::arg("activation"), py::arg("scheme"),
           py::arg("steps"), py::arg("step"), py::arg("tied"), py::arg("rows"), py::arg("dim"),
           py::arg("hidden"), py::arg("height"), py::arg("width"), py::arg("convolutions"),
           py::arg("epsilon"), py::arg("stream"), py::arg("storage"), py::arg("parameters"),
           py::arg("anchor_every"), py::arg("bits"), py::arg("threads"));

  py::class_<ForwardMemory>(m, "Forward", py::module_local())
      .def(py::init([](PyMemory x, PyMemory y, PyMemory anchors, PyMemory codes, PyMemory scales,
                       PyMemory signs, PyMemory statistics) {
             return ForwardMemory{to_native(x),         to_native(y),      to_native(anchors),
                                  to_native(codes),     to_native(scales), to_native(signs),
                                  to_native(statistics)};
           }),
           py::arg("x"), py::arg("y"), py::arg("anchors"), py::arg("codes"), py::arg("scales"),
           py::arg("signs"), py::arg("statistics"));

  py::class_<ReverseMemory>(m, "Reverse", py::module_local())
      .def(
          py::init([](const std::string& reverse_rule, int order, PyMemory start, PyMemory anchors,
                      PyMemory codes, PyMemory scales, PyMemory signs, PyMemory cotangent,
                      PyMemory grad_x, const std::vector<PyMemory>& gradients, PyMemory nonfinite) {
            return ReverseMemory{parse<ReverseRule>(reverse_rule),
                                 order,
                                 to_native(start),
                                 to_native(anchors),
                                 to_native(codes),
                                 to_native(scales),
                                 to_native(signs),
                                 to_native(cotangent),
                                 to_native(grad_x),
                                 to_native(gradients),
                                 to_native(nonfinite)};
          }),
          py::arg("reverse_rule"), py::arg("order"), py::arg("start"), py::arg("anchors"),
          py::arg("codes"), py::arg("scales"), py::arg("signs"), py::arg("cotangent"),
          py::arg("grad_x"), py::arg("gradients"), py::arg("nonfinite"));
}

// A pass that is ready to run, with what its plan refers to.
template <class Io, template <class> class Plan>
struct PyPlan {
  std::shared_ptr<PyStage> stage;
  std::vector<void*> table;  // of the gradients; made before io, which refers to it
  Io io;
  std::optional<Plan<Io>> plan;

  PyPlan(std::shared_ptr<PyStage> given, const ForwardMemory& memory)
      : stage(std::move(given)), io(checked(*stage, memory)) {}
  PyPlan(std::shared_ptr<PyStage> given, const ReverseMemory& memory)
      : stage(std::move(given)), io(checked(*stage, memory, table)) {}
  PyPlan(const PyPlan&) = delete;
};

// Adds the function plan(stage, io, …) for one type of io, and the class of its result. `make`
// returns the plan; nothing, and Python None, if the pass cannot be run.
template <class Io, class IoMemory, template <class> class Plan, class... More>
auto bind_plan(py::module_& m, const char* name,
               std::optional<Plan<Io>> (*make)(const Stage&, const Io&, const More&...)) {
  using BoundPlan = PyPlan<Io, Plan>;
  m.def("plan",
        [make](std::shared_ptr<PyStage> stage, const IoMemory& io,
               const More&... more) -> std::unique_ptr<BoundPlan> {
          auto bound = std::make_unique<BoundPlan>(std::move(stage), io);
          if (const auto plan = make(*bound->stage, bound->io, more...))
            bound->plan.emplace(*plan);
          else
            bound.reset();
          return bound;
        });
  return py::class_<BoundPlan>(m, name, py::module_local())
      .def_property_readonly("workspace_bytes",
                             [](const BoundPlan& bound) { return bound.plan->workspace_bytes; });
}

}  // namespace
}  // namespace resode
