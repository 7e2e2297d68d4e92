// The Python module `resode_kernels_cpu`. It checks no arguments, allocates no tensors and does not
// know torch. The GIL is released while kernels run.

#include <string>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "cpu/core/pages.h"

namespace resode {

#if defined(RESODE_WITH_BASELINE)
extern const Kernels kernels_baseline;
#endif
#if defined(RESODE_WITH_AVX2)
extern const Kernels kernels_avx2;
#endif
#if defined(RESODE_WITH_AVX512_NARROW)
extern const Kernels kernels_avx512_narrow;
#endif
#if defined(RESODE_WITH_AVX512)
extern const Kernels kernels_avx512;
#endif

namespace {

struct Build {
  const Kernels* kernels;
  bool supported;  // by this processor
};

// From the plainest to the widest.
std::vector<Build> find_builds() {
  std::vector<Build> all;
  [[maybe_unused]] const auto has_avx512 = [] {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  };
#if defined(RESODE_WITH_BASELINE)
  all.push_back({&kernels_baseline, true});
#endif
#if defined(RESODE_WITH_AVX2)
  all.push_back({&kernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
#if defined(RESODE_WITH_AVX512_NARROW)
  all.push_back({&kernels_avx512_narrow, has_avx512()});
#endif
#if defined(RESODE_WITH_AVX512)
  all.push_back({&kernels_avx512, has_avx512()});
#endif
  return all;
}

const std::vector<Build>& builds() {
  static const std::vector<Build> all = find_builds();
  return all;
}

std::vector<std::string> instruction_sets(bool only_supported) {
  std::vector<std::string> names;
  for (const Build& b : builds())
    if (b.supported || !only_supported) names.push_back(b.kernels->name);
  return names;
}

constexpr const char* kAuto = "auto";

// The build that was selected; null: the best one for each stage.
const Kernels* selected = nullptr;

void select(const std::string& name) {
  if (name == kAuto) {
    selected = nullptr;
    return;
  }
  std::string known = kAuto;
  for (const Build& b : builds()) {
    if (!b.supported) continue;
    if (name == b.kernels->name) {
      selected = b.kernels;
      return;
    }
    known += ", " + std::string(b.kernels->name);
  }
  throw py::value_error("instruction set '" + name +
                        "' cannot be used here; this build and processor have: " + known);
}

// The selected build, else the one of the lowest cost; of equals, the widest.
template <class Cost>
const Kernels& best(Cost cost) {
  if (selected) return *selected;
  const Kernels* found = nullptr;
  for (const Build& b : builds())
    if (b.supported && (!found || cost(*b.kernels) <= cost(*found))) found = b.kernels;
  return *found;
}
const Kernels& kernels_for(const Stage& s) {
  return best([&](const Kernels& k) { return k.cost(s); });
}
const Kernels& widest() {
  return best([](const Kernels&) { return 0; });
}

// A pass with the kernels that suit its stage.
template <class Io>
struct Plan {
  const Stage& stage;
  const Io& io;
  const Kernels& kernels;
  size_t workspace_bytes;

  Plan(const Stage& stage, const Io& io)
      : stage(stage), io(io), kernels(kernels_for(stage)), workspace_bytes(run(nullptr)) {}

  size_t run(void* workspace) const {
    if constexpr (std::is_same_v<Io, Forward>)
      return kernels.forward(stage, io, workspace);
    else
      return kernels.reverse(stage, io, workspace);
  }
};

template <class Io>
std::optional<Plan<Io>> plan(const Stage& stage, const Io& io) {
  return Plan<Io>(stage, io);
}

template <class Io, class PyIo>
void bind_pass(py::module_& m, const char* name) {
  using BoundPlan = PyPlan<Plan<Io>, PyIo>;
  bind_plan<Io, PyIo>(m, name, &plan<Io>)
      .def_property_readonly("instruction_set",
                             [](const BoundPlan& bound) { return bound.plan.kernels.name; })
      .def_property_readonly("crews", [](const BoundPlan& bound) {
        const Crews crews = bound.plan.kernels.crews(*bound.stage);
        return py::make_tuple(crews.count, crews.threads_each);
      });
}

}  // namespace

PYBIND11_MODULE(resode_kernels_cpu, m) {
  m.doc() = "Fused CPU kernels of resode_kernels. See resode_kernels/backends/cpp.py.";

  bind_structs(m);

  bind_pass<Forward, Forward>(m, "ForwardPlan");
  bind_pass<Reverse, PyReverse>(m, "ReversePlan");
  m.def("use_large_pages", &use_large_pages, py::arg("address"), py::arg("bytes"));
  m.def(
      "fma_peak", [](int threads, double seconds) { return widest().fma_peak(threads, seconds); },
      py::arg("threads"), py::arg("seconds") = 0.2, py::call_guard<py::gil_scoped_release>());

  m.def("built", [] { return instruction_sets(false); });
  m.def("supported", [] { return instruction_sets(true); });
  m.def("selected", [] { return std::string(selected ? selected->name : kAuto); });
  m.def("select", &select, py::arg("name"));
}

}  // namespace resode
