// The Python module `_C`: checks nothing, allocates nothing, knows no torch. The GIL is released
// while kernels run.

#include <string>
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

// What a stage runs on: what was asked for, or null: whatever is best for the stage.
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

// The best of those that were asked for; of equals, the widest.
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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Fused CPU kernels of resode_kernels. See resode_kernels/backends/cpp.py.";

  bind_structs(m);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("workspace_bytes",
        [](const PyStage& s, const Forward& io) { return kernels_for(s).forward(s, io, nullptr); });
  m.def("workspace_bytes", [](const PyStage& s, const PyReverse& io) {
    return kernels_for(s).reverse(s, io, nullptr);
  });
  m.def(
      "run",
      [](const PyStage& s, const Forward& io, uintptr_t workspace) {
        kernels_for(s).forward(s, io, reinterpret_cast<void*>(workspace));
      },
      no_gil);
  m.def(
      "run",
      [](const PyStage& s, const PyReverse& io, uintptr_t workspace) {
        kernels_for(s).reverse(s, io, reinterpret_cast<void*>(workspace));
      },
      no_gil);
  m.def("use_large_pages", &use_large_pages, py::arg("address"), py::arg("bytes"));
  m.def(
      "fma_peak", [](int threads, double seconds) { return widest().fma_peak(threads, seconds); },
      py::arg("threads"), py::arg("seconds") = 0.2, no_gil);

  m.def("built", [] { return instruction_sets(false); });
  m.def("supported", [] { return instruction_sets(true); });
  m.def("selected", [] { return std::string(selected ? selected->name : kAuto); });
  m.def("select", &select, py::arg("name"));
  m.def("crews", [](const PyStage& s) {
    const Crews crews = kernels_for(s).crews(s);
    return py::make_tuple(crews.count, crews.threads_each);
  });
  m.def("picked", [](const PyStage& s) { return std::string(kernels_for(s).name); });
}

}  // namespace resode
