// exp, expm1, tanh and the normal distribution for SIMD vectors of float and double, within about
// three units in the last place over the range the activations use.

#pragma once

#include "simd.h"

namespace {

template <class T>
struct Constants;

template <>
struct Constants<float> {
  static constexpr int mantissa_bits = 23, exponent_bias = 127;
  static constexpr float round = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float exp_limit = 87.3f;   // e^±limit is a normal number
  static constexpr float tanh_limit = 9.01f;  // tanh rounds to 1 beyond it
  static constexpr float normal_limit =
      13.2f;  // Φ(−limit) is next to nothing, e^(−limit²/2) normal
  static constexpr int exp_degree = 7;
  // tools/fit_tanh.py --limit 9.01 --degree 4
  static constexpr float tanh_p[] = {9.999999792e-01f, 1.338037096e-01f, 3.494810339e-03f,
                                     2.059626407e-05f, 1.333683820e-08f};
  static constexpr float tanh_q[] = {1.0f, 4.671368637e-01f, 2.587402392e-02f, 3.284362143e-04f,
                                     7.769278151e-07f};
  // tools/fit_normal_cdf.py --limit 14 --degree 9
  static constexpr float mills[] = {
      7.552851383e-01f,  -6.078966183e-01f, 3.871366841e-01f, -1.865226849e-01f, 6.040668873e-02f,
      -7.529250703e-03f, -3.526183700e-03f, 1.572317879e-03f, 2.012617303e-04f,  -1.201844011e-04f};
};

template <>
struct Constants<double> {
  static constexpr int mantissa_bits = 52, exponent_bias = 1023;
  static constexpr double round = 6755399441055744.0;  // 1.5 · 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr double exp_limit = 708.3;
  static constexpr double tanh_limit = 19.1;
  static constexpr double normal_limit = 37.6;
  static constexpr int exp_degree = 13;
  // tools/fit_normal_cdf.py --limit 39 --degree 22
  static constexpr double mills[] = {
      0.75528513041575148,      -0.607896641971891759,   0.387137400742218879,
      -0.186521857959694163,    0.0603965748906994641,   -0.00754018896559305902,
      -0.00347969236224253334,  0.0016308184418903596,   0.000133344254019049116,
      -0.000231094818319376211, -1.90786653166135743e-6, 0.0000351441811577609727,
      7.15005595921609866e-7,   -5.91889273176323645e-6, -6.25132104047868019e-7,
      1.01980485181351727e-6,   2.63682485764076251e-7,  -1.54263205367710739e-7,
      -7.63808205349045035e-8,  1.45785933470364597e-8,  1.39240239935017101e-8,
      7.26954547902668946e-11,  -9.65342542022850467e-10};
};

// V is a vector of T, or a Pair of such.
template <class T>
struct Math : Constants<T> {
  using Scalar = T;
  using C = Constants<T>;

  template <class V>
  static RESODE_INLINE V where_less(V x, T y, V a, V b) {
    return ::where_less(x, y, a, b);
  }
  template <class V>
  static RESODE_INLINE V clamp(V x, T limit) {
    return ::clamp(x, limit);
  }

  static constexpr T inverse_factorial(int n) {
    T product = 1;
    for (int i = 2; i <= n; ++i) product *= i;
    return 1 / product;
  }

  // e^x = 2^n e^r with n = round(x / ln 2), |r| ≤ ln(2)/2. Gives 2^n and e^r − 1, the latter as its
  // Taylor series r + r²/2! + r³/3! + … Here and below the caller makes sure that |x| ≤ exp_limit.
  template <class V>
  static RESODE_INLINE void reduce(V x, V& power, V& expm1_r) {
    constexpr T log2e = 1.44269504088896340735992468100189214;
    const V shifted = x * log2e + C::round;
    const V n = shifted - C::round;
    const V r = (x - n * C::ln2_high) - n * C::ln2_low;
    V series = r * inverse_factorial(C::exp_degree) + inverse_factorial(C::exp_degree - 1);
#pragma GCC unroll 16
    for (int i = C::exp_degree - 2; i > 1; --i) series = series * r + inverse_factorial(i);
    expm1_r = (r * r) * series + r;
    power = power_of_two(shifted);
  }

  // 2^n from the sum of n and C::round, whose low bits hold n
  static RESODE_INLINE Vec<T> power_of_two(Vec<T> shifted) {
    const auto bits = bit_cast<typename Simd<T>::Int>(shifted);
    return bit_cast<Vec<T>>((bits + C::exponent_bias) << C::mantissa_bits);
  }
  template <class V>
  static RESODE_INLINE Pair<V> power_of_two(Pair<V> shifted) {
    return {power_of_two(shifted.a), power_of_two(shifted.b)};
  }

  template <class V>
  static RESODE_INLINE V exp(V x) {
    V power, e;
    reduce(x, power, e);
    return power * e + power;
  }

  template <class V>
  static RESODE_INLINE V expm1(V x) {
    V power, e;
    reduce(x, power, e);
    return power * e + (power - T(1));
  }

  // float:   tanh x ≈ x P(x²)/Q(x²) up to the limit and never beyond ±1
  // double:  tanh x = e/(e + 2) with e = exp(2x) − 1, which does not cancel near zero
  template <class V>
  static RESODE_INLINE V tanh(V x) {
    if constexpr (std::is_same_v<T, float>) {
      const V s = at_most(x * x, C::tanh_limit * C::tanh_limit);
      V p = s * C::tanh_p[4] + C::tanh_p[3], q = s * C::tanh_q[4] + C::tanh_q[3];
#pragma GCC unroll 4
      for (int i = 2; i >= 0; --i) p = p * s + C::tanh_p[i], q = q * s + C::tanh_q[i];
      return clamp(x * p / q, T(1));
    } else {
      const V e = expm1(T(2) * clamp(x, C::tanh_limit));
      return e / (e + T(2));
    }
  }

  // Φ(−a) = e^(−a²/2) m(a) for a ≥ 0, where (a + 4) m(a) is a smooth function of
  // t = (a − 4)/(a + 4) and is approximated by a polynomial.
  template <class V>
  static RESODE_INLINE void normal(V z, V& cdf, V& pdf) {
    constexpr T inverse_sqrt_2pi = 0.398942280401432677939946059934381868;
    constexpr int terms = sizeof(C::mills) / sizeof(T);
    const V a = clamp(where_less(z, T(0), -z, z), C::normal_limit);
    const V scale = T(1) / (a + T(4));
    const V t = (a - T(4)) * scale;
    V m = t * C::mills[terms - 1] + C::mills[terms - 2];
#pragma GCC unroll 32
    for (int i = terms - 3; i >= 0; --i) m = m * t + C::mills[i];
    const V e = exp(a * a * T(-0.5));
    const V tail = e * (m * scale);
    cdf = where_less(z, T(0), tail, T(1) - tail);
    pdf = e * inverse_sqrt_2pi;
  }
};

}  // namespace
