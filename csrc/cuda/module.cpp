// The Python module `resode_kernels_cuda`. It allocates no tensors and does not know
// torch. It links the CUDA runtime statically and can be imported where there is no GPU.

#include "../bindings.h"
#include "fused.h"

namespace resode {

void bind_layerwise(py::module_& m);

namespace {

template <class Io, class IoMemory>
void bind_pass(py::module_& m, const char* name) {
  using BoundPlan = PyPlan<Io, Plan>;
  bind_plan<Io, IoMemory>(m, name, &plan)
      .def(
          "run",
          [](const BoundPlan& bound, PyMemory workspace) {
            bound.plan->run(
                checked_workspace(to_native(workspace), bound.plan->workspace_bytes, 64));
          },
          py::arg("workspace"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("layout", [](const BoundPlan& bound) {
        const Launches& l = bound.plan->launches;
        return py::dict(py::arg("rows") = l.tiling.rows, py::arg("width") = l.tiling.width,
                        py::arg("chunk") = l.tiling.chunk, py::arg("shared") = l.shared,
                        py::arg("threads") = kThreads, py::arg("programs") = l.programs,
                        py::arg("steps") = l.steps);
      });
}

}  // namespace

PYBIND11_MODULE(resode_kernels_cuda, m) {
  m.doc() = "Fused CUDA kernels of resode_kernels. See resode_kernels/backends/cuda.";
  bind_structs(m);
  py::class_<Gpu>(m, "Gpu", py::module_local())
      .def(py::init([](int index, int processors, size_t shared_memory, size_t cache, bool tf32,
                       uintptr_t stream) {
             return Gpu{index, processors, shared_memory,
                        cache, tf32,       reinterpret_cast<cudaStream_t>(stream)};
           }),
           py::kw_only(), py::arg("index"), py::arg("processors"), py::arg("shared_memory"),
           py::arg("cache"), py::arg("tf32"), py::arg("stream"));
  bind_pass<Forward, ForwardMemory>(m, "ForwardPlan");
  bind_pass<Reverse, ReverseMemory>(m, "ReversePlan");
  bind_layerwise(m);
  m.def("architectures", [] { return std::string(RESODE_CUDA_ARCHS); });
}

}  // namespace resode
