// The layer-wise functions of the Python module `_CUDA`.

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

Array made(const PyArray& array) {
  const char* not_taken = "";
  return {reinterpret_cast<void*>(array.first),
          parse<DType>(array.second, {"float32", not_taken, "float16", "bfloat16"})};
}

Rows made(const PyRows& rows) {
  const auto& [groups, positions, channels, channels_adjoin] = rows;
  return {groups, positions, channels, channels_adjoin};
}

Term made(const PyTerm& term) {
  const auto& [a, y, x, activation] = term;
  return {float(a), made(y), made(x), parse_activation(activation)};
}

Normalization made(const PyNormalization& by) {
  const auto& [mean, variance, gamma, beta, epsilon] = by;
  return {made(mean), made(variance), made(gamma), made(beta), float(epsilon)};
}

float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

}  // namespace

void bind_layerwise(py::module_& m) {
  m.attr("most_terms") = kMaxTerms;

  m.def("combine",
        [](const Gpu& gpu, const PyArray& out, int64_t elements, const std::vector<PyTerm>& terms) {
          std::vector<Term> summands;
          for (const PyTerm& term : terms) summands.push_back(made(term));
          combine(gpu, made(out), elements, summands);
        });

  m.def("apply_activation",
        [](const Gpu& gpu, const PyRows& rows, const PyArray& out, const PyArray& z,
           const PyArray& bias, const PyArray& d, const std::string& activation) {
          apply_activation(gpu, made(rows), made(out), made(z), made(bias), made(d),
                           parse_activation(activation));
        });

  m.def("statistics", [](const Gpu& gpu, const PyRows& rows, const PyArray& z, uintptr_t mean,
                         uintptr_t variance, int programs, uintptr_t workspace) {
    return statistics(gpu, made(rows), made(z), floats(mean), floats(variance), programs,
                      floats(workspace));
  });

  m.def("normalize", [](const Gpu& gpu, const PyRows& rows, const PyArray& out, const PyArray& z,
                        const PyNormalization& by, const std::string& activation) {
    normalize(gpu, made(rows), made(out), made(z), made(by), parse_activation(activation));
  });

  m.def("normalization_vjp",
        [](const Gpu& gpu, const PyRows& rows, const PyArray& dz, uintptr_t d_gamma,
           uintptr_t d_beta, const PyArray& d, const PyArray& z, const PyNormalization& by,
           bool of_batch, const std::string& activation, int programs, uintptr_t workspace) {
          return normalization_vjp(gpu, made(rows), made(dz), floats(d_gamma), floats(d_beta),
                                   made(d), made(z), made(by), of_batch,
                                   parse_activation(activation), programs, floats(workspace));
        });
}

}  // namespace resode
