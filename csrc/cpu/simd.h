// A thin layer over the vector extensions of GCC and Clang: what every CPU kernel needs, written once for all widths.
//
// Included inside each instruction set's translation unit (cpu/levels/), which defines FT_LEVEL (its namespace) and, where
// they apply, FT_AVX512, FT_AVX512_BF16 or FT_AVX2. No torch or standard C++ header may be included here: an inline
// function of theirs, compiled for AVX-512, could be the copy that the linker keeps for everybody.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(FT_AVX512) || defined(FT_AVX2)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace ft {
namespace FT_LEVEL {

#if defined(FT_AVX512)
constexpr int kVectorBytes = 64;
#elif defined(FT_AVX2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;  // SSE2, NEON
#endif

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

// Vectors of the two types that arithmetic is done in, and integer vectors of the same number of lanes.
template <typename C>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t ints __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t words __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t shorts __attribute__((vector_size(kVectorBytes / 2)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t ints __attribute__((vector_size(kVectorBytes)));
};
template <typename C>
using Vec = typename VecOf<C>::type;
template <typename C>
using Ints = typename VecOf<C>::ints;
template <typename C>
constexpr int kLanes = kVectorBytes / sizeof(C);

// The type in which the arithmetic of T is done.
template <typename T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

// The numbers 0, ..., n - 1 as a pack, for shuffles.
template <int... lane>
struct Lanes {};
template <int n, int... lane>
struct LanesFrom : LanesFrom<n - 1, n - 1, lane...> {};
template <int... lane>
struct LanesFrom<0, lane...> {
  using type = Lanes<lane...>;
};
template <int n>
using LanesOf = typename LanesFrom<n>::type;

template <typename C>
inline Vec<C> splat(C x) {
  return Vec<C>{} + x;
}

// Lane-wise the larger, or the smaller, of a and b; b where either is NaN.
template <typename C>
inline Vec<C> maximum(Vec<C> a, Vec<C> b) {
#if defined(FT_AVX512)
  if constexpr (sizeof(C) == 4) return (Vec<C>)_mm512_max_ps((__m512)a, (__m512)b);
  if constexpr (sizeof(C) == 8) return (Vec<C>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(FT_AVX2)
  if constexpr (sizeof(C) == 4) return (Vec<C>)_mm256_max_ps((__m256)a, (__m256)b);
  if constexpr (sizeof(C) == 8) return (Vec<C>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}
inline Vec<float> minimum(Vec<float> a, Vec<float> b) {
#if defined(FT_AVX512)
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(FT_AVX2)
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

template <typename C>
inline C sum(Vec<C> v) {
#if defined(FT_AVX512)
  if constexpr (sizeof(C) == 4) return _mm512_reduce_add_ps((__m512)v);
#endif
  C total = 0;
  for (int i = 0; i < kLanes<C>; ++i) total += v[i];
  return total;
}

// Lane-wise a where `keep` has the lane's bit set, else `other`.
template <typename C>
inline Vec<C> select(uint32_t keep, Vec<C> a, Vec<C> other = Vec<C>{}) {
#if defined(FT_AVX512)
  if constexpr (sizeof(C) == 4) return (Vec<C>)_mm512_mask_mov_ps((__m512)other, (__mmask16)keep, (__m512)a);
  if constexpr (sizeof(C) == 8) return (Vec<C>)_mm512_mask_mov_pd((__m512d)other, (__mmask8)keep, (__m512d)a);
#else
  Ints<C> bit;
  for (int i = 0; i < kLanes<C>; ++i) bit[i] = 1 << i;
  return ((Ints<C>{} + (int32_t)keep) & bit) == bit ? a : other;
#endif
}

// Loads widen to the compute type, stores round to nearest even.

inline Vec<float> load(const float* p) {
  Vec<float> v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Vec<double> load(const double* p) {
  Vec<double> v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Vec<float> load(const bfloat16* p) {
#if defined(FT_AVX512)  // said by name: the compiler would widen half by half
  const Ints<float> words = (Ints<float>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(FT_AVX2)
  const Ints<float> words = (Ints<float>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  VecOf<float>::shorts s;
  memcpy(&s, p, sizeof s);
  const Ints<float> words = __builtin_convertvector(s, Ints<float>);
#endif
  return (Vec<float>)(words << 16);
}

inline void store(float* p, Vec<float> v) { memcpy(p, &v, sizeof v); }
inline void store(double* p, Vec<double> v) { memcpy(p, &v, sizeof v); }

inline void store(bfloat16* p, Vec<float> v) {
#if defined(FT_AVX512_BF16)
  const __m256bh s = _mm512_cvtneps_pbh((__m512)v);
#else
  using Words = VecOf<float>::words;  // unsigned: the bits of a NaN may overflow
  const Words bits = (Words)v;
  Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  rounded = v != v ? Words{} + 0x7FC0 : rounded;
  const VecOf<float>::shorts s = __builtin_convertvector(rounded, VecOf<float>::shorts);
#endif
  memcpy(p, &s, sizeof s);
}

inline Vec<float> load(const half* p) {
#if defined(FT_AVX512)
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(FT_AVX2)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) {
    const uint32_t h = p[i].bits, sign = (h & 0x8000) << 16, magnitude = h & 0x7FFF;
    uint32_t bits = magnitude << 13;
    if (magnitude >= 0x7C00) {
      bits |= 0x7F800000;  // infinity and NaN
    } else {
      bits += 112 << 23;         // the difference of the exponents' biases
      if (magnitude < 0x0400) {  // subnormal: the value is magnitude * 2^-24
        const float value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
      }
    }
    bits |= sign;
    float x;
    memcpy(&x, &bits, sizeof x);
    v[i] = x;
  }
  return v;
#endif
}

inline void store(half* p, Vec<float> v) {
#if defined(FT_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(FT_AVX2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) {
    uint32_t bits;
    const float x = v[i];
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t h;
    if (magnitude > 0x7F800000) {
      h = 0x7E00;  // NaN
    } else if (magnitude >= 0x477FF000) {
      h = 0x7C00;  // rounds past 65504
    } else if (magnitude >= 0x38800000) {
      const uint32_t rebased = magnitude - (112u << 23);
      h = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13;
    } else {  // subnormal: adding 0.5 leaves magnitude / 2^-24, rounded to nearest even, in the low bits
      float shifted;
      memcpy(&shifted, &magnitude, sizeof shifted);
      shifted += 0.5f;
      memcpy(&h, &shifted, sizeof h);
      h -= 0x3F000000;
    }
    p[i].bits = (uint16_t)(sign | h);
  }
#endif
}

// Rows are walked a vector at a time; the last, partial step goes through a buffer. A body takes (column, lanes) and
// loads and stores with `lanes`, so that each loop is written once.

struct Full {
  template <typename T>
  Vec<Compute<T>> load(const T* p) const {
    return FT_LEVEL::load(p);
  }
  template <typename T>
  void store(T* p, Vec<Compute<T>> v) const {
    FT_LEVEL::store(p, v);
  }
  // v with the lanes past the end zeroed
  template <typename C>
  Vec<C> clip(Vec<C> v) const {
    return v;
  }
};

struct Tail {
  int64_t count;

  template <typename T>
  Vec<Compute<T>> load(const T* p) const {
    T buffer[kLanes<Compute<T>>] = {};
    memcpy(buffer, p, count * sizeof(T));
    return FT_LEVEL::load(buffer);
  }
  template <typename T>
  void store(T* p, Vec<Compute<T>> v) const {
    T buffer[kLanes<Compute<T>>];
    FT_LEVEL::store(buffer, v);
    memcpy(p, buffer, count * sizeof(T));
  }
  template <typename C>
  Vec<C> clip(Vec<C> v) const {
    return select<C>((1u << count) - 1, v);
  }
};

template <typename C, typename Body>
inline void for_columns(int64_t n, Body body) {
  int64_t col = 0;
  for (; col + kLanes<C> <= n; col += kLanes<C>) body(col, Full{});
  if (col < n) body(col, Tail{n - col});
}

// The transpose of the square of kLanes<C> vectors: vector i of the result holds lane i of each.
// Each of log2(lanes) rounds interleaves the vectors of the two halves, which is what one bit of (row, lane) rotates by.
template <typename V, int... lane>
inline void interleave(V a, V b, V& low, V& high, Lanes<lane...>) {
  constexpr int n = sizeof...(lane);
  low = __builtin_shufflevector(a, b, (lane / 2 + lane % 2 * n)...);
  high = __builtin_shufflevector(a, b, (n / 2 + lane / 2 + lane % 2 * n)...);
}

#if defined(FT_AVX512) || defined(FT_AVX2)
// Four by four within the quarters (or halves) of the vectors, where a shuffle needs no index and no second instruction: of
// each group of four rows vector i then has the columns i, i + 4, ..., a quarter each.
inline void transpose_fours(Vec<float> (&rows)[kLanes<float>]) {
#if defined(FT_AVX512)
  const auto low = [](Vec<float> a, Vec<float> b) { return (__m512d)_mm512_unpacklo_ps((__m512)a, (__m512)b); };
  const auto high = [](Vec<float> a, Vec<float> b) { return (__m512d)_mm512_unpackhi_ps((__m512)a, (__m512)b); };
  const auto low_pairs = [](__m512d a, __m512d b) { return (Vec<float>)_mm512_unpacklo_pd(a, b); };
  const auto high_pairs = [](__m512d a, __m512d b) { return (Vec<float>)_mm512_unpackhi_pd(a, b); };
#else
  const auto low = [](Vec<float> a, Vec<float> b) { return (__m256d)_mm256_unpacklo_ps((__m256)a, (__m256)b); };
  const auto high = [](Vec<float> a, Vec<float> b) { return (__m256d)_mm256_unpackhi_ps((__m256)a, (__m256)b); };
  const auto low_pairs = [](__m256d a, __m256d b) { return (Vec<float>)_mm256_unpacklo_pd(a, b); };
  const auto high_pairs = [](__m256d a, __m256d b) { return (Vec<float>)_mm256_unpackhi_pd(a, b); };
#endif
#pragma GCC unroll 4
  for (int i = 0; i < kLanes<float>; i += 4) {
    const auto low01 = low(rows[i], rows[i + 1]), high01 = high(rows[i], rows[i + 1]);
    const auto low23 = low(rows[i + 2], rows[i + 3]), high23 = high(rows[i + 2], rows[i + 3]);
    rows[i] = low_pairs(low01, low23);
    rows[i + 1] = high_pairs(low01, low23);
    rows[i + 2] = low_pairs(high01, high23);
    rows[i + 3] = high_pairs(high01, high23);
  }
}

inline void transpose_floats(Vec<float> (&rows)[kLanes<float>]) {
  transpose_fours(rows);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // ... and the quarters, or halves, change places
#if defined(FT_AVX512)
    const __m512 a = (__m512)rows[i], b = (__m512)rows[i + 4], c = (__m512)rows[i + 8], d = (__m512)rows[i + 12];
    const __m512 even_ab = _mm512_shuffle_f32x4(a, b, 0x88), odd_ab = _mm512_shuffle_f32x4(a, b, 0xDD);
    const __m512 even_cd = _mm512_shuffle_f32x4(c, d, 0x88), odd_cd = _mm512_shuffle_f32x4(c, d, 0xDD);
    rows[i] = (Vec<float>)_mm512_shuffle_f32x4(even_ab, even_cd, 0x88);
    rows[i + 4] = (Vec<float>)_mm512_shuffle_f32x4(odd_ab, odd_cd, 0x88);
    rows[i + 8] = (Vec<float>)_mm512_shuffle_f32x4(even_ab, even_cd, 0xDD);
    rows[i + 12] = (Vec<float>)_mm512_shuffle_f32x4(odd_ab, odd_cd, 0xDD);
#else
    const __m256 a = (__m256)rows[i], b = (__m256)rows[i + 4];
    rows[i] = (Vec<float>)_mm256_permute2f128_ps(a, b, 0x20);
    rows[i + 4] = (Vec<float>)_mm256_permute2f128_ps(a, b, 0x31);
#endif
  }
}
#endif

template <typename C>
inline void transpose(Vec<C> (&rows)[kLanes<C>]) {
  constexpr int n = kLanes<C>;
#if defined(FT_AVX512) || defined(FT_AVX2)
  if constexpr (sizeof(C) == sizeof(float)) return transpose_floats(rows);
#endif
  Vec<C> other[n];
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) interleave(rows[i], rows[i + n / 2], other[2 * i], other[2 * i + 1], LanesOf<n>());
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = other[i];
  }
}

// Lane i is the sum over the lanes of v[i]: the rounds of `transpose`, each of which can add the two halves right away.
template <typename C>
inline Vec<C> lane_sums(Vec<C> (&v)[kLanes<C>]) {
#pragma GCC unroll 4
  for (int half = kLanes<C> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      Vec<C> low, high;
      interleave(v[i], v[i + half], low, high, LanesOf<kLanes<C>>());
      v[i] = low + high;
    }
  return v[0];
}

// Scratch memory of one kernel call, aligned to a cache line and padded so that its last vector may be a whole one. With
// FT_POISON (`make sanitize`) it starts as NaN, so that a result shows if it depends on memory that nobody wrote.
template <typename T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t n) {
    const int64_t bytes = (n * (int64_t)sizeof(T) / 64 + 2) * 64;
    data = (T*)aligned_alloc(64, bytes);
#if defined(FT_POISON)
    memset((void*)data, 0xFF, bytes);
#endif
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data; }
};

// body(task, another) for each task that this thread takes; another: it goes on with the task that follows.
template <typename Body>
inline void for_tasks(Tasks& tasks, Body body) {
  for (Tasks::Range range; tasks.take(range);)
    for (int64_t task = range.begin; task < range.end; ++task) body(task, task + 1 < range.end);
}

// A row of a tensor of T, or null.
template <typename T>
inline const T* row_of(const ConstRows& rows, int64_t row) {
  return rows.data ? (const T*)rows.data + row * rows.stride : nullptr;
}

// A parameter vector in the compute type; `absent` everywhere if there is none.
template <typename T>
inline void read_parameter(const Parameter& p, int64_t n, Compute<T> absent, Compute<T>* out) {
  using C = Compute<T>;
  for_columns<C>(n, [&](int64_t col, auto lanes) {
    if (!p.data) {
      store(out + col, splat<C>(absent));
    } else if (p.dtype == DType::f32 && sizeof(C) == sizeof(float)) {
      store(out + col, lanes.load((const C*)p.data + col));
    } else {
      store(out + col, lanes.load((const T*)p.data + col));
    }
  });
}

}  // namespace FT_LEVEL
}  // namespace ft
