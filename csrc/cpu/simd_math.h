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

// 2^n y for whole n; in two steps where 2^n alone may leave the range.
inline Vec<float> times_power(Vec<float> y, Vec<float> n) {
#if defined(FT_AVX512)
  return (Vec<float>)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  const Ints<float> whole = __builtin_convertvector(n, Ints<float>), part = whole >> 1;
  return y * (Vec<float>)((part + 127) << 23) * (Vec<float>)((whole - part + 127) << 23);
#endif
}

// x = n ln 2 + r, n whole, |r| <= ln(2) / 2; ln 2 in two parts, the first exact times n. |x| < 2^22.
inline Vec<float> reduce(Vec<float> x, Vec<float>& n) {
  n = (x * 0x1.715476p+0f + 0x1.8p23f) - 0x1.8p23f;
  return (x - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
}

// (exp(r) - 1) / r for |r| <= ln(2) / 2: exp(r) to a relative error of 2e-9.
constexpr float kExpm1[] = {1.0f, 0x1.fffffap-2f, 0x1.55540ap-3f, 0x1.55589ap-5f, 0x1.126d0cp-7f, 0x1.6ab97ap-10f};

// Exactly 0 at -inf, inf past 88.73, NaN stays NaN.
inline Vec<float> exp(Vec<float> x) {
  const Vec<float> lowest = splat<float>(-104.0f), highest = splat<float>(89.0f);
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  Vec<float> n;
  const Vec<float> r = reduce(x, n);
  return times_power(1 + r * polynomial(kExpm1, r), n);
}

inline Vec<double> exp(Vec<double> x) {
  return per_lane(x, [](double v) { return ::exp(v); });
}

// 2^x for |x| <= 1/2 to a relative error of 1.6e-8, exact at 0.
constexpr float kExp2[] = {1.0f,           0x1.62e430p-1f,  0x1.ebfbdcp-3f, 0x1.c6aee8p-5f,
                           0x1.3b2d4cp-7f, 0x1.5f3e52p-10f, 0x1.41fbbcp-13f};

// 2^x to 1.3 units of 2^-24; exactly 0 at -inf, NaN stays NaN. Minimax polynomials of degree 6 with p(0) = 1. Without AVX-512
// results below 2^-126 are 0 and those from 2^127.5 on infinite.
inline Vec<float> exp2(Vec<float> x) {
#if defined(FT_AVX512)  // the instructions do the ends of the range: reduce gives x - floor(x), scalef multiplies by 2^floor(x)
  const float p[] = {1.0f, 0x1.62e42cp-1f, 0x1.ebfd58p-3f, 0x1.c68912p-5f, 0x1.3d0b92p-7f, 0x1.46d64ep-10f, 0x1.c54174p-13f};
  return times_power(polynomial(p, (Vec<float>)_mm512_reduce_ps((__m512)x, 1)), x);
#else
  const float whole = 0x1.8p23f + 127;  // the last bits of x + whole are the exponent of 2^x, from 0 for 0 to 255 for infinity
  x = minimum(splat<float>(128.0f), maximum<float>(splat<float>(-127.0f), x));
  const Vec<float> shifted = x + whole, power = (Vec<float>)((Ints<float>)shifted << 23);
  return polynomial(kExp2, x - (shifted - whole)) * power;
#endif
}

inline Vec<double> exp2(Vec<double> x) {
  return per_lane(x, [](double v) { return ::exp2(v); });
}

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.69314718055994531;

// The natural logarithm of x >= 1/2: x = 2^e m, 2/3 <= m < 4/3, log m = 2 atanh((m - 1) / (m + 1)). NaN if x is not finite.
inline Vec<float> log(Vec<float> x) {
  const Ints<float> e = ((Ints<float>)x - 0x3F2AAAAB) >> 23;
  const Vec<float> m = (Vec<float>)((Ints<float>)x - (e << 23)), s = (m - 1) / (m + 1), ss = s * s;
  const float p[] = {2 / 3.0f, 2 / 5.0f, 2 / 7.0f, 2 / 9.0f};
  const Vec<float> low = __builtin_convertvector(e, Vec<float>);
  return low * 0x1.62e400p-1f + (2 * s + (ss * s * polynomial(p, ss) + low * 0x1.7f7d1cp-20f)) + (x - x);
}
inline Vec<double> log(Vec<double> x) {
  return per_lane(x, [](double v) { return ::log(v); });
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

// tanh(x) to two units in the last place: an odd polynomial up to 0.6, 1 - 2 / (exp(2 |x|) + 1) beyond. NaN stays NaN.
inline Vec<float> tanh(Vec<float> x) {
  const float p[] = {-0x1.55553ep-2f, 0x1.1109bep-3f, -0x1.b89abap-5f, 0x1.54c3c2p-6f, -0x1.828776p-8f};
  const Vec<float> xx = x * x, small = x + x * xx * polynomial(p, xx);
  const Ints<float> sign = Ints<float>{} + INT32_MIN;
  const Vec<float> minus = (Vec<float>)((Ints<float>)x | sign);  // -|x|
  const Vec<float> y = maximum<float>(minus, splat<float>(-10.0f)) * -0x1.715476p+1f;
  const Vec<float> shifted = y + 0x1.8p23f;  // y, rounded to a whole number, in its last bits
  const Vec<float> power =
      (Vec<float>)((Ints<float>)polynomial(kExp2, y - (shifted - 0x1.8p23f)) + ((Ints<float>)shifted << 23));
  const Vec<float> large = 1 - 2 * reciprocal(power + 1);
  return minus <= -0.6f ? (Vec<float>)((Ints<float>)large | ((Ints<float>)x & sign)) : small;
}
inline Vec<double> tanh(Vec<double> x) {
  return per_lane(x, [](double v) { return ::tanh(v); });
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
