// The Python module `resode_kernels_cpu`. It allocates no tensors and does not know torch. The GIL
// is released while kernels run.

#include <string>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "builds.h"
#include "cpu/core/pages.h"

namespace resode {

namespace {

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
      : stage(stage), io(io), kernels(kernels_for(stage)), workspace_bytes(run(nullptr, {})) {}

  size_t run(void* workspace, Stop stop) const {
    if constexpr (std::is_same_v<Io, Forward>)
      return kernels.forward(stage, io, workspace, stop);
    else
      return kernels.reverse(stage, io, workspace, stop);
  }
};

template <class Io>
std::optional<Plan<Io>> plan(const Stage& stage, const Io& io) {
  return Plan<Io>(stage, io);
}

// Runs Python without this thread, which comes back now and then to see to the process's signals.
class Signals {
 public:
  Signals() : state(PyEval_SaveThread()) {}
  Signals(const Signals&) = delete;
  ~Signals() { PyEval_RestoreThread(state); }

  // Whether to stop, because a signal's handler has raised an exception.
  bool handle() {
    PyEval_RestoreThread(state);
    raised = PyErr_CheckSignals() != 0;
    state = PyEval_SaveThread();
    return raised;
  }

  bool raised = false;

 private:
  PyThreadState* state;
};

// How long a signal may have to wait, beside the step in work.
constexpr double kSecondsBetweenSignals = 0.05;

template <class Io>
void run(const PyPlan<Io, Plan>& bound, PyMemory workspace, bool handles_signals) {
  void* const at = checked_workspace(to_native(workspace), bound.plan->workspace_bytes, 64);
  bool raised = false;
  {
    Signals signals;
    const auto asked = [](void* s) { return static_cast<Signals*>(s)->handle(); };
    bound.plan->run(at, {handles_signals ? +asked : nullptr, &signals, kSecondsBetweenSignals});
    raised = signals.raised;
  }
  if (raised) throw py::error_already_set();
}

template <class Io, class IoMemory>
void bind_pass(py::module_& m, const char* name) {
  using BoundPlan = PyPlan<Io, Plan>;
  bind_plan<Io, IoMemory>(m, name, &plan<Io>)
      .def("run", &run<Io>, py::arg("workspace"), py::arg("handles_signals"))
      .def_property_readonly("instruction_set",
                             [](const BoundPlan& bound) { return bound.plan->kernels.name; })
      .def_property_readonly("crews", [](const BoundPlan& bound) {
        const Crews crews = bound.plan->kernels.crews(*bound.stage);
        return py::make_tuple(crews.count, crews.threads_each);
      });
}

// See Increment; x absent: undo.
void run_increment(const std::string& stream, int64_t rows, int64_t row, int bits, PyMemory x,
                   PyMemory estimate, PyMemory moved, PyMemory codes, PyMemory scales,
                   int threads) {
  const Increment io = checked(IncrementMemory{
      parse(stream, {DType::float32, DType::float64}), rows, row, bits, to_native(x),
      to_native(estimate), to_native(moved), to_native(codes), to_native(scales), threads});
  const py::gil_scoped_release released;
  widest().increment(io);
}

double measured_fma_peak(int threads, double seconds) {
  check_between("threads", threads, 1, kMaxThreads);
  if (!std::isfinite(seconds)) refuse("seconds must be finite");
  const py::gil_scoped_release released;
  return widest().fma_peak(threads, seconds);
}

}  // namespace

PYBIND11_MODULE(resode_kernels_cpu, m) {
  m.doc() = "Fused CPU kernels of resode_kernels. See resode_kernels/backends/cpp.py.";

  bind_structs(m);

  bind_pass<Forward, ForwardMemory>(m, "ForwardPlan");
  bind_pass<Reverse, ReverseMemory>(m, "ReversePlan");
  m.def("increment", &run_increment, py::arg("stream"), py::arg("rows"), py::arg("row"),
        py::arg("bits"), py::arg("x"), py::arg("estimate"), py::arg("moved"), py::arg("codes"),
        py::arg("scales"), py::arg("threads"));
  m.def("use_large_pages", &use_large_pages, py::arg("address"), py::arg("bytes"));
  m.def("fma_peak", &measured_fma_peak, py::arg("threads"), py::arg("seconds") = 0.2);

  m.def("built", [] { return instruction_sets(false); });
  m.def("supported", [] { return instruction_sets(true); });
  m.def("selected", [] { return std::string(selected ? selected->name : kAuto); });
  m.def("select", &select, py::arg("name"));
}

}  // namespace resode
