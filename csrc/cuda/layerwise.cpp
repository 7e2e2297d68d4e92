// The layer-wise functions of the Python module `resode_kernels_cuda`.

#include "layerwise.h"

#include <tuple>
#include <utility>

#include "../bindings.h"

namespace resode {
namespace {

// In Python a tensor is (address, dtype), with the address 0 where there is none.
using PyArray = std::pair<uintptr_t, std::string>;
// groups, positions, channels, channels_adjoin
using PyRows = std::tuple<int64_t, int64_t, int64_t, bool>;
// a, y, x, activation
using PyTerm = std::tuple<double, PyArray, PyArray, std::string>;
// mean, variance, gamma, beta, epsilon
using PyNormalization = std::tuple<PyArray, PyArray, PyArray, PyArray, double>;

Array to_native(const PyArray& array) {
  return {reinterpret_cast<void*>(array.first),
          parse(array.second, {DType::float32, DType::float16, DType::bfloat16})};
}

Rows to_native(const PyRows& rows) {
  const auto& [groups, positions, channels, channels_adjoin] = rows;
  return {groups, positions, channels, channels_adjoin};
}

Term to_native(const PyTerm& term) {
  const auto& [a, y, x, activation] = term;
  return {float(a), to_native(y), to_native(x), parse<Activation>(activation)};
}

Normalization to_native(const PyNormalization& normalization) {
  const auto& [mean, variance, gamma, beta, epsilon] = normalization;
  return {to_native(mean), to_native(variance), to_native(gamma), to_native(beta), float(epsilon)};
}

float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

}  // namespace

void bind_layerwise(py::module_& m) {
  m.attr("most_terms") = kMaxTerms;

  m.def("combine",
        [](const Gpu& gpu, const PyArray& out, int64_t elements, const std::vector<PyTerm>& terms) {
          std::vector<Term> summands;
          for (const PyTerm& term : terms) summands.push_back(to_native(term));
          combine(gpu, to_native(out), elements, summands);
        });

  m.def("apply_activation",
        [](const Gpu& gpu, const PyRows& rows, const PyArray& out, const PyArray& z,
           const PyArray& bias, const PyArray& d, const std::string& activation) {
          apply_activation(gpu, to_native(rows), to_native(out), to_native(z), to_native(bias),
                           to_native(d), parse<Activation>(activation));
        });

  m.def("statistics", [](const Gpu& gpu, const PyRows& rows, const PyArray& z, uintptr_t mean,
                         uintptr_t variance, int programs, uintptr_t workspace) {
    return statistics(gpu, to_native(rows), to_native(z), floats(mean), floats(variance), programs,
                      floats(workspace));
  });

  m.def("normalize", [](const Gpu& gpu, const PyRows& rows, const PyArray& out, const PyArray& z,
                        const PyNormalization& normalization, const std::string& activation) {
    normalize(gpu, to_native(rows), to_native(out), to_native(z), to_native(normalization),
              parse<Activation>(activation));
  });

  m.def("normalization_vjp", [](const Gpu& gpu, const PyRows& rows, const PyArray& dz,
                                uintptr_t d_gamma, uintptr_t d_beta, const PyArray& d,
                                const PyArray& z, const PyNormalization& normalization,
                                bool of_batch, const std::string& activation, int programs,
                                uintptr_t workspace) {
    return normalization_vjp(gpu, to_native(rows), to_native(dz), floats(d_gamma), floats(d_beta),
                             to_native(d), to_native(z), to_native(normalization), of_batch,
                             parse<Activation>(activation), programs, floats(workspace));
  });
}

}  // namespace resode
