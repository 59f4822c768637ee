// Operands of attention laid out for matmul_simd.h: heads of query, key and value, as they lie where that will do, else copied
// into scratch memory: transposed, widened to the compute type, or in pairs of bfloat16 padded to whole tiles.
#pragma once

#include "matmul_simd.h"

namespace ft {
namespace FT_LEVEL {

constexpr int kStrip = 32;  // keys that share a range of queries, and a word of bits

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The elements that products of T are made of, and how many T lie in one.
template <typename T>
struct ElementOf {
  using type = Compute<T>;
  static constexpr int per = 1;
};
#if defined(FT_AVX512_BF16)
template <>
struct ElementOf<bfloat16> {
  using type = Pair;
  static constexpr int per = 2;
};
#endif
template <typename T>
using Element = typename ElementOf<T>::type;
template <typename T>
constexpr bool kPaired = ElementOf<T>::per == 2;

// A head of a tensor: rows of T.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  T* operator[](int64_t i) const { return data + i * stride; }
};
template <typename T>
inline Rows<const T> head_of(const ConstHeads& x, int64_t batch, int64_t head) {
  return {(const T*)x.data + batch * x.batch + head * x.head, x.row};
}
template <typename T>
inline Rows<T> head_of(const Heads& x, int64_t batch, int64_t head) {
  return {(T*)x.data + batch * x.batch + head * x.head, x.row};
}

// Transposes by squares: out[c][r] = load(r, c .. c + lanes)[lane], zero past `rows` up to a whole square.
template <typename C, typename Load>
inline void transpose_rows(int64_t rows, int64_t columns, C* out, int64_t out_stride, Load load) {
  constexpr int n = kLanes<C>;
  for (int64_t r = 0; r < rows; r += n)
    for_columns<C>(columns, [&](int64_t c, auto lanes) {
      Vec<C> square[n];
      for (int i = 0; i < n; ++i) square[i] = r + i < rows ? load(r + i, c, lanes) : Vec<C>{};
      transpose<C>(square);
      for (int i = 0; i < n && c + i < columns; ++i) store(out + (c + i) * out_stride + r, square[i]);
    });
}

// The other way: row r of `out` (T) gets lane r of load(c, first lane) for every column c.
template <typename C, typename T, typename Load>
inline void transpose_back(int64_t rows, int64_t columns, Rows<T> out, Load load_column) {
  constexpr int n = kLanes<C>;
  for (int64_t r = 0; r < rows; r += n)
    for_columns<C>(columns, [&](int64_t c, auto lanes) {
      Vec<C> square[n];
      for (int i = 0; i < n; ++i) square[i] = c + i < columns ? load_column(c + i, r) : Vec<C>{};
      transpose<C>(square);
      for (int i = 0; i < n && r + i < rows; ++i) lanes.store(out[r + i] + c, square[i]);
    });
}

// A vector of bfloat16 pairs as they lie, zero past `count` elements.
inline Vec<float> load_words(const bfloat16* x, int64_t count) {
  Vec<float> v = {};
  if (count >= 2 * kLanes<float>) {
    memcpy(&v, x, sizeof v);
  } else if (count > 0) {
    memcpy(&v, x, count * sizeof *x);
  }
  return v;
}

// x (rows, d) as the B of a product over d: (d, kQueries) for each block of kQueries rows. With pairs d is padded by zeros to
// a multiple of 32.
template <typename T>
inline int64_t depth(int64_t d) {
  return kPaired<T> ? round_up(d, 32) / 2 : d;
}

template <typename T>
inline void transposed_operand(Rows<const T> x, int64_t rows, int64_t d, Element<T>* out) {
  using C = Compute<T>;
  if constexpr (kPaired<T>) {
    float* words = (float*)out;  // a pair moves as one word
    transpose_rows<float>(rows, (d + 1) / 2, words, kQueries,
                          [&](int64_t r, int64_t c, auto) { return load_words(x[r] + 2 * c, d - 2 * c); });
    for (int64_t i = (d + 1) / 2; i < depth<T>(d); ++i) memset(out + i * kQueries, 0, kQueries * sizeof(Pair));
  } else {
    transpose_rows<C>(rows, d, out, kQueries, [&](int64_t r, int64_t c, auto lanes) { return lanes.load(x[r] + c); });
  }
  for (int64_t r = round_up(rows, kLanes<C>); r < kQueries; r += kLanes<C>)
    for (int64_t i = 0; i < depth<T>(d); ++i) memset((C*)out + i * kQueries + r, 0, sizeof(Vec<C>));
}

// x (n, d) as an A whose rows are x's rows, or (`columns`) x's columns, from one copy in scratch memory or none. Products that
// go down the columns want rows that follow each other: others, those of heads beside each other, share few lines of the cache.
template <typename T>
struct Operand {
  using E = Element<T>;
  Matrix<E> rows, columns;

  static int64_t scratch(int64_t n, int64_t d) {
    if constexpr (kPaired<T>) return round_up(n, kStrip) * round_up(d, 32);  // rows and columns, each half of that
    return n * d + kLanes<E>;
  }

  Operand(Rows<const T> x, int64_t n, int64_t d, E* scratch, bool want_rows, bool want_columns) {
    if constexpr (kPaired<T>) {
      if (want_rows && d % 32 == 0 && x.stride % 2 == 0 && n % 16 == 0) {  // whole tiles, nothing to pad
        rows = {(const Pair*)x.data, x.stride / 2, 1};
      } else if (want_rows) {
        pack_rows(x, n, d, scratch);
      }
      if (want_columns) pack_columns(x, n, d, scratch + round_up(n, kStrip) * depth<T>(d));
    } else if (sizeof(T) == sizeof(E) && (x.stride == d || !want_columns)) {
      rows = {(const E*)x.data, x.stride, 1};
      columns = {(const E*)x.data, 1, x.stride};
    } else {
      for (int64_t i = 0; i < n; ++i)
        for_columns<E>(d, [&](int64_t c, auto lanes) { lanes.store(scratch + i * d + c, lanes.load(x[i] + c)); });
      rows = {scratch, d, 1};
      columns = {scratch, 1, d};
    }
  }

 private:
#if defined(FT_AVX512_BF16)
  void pack_rows(Rows<const T> x, int64_t n, int64_t d, Pair* out) {
    const int64_t pitch = depth<T>(d);
    for (int64_t i = 0; i < round_up(n, kStrip); ++i)
      for (int64_t c = 0; c < pitch; c += kLanes<float>)
        store((float*)(out + i * pitch + c), load_words(x[i < n ? i : 0] + 2 * c, i < n ? d - 2 * c : 0));
    rows = {out, pitch, 1};
  }

  void pack_columns(Rows<const T> x, int64_t n, int64_t d, Pair* out) {
    constexpr int lanes = kLanes<float>;
    const int64_t pitch = round_up(n, kStrip) / 2, padded = 2 * depth<T>(d);
    T* y = (T*)out;
    for (int64_t i = 0; i < 2 * pitch; i += lanes)
      for (int64_t c = 0; c < padded; c += 2 * lanes) {
        Vec<float> square[lanes];
        for (int k = 0; k < lanes; ++k) square[k] = load_words(x[i + k < n ? i + k : 0] + c, i + k < n ? d - c : 0);
        transpose<float>(square);
        for (int k = 0; k < lanes; ++k) {
          const Ints<float> words = (Ints<float>)square[k];
          const auto low = __builtin_convertvector(words & 0xFFFF, VecOf<float>::shorts);
          const auto high = __builtin_convertvector((words >> 16) & 0xFFFF, VecOf<float>::shorts);
          memcpy(y + (c + 2 * k) * 2 * pitch + i, &low, sizeof low);
          memcpy(y + (c + 2 * k + 1) * 2 * pitch + i, &high, sizeof high);
        }
      }
    columns = {out, pitch, 1};
  }
#endif
};

// x (n, d) as the B of a product over its rows: (n, columns), columns padded by zeros. Only with pairs are the rows padded,
// to whole blocks. In scratch memory, or in place.
template <typename T>
struct RowsOperand {
  using E = Element<T>;
  static constexpr int lanes = kLanes<Compute<T>>;
  const E* data;
  int64_t stride;

  static int64_t columns(int64_t d) { return round_up(d, lanes); }
  static int64_t scratch(int64_t n, int64_t d) { return round_up(n, kQueries) / ElementOf<T>::per * columns(d); }

  RowsOperand(Rows<const T> x, int64_t n, int64_t d, E* scratch) {
    if (sizeof(T) == sizeof(E) && !kPaired<T> && x.stride == columns(d)) {
      data = (const E*)x.data;
      stride = x.stride;
      return;
    }
    data = scratch;
    stride = columns(d);
    if constexpr (kPaired<T>) {
      for (int64_t i = 0; i < round_up(n, kQueries); i += 2, scratch += stride)
        for_columns<float>(d, [&](int64_t c, auto part) {
          const Ints<float> low = i < n ? (Ints<float>)part.load(x[i] + c) : Ints<float>{};
          const Ints<float> high = i + 1 < n ? (Ints<float>)part.load(x[i + 1] + c) : Ints<float>{};
          store((float*)scratch + c, (Vec<float>)(((low >> 16) & 0xFFFF) | high));
        });
    } else {
      for (int64_t i = 0; i < n; ++i, scratch += stride)
        for_columns<E>(d, [&](int64_t c, auto part) { store(scratch + c, part.load(x[i] + c)); });
    }
  }

  const E* operator[](int64_t i) const { return data + i / ElementOf<T>::per * stride; }
};

// Rows j and j + 1 of a transposed block as pairs along the keys.
#if defined(FT_AVX512_BF16)
inline Vec<float> pairs_of(Vec<float> low, Vec<float> high) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (Vec<float>)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
#endif

}  // namespace FT_LEVEL
}  // namespace ft
