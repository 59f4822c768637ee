// Elementary functions on vectors: float by polynomials fitted for this file, double through the C library lane by lane.
#pragma once

#include <math.h>

#include "simd.h"

namespace ft {
namespace FT_LEVEL {

template <typename Function>
inline Vec<double> per_lane(Vec<double> x, Function f) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = f(x[i]);
  return x;
}

// p[0] + p[1] x + ... by Horner's rule.
template <int n>
inline Vec<float> polynomial(const float (&p)[n], Vec<float> x) {
  Vec<float> y = splat<float>(p[n - 1]);
  for (int i = n - 2; i >= 0; --i) y = y * x + p[i];
  return y;
}

// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2; the minimax polynomial of degree 6 has relative error 2e-9.
// Exactly 0 at -inf, inf past 88.73, NaN stays NaN.
inline Vec<float> exp(Vec<float> x) {
  const Vec<float> lowest = splat<float>(-104.0f), highest = splat<float>(89.0f);
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  const Vec<float> n = (x * 0x1.715476p+0f + 0x1.8p23f) - 0x1.8p23f;
  const Vec<float> r = (x - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first exact times n
  const float p[] = {1.0f, 1.0f, 0x1.fffffap-2f, 0x1.55540ap-3f, 0x1.55589ap-5f, 0x1.126d0cp-7f, 0x1.6ab97ap-10f};
  const Vec<float> y = polynomial(p, r);
#if defined(FT_AVX512)
  return (Vec<float>)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  const Ints<float> whole = __builtin_convertvector(n, Ints<float>), part = whole >> 1;  // in two steps: 2^n may overflow
  return y * (Vec<float>)((part + 127) << 23) * (Vec<float>)((whole - part + 127) << 23);
#endif
}

inline Vec<double> exp(Vec<double> x) {
  return per_lane(x, [](double v) { return ::exp(v); });
}

// 1 / x to one or two units in the last place: the division instruction is the slowest of them all. x is finite and normal.
inline Vec<float> reciprocal(Vec<float> x) {
#if defined(FT_AVX512)
  const Vec<float> y = (Vec<float>)_mm512_rcp14_ps((__m512)x);
  return y * (2 - x * y);
#else
  return 1 / x;
#endif
}

// 1 / (1 + exp(-x)) and, without cancellation, one minus that.
template <typename C>
inline Vec<C> sigmoid(Vec<C> x, Vec<C>& complement) {
  const Vec<C> e = FT_LEVEL::exp(-x), s = 1 / (1 + e);
  const Vec<C> small = e * s, large = 1 - s;  // exact enough for x >= 0 and for x < 0
  complement = x < 0 ? large : small;
  return s;
}

// The standard normal distribution function and exp(-x^2 / 2), which it needs and its derivative too.
// For z = |x| / sqrt(2) and t = 1 / (1 + 0.3275911 z): erfc(z) = t p(t) exp(-z^2) (the form of Abramowitz and Stegun 7.1.26);
// the polynomial is fitted for z <= 10 with relative error 4e-9.
inline Vec<float> normal_cdf(Vec<float> x, Vec<float>& gauss) {
  const Vec<float> z = (x < 0 ? -x : x) * 0x1.6a09e6p-1f;
  const Vec<float> t = reciprocal(1 + 0.3275911f * z);
  const float p[] = {0.184779033f, 0.185794398f,  0.165635899f, 0.205950767f,  -0.0503783859f,
                     0.501362979f, -0.560039878f, 0.627344072f, -0.317124724f, 0.0566758104f};
  gauss = FT_LEVEL::exp(-z * z);
  const Vec<float> tail = 0.5f * (t * polynomial(p, t)) * gauss;  // the probability beyond |x|
  return x < 0 ? tail : 1 - tail;
}

inline Vec<double> normal_cdf(Vec<double> x, Vec<double>& gauss) {
  gauss = FT_LEVEL::exp(-0.5 * x * x);
  return per_lane(x, [](double v) { return 0.5 * ::erfc(v * -0.70710678118654752); });
}

}  // namespace FT_LEVEL
}  // namespace ft
