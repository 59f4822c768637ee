// As much of AVX-512, its bfloat16 instructions and AMX as csrc/cpu/*.h use, emulated with AVX2, so that those levels run on
// machines without: comes before the compiler's own <immintrin.h> in the include path. Vectors of 64 bytes are two of 32 there.
//
// What this shows: every number the kernels compute, but for the last bits of the approximate instructions, and every address
// they touch. What it cannot show: speed, and what the compiler makes of the code for the real instructions.
#pragma once

#include_next <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(FT_AVX512)

namespace ft {
namespace FT_LEVEL {
namespace emulated {

// Lane by lane.
template <typename T, typename V>
struct Lanes {
  T lane[sizeof(V) / sizeof(T)];
  static constexpr int count = sizeof(V) / sizeof(T);
  explicit Lanes(V v) { memcpy(lane, &v, sizeof v); }
  Lanes() {}
  operator V() const {
    V v;
    memcpy(&v, lane, sizeof v);
    return v;
  }
};
template <typename T, typename V, typename Function>
inline V map(V v, Function f) {
  Lanes<T, V> x(v);
  for (T& lane : x.lane) lane = f(lane);
  return x;
}
template <typename T, typename V, typename Function>
inline uint64_t mask(V a, V b, Function f) {
  const Lanes<T, V> x(a), y(b);
  uint64_t bits = 0;
  for (int i = 0; i < x.count; ++i) bits |= uint64_t(f(x.lane[i], y.lane[i])) << i;
  return bits;
}
template <typename T, typename V>
inline V mask_mov(V source, uint64_t bits, V a) {
  Lanes<T, V> x(source), y(a);
  for (int i = 0; i < x.count; ++i)
    if (bits >> i & 1) x.lane[i] = y.lane[i];
  return x;
}
template <typename T, typename... Values>
inline __m512i repeated(Values... values) {
  const T some[] = {(T)values...};
  Lanes<T, __m512i> x;
  for (int i = 0; i < x.count; ++i) x.lane[i] = some[i % sizeof...(values)];
  return x;
}

inline uint16_t bfloat16_of(float x) {  // to nearest even; subnormal numbers become 0, as in the instruction
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (isnan(x)) return bits >> 16 | 0x40;
  if ((bits & 0x7F800000) == 0) return bits >> 16 & 0x8000;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float float_of(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline float dot(float sum, uint32_t a, uint32_t b) {
  sum = fmaf(float_of(a >> 16), float_of(b >> 16), sum);
  return fmaf(float_of(a & 0xFFFF), float_of(b & 0xFFFF), sum);
}

inline __m512 max(__m512 a, __m512 b) { return a > b ? a : b; }
inline __m512d max(__m512d a, __m512d b) { return a > b ? a : b; }
inline __m512 min(__m512 a, __m512 b) { return a < b ? a : b; }
inline float sum(__m512 v) {
  Lanes<float, __m512> x(v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.lane[i] += x.lane[i + half];
  return x.lane[0];
}
inline __m512i widen(__m256i v) {
  const Lanes<uint16_t, __m256i> x(v);
  Lanes<uint32_t, __m512i> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i];
  return y;
}
inline __m512 from_half(__m256i v) {
  const Lanes<__m128i, __m256i> x(v);
  Lanes<__m256, __m512> y;
  for (int i = 0; i < 2; ++i) y.lane[i] = _mm256_cvtph_ps(x.lane[i]);
  return y;
}
inline __m256i to_half(__m512 v) {
  const Lanes<__m256, __m512> x(v);
  Lanes<__m128i, __m256i> y;
  for (int i = 0; i < 2; ++i) y.lane[i] = _mm256_cvtps_ph(x.lane[i], _MM_FROUND_TO_NEAREST_INT);
  return y;
}
inline __m256bh to_bfloat16(__m512 v) {
  const Lanes<float, __m512> x(v);
  Lanes<uint16_t, __m256bh> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = bfloat16_of(x.lane[i]);
  return y;
}
inline __m512bh to_bfloat16(__m512 high, __m512 low) {
  const Lanes<float, __m512> x(low), y(high);
  Lanes<uint16_t, __m512bh> z;
  for (int i = 0; i < 32; ++i) z.lane[i] = bfloat16_of(i < 16 ? x.lane[i] : y.lane[i - 16]);
  return z;
}
inline __m512 dot(__m512 sums, __m512bh a, __m512bh b) {
  Lanes<float, __m512> x(sums);
  const Lanes<uint32_t, __m512bh> y(a), z(b);
  for (int i = 0; i < 16; ++i) x.lane[i] = dot(x.lane[i], y.lane[i], z.lane[i]);
  return x;
}
inline __m512i permute(__m512i order, __m512i v) {
  const Lanes<uint16_t, __m512i> x(order), y(v);
  Lanes<uint16_t, __m512i> z;
  for (int i = 0; i < 32; ++i) z.lane[i] = y.lane[x.lane[i] % 32];
  return z;
}
inline __m512i shuffle(__m512i v, int order) {
  const Lanes<uint32_t, __m512i> x(v);
  Lanes<uint32_t, __m512i> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return y;
}
inline __m512i add(__m512i a, __m512i b) {
  Lanes<uint32_t, __m512i> x(a);
  const Lanes<uint32_t, __m512i> y(b);
  for (int i = 0; i < 16; ++i) x.lane[i] += y.lane[i];
  return x;
}
inline __m512i multiply_even(__m512i a, __m512i b) {
  const Lanes<uint64_t, __m512i> x(a), y(b);
  Lanes<uint64_t, __m512i> z;
  for (int i = 0; i < 8; ++i) z.lane[i] = (x.lane[i] & 0xFFFFFFFF) * (y.lane[i] & 0xFFFFFFFF);
  return z;
}
inline __m512 scale(__m512 a, __m512 b) {
  Lanes<float, __m512> x(a);
  const Lanes<float, __m512> y(b);
  for (int i = 0; i < 16; ++i) {
    const float n = floorf(y.lane[i]);
    x.lane[i] = isnan(n) ? n : (float)ldexp((double)x.lane[i], (int)fminf(fmaxf(n, -300.0f), 300.0f));
  }
  return x;
}
inline float reciprocal(float x) {  // 14 bits of it
  const float y = 1 / x;
  uint32_t bits;
  memcpy(&bits, &y, sizeof bits);
  bits &= ~uint32_t(0) << 9;
  float cut;
  memcpy(&cut, &bits, sizeof cut);
  return cut;
}

// Tile registers, in the one shape the kernels give them.
struct Tile {
  uint32_t rows[16][16];
};
inline thread_local Tile tiles[8];

inline void load(int tile, const void* from, int64_t stride) {
  for (int i = 0; i < 16; ++i) memcpy(tiles[tile].rows[i], (const char*)from + i * stride, 64);
}
inline void store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < 16; ++i) memcpy((char*)to + i * stride, tiles[tile].rows[i], 64);
}
inline void multiply(int c, int a, int b) {
  for (int row = 0; row < 16; ++row)
    for (int col = 0; col < 16; ++col) {
      float sum;
      memcpy(&sum, &tiles[c].rows[row][col], sizeof sum);
      for (int k = 0; k < 16; ++k) sum = dot(sum, tiles[a].rows[row][k], tiles[b].rows[k][col]);
      memcpy(&tiles[c].rows[row][col], &sum, sizeof sum);
    }
}

}  // namespace emulated
}  // namespace FT_LEVEL
}  // namespace ft

// clang-format off: a table
#define _mm512_add_epi32(a, b)               emulated::add(a, b)
#define _mm512_cmple_epu16_mask(a, b)        emulated::mask<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return x <= y; })
#define _mm512_cvtepu16_epi32(a)             emulated::widen(a)
#define _mm512_cvtne2ps_pbh(high, low)       emulated::to_bfloat16(high, low)
#define _mm512_cvtneps_pbh(a)                emulated::to_bfloat16(a)
#define _mm512_cvtph_ps(a)                   emulated::from_half(a)
#define _mm512_cvtps_ph(a, rounding)         emulated::to_half(a)
#define _mm512_dpbf16_ps(sum, a, b)          emulated::dot(sum, a, b)
#define _mm512_load_si512(p)                 (*(const __m512i*)(p))
#define _mm512_mask_mov_pd(source, bits, a)  emulated::mask_mov<double>(source, bits, a)
#define _mm512_mask_mov_ps(source, bits, a)  emulated::mask_mov<float>(source, bits, a)
#define _mm512_max_pd(a, b)                  emulated::max(a, b)
#define _mm512_max_ps(a, b)                  emulated::max(a, b)
#define _mm512_min_ps(a, b)                  emulated::min(a, b)
#define _mm512_mul_epu32(a, b)               emulated::multiply_even(a, b)
#define _mm512_permutexvar_epi16(order, a)   emulated::permute(order, a)
#define _mm512_rcp14_ps(a)                   emulated::map<float>(a, emulated::reciprocal)
#define _mm512_reduce_add_ps(a)              emulated::sum(a)
#define _mm512_reduce_ps(a, floor)           emulated::map<float>(a, [](float x) { return isinf(x) ? 0 : x - floorf(x); })
#define _mm512_scalef_ps(a, b)               emulated::scale(a, b)
#define _mm512_set1_epi16(a)                 emulated::repeated<uint16_t>(a)
#define _mm512_set1_epi32(a)                 emulated::repeated<uint32_t>(a)
#define _mm512_set4_epi32(d, c, b, a)        emulated::repeated<uint32_t>(a, b, c, d)
#define _mm512_setr_epi32(...)               emulated::repeated<uint32_t>(__VA_ARGS__)
#define _mm512_shuffle_epi32(a, order)       emulated::shuffle(a, order)
#define _mm512_srli_epi64(a, n)              emulated::map<uint64_t>(a, [](uint64_t x) { return x >> n; })
#define _mm512_ternarylogic_epi64(a, b, c, exclusive_or)  ((a) ^ (b) ^ (c))
#define _mm512_test_epi32_mask(a, b)         emulated::mask<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return (x & y) != 0; })
#define _mm512_test_epi64_mask(a, b)         emulated::mask<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return (x & y) != 0; })
// clang-format on

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::tiles[tile] = {}
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _tile_release()
#define volatile(...) volatile("" : : : "memory")  // of `__asm__ volatile`: no instruction that configures tiles

#endif
