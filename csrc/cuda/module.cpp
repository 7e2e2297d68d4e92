// The Python module `_CUDA`: checks nothing, allocates nothing, knows no torch. It links the CUDA
// runtime statically and can be imported where there is no GPU.

#include "../bindings.h"
#include "fused.h"

namespace resode {

void bind_layerwise(py::module_& m);

namespace {

template <class Io>
void bind_passes(py::module_& m) {
  m.def("plan", [](const PyStage& s, const Io& io, const Gpu& gpu) -> py::object {
    const auto p = plan(s, io, gpu);
    if (!p) return py::none();
    return py::dict(py::arg("rows") = p->tiling.rows, py::arg("width") = p->tiling.width,
                    py::arg("chunk") = p->tiling.chunk, py::arg("shared") = p->shared,
                    py::arg("threads") = kThreads, py::arg("programs") = p->programs,
                    py::arg("steps") = p->steps);
  });
  m.def("workspace_bytes",
        [](const PyStage& s, const Io& io, const Gpu& gpu) { return run(s, io, gpu, nullptr); });
  m.def(
      "run",
      [](const PyStage& s, const Io& io, const Gpu& gpu, uintptr_t workspace) {
        run(s, io, gpu, reinterpret_cast<void*>(workspace));
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_CUDA, m) {
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
  bind_passes<Forward>(m);
  bind_passes<PyReverse>(m);
  bind_layerwise(m);
  m.def("architectures", [] { return std::string(RESODE_CUDA_ARCHS); });
}

}  // namespace resode
