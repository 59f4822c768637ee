// Products of small matrices, the arithmetic of attention: C (rows, columns) = A (rows, k) B (k, columns), or C += A B.
//
// Register-blocked: a tile of C stays in registers while k runs; each step loads a few vectors of a row of B and broadcasts
// elements of A, which may therefore lie in memory as they like. C is float32 (float64 for float64).
// With bfloat16 instructions an element is a pair of bfloat16, neighbours along k, and k counts pairs.
#pragma once

#include "simd.h"

namespace ft {
namespace FT_LEVEL {

struct Pair {
  bfloat16 low, high;
};

// The type of C for elements E.
template <typename E>
struct SumOf {
  using type = E;
};
template <>
struct SumOf<Pair> {
  using type = float;
};
template <typename E>
using Sum = typename SumOf<E>::type;

// A: element (r, k) is data[r * row + k * column].
template <typename E>
struct Matrix {
  const E* data;
  int64_t row, column;
};

template <typename C>
inline Vec<C> multiply_add(Vec<C> sum, const C* a, Vec<C> b) {
  return sum + *a * b;
}

inline Vec<float> load(const Pair* p) {
  Vec<float> v;
  memcpy(&v, p, sizeof v);
  return v;
}

#if defined(FT_AVX512_BF16)
inline Vec<float> multiply_add(Vec<float> sum, const Pair* a, Vec<float> b) {
  int pair;
  memcpy(&pair, a, sizeof pair);
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}
#endif

#if defined(FT_AVX512)
constexpr int kTileVectors = 4;  // 6 x 4 sums, 4 vectors of B, 1 of A: 29 of 32 registers
#else
constexpr int kTileVectors = 2;  // 6 x 2 sums, 2 vectors of B, 1 of A: 15 of 16 registers
#endif

// Memory that is used next, in rows. Products fetch some lines of it with every tile, so that it arrives while they compute:
// a short head may take as long to come from memory as to work on, and the hardware's own prefetching ends with each page.
// It goes to the second cache: the nearest waits for too few lines at once.
class Ahead {
  struct Rows {
    const char* data;
    int64_t count, stride, size;  // stride and size in bytes
  };
  static constexpr int kMost = 12;
  Rows rows_[kMost];
  int count_ = 0, next_ = 0;
  const int lines_;  // at a time

 public:
  // `lines` with a tile of 64 columns, in proportion with others.
  explicit Ahead(int lines) : lines_(lines * kTileVectors * kLanes<float> / 64) {}

  void clear() { count_ = next_ = 0; }

  template <typename T>
  void add(const T* data, int64_t stride, int64_t rows, int64_t columns) {
    if (next_ == count_) clear();
    if (rows <= 0 || count_ == kMost) return;
    rows_[count_++] = {(const char*)data, rows, stride * (int64_t)sizeof(T), columns * (int64_t)sizeof(T)};
  }

  void fetch() {
    for (int64_t lines = 0; lines < lines_ && next_ < count_;) {
      Rows& rows = rows_[next_];
      for (int64_t at = 0; at < rows.size; at += 64, ++lines) __builtin_prefetch(rows.data + at, 0, 2);
      rows.data += rows.stride;
      if (--rows.count == 0) ++next_;
    }
  }
};

// Rows of A lie side by side (A's row stride is 1) or k does (its column stride is 1): `stride` is the other one.
template <int R, int V, bool rows_adjacent, bool add, typename E>
inline void multiply_tile(const E* a, int64_t stride, const E* b, int64_t b_stride, Sum<E>* c, int64_t c_stride, int64_t k) {
  constexpr int n = kLanes<Sum<E>>;
  Vec<Sum<E>> sums[R][V] = {};
#pragma GCC unroll 4
  for (int64_t i = 0; i < k; ++i) {
    Vec<Sum<E>> row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = load(b + v * n);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = multiply_add(sums[r][v], a + (rows_adjacent ? r : r * stride), row[v]);
    a += rows_adjacent ? stride : 1;
    b += b_stride;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Sum<E>* out = c + r * c_stride + v * n;
      store(out, add ? load(out) + sums[r][v] : sums[r][v]);
    }
}

// `columns` is a number of whole groups of V vectors. Rows come first: those of A stay in the nearest cache for all groups.
template <int R, int V, bool rows_adjacent, bool add, typename E>
inline void multiply_columns(Matrix<E> a, const E* b, int64_t b_stride, Sum<E>* c, int64_t c_stride, int64_t rows,
                             int64_t columns, int64_t k, Ahead& ahead) {
  int64_t r = 0;
  for (; r + R <= rows && !((R == 5 || R == 6) && rows - r == 8); r += R)  // 8 as 4 + 4: 2 leave the multipliers idle
    for (int64_t col = 0; col < columns; col += V * kLanes<Sum<E>>) {
      ahead.fetch();
      multiply_tile<R, V, rows_adjacent, add>(a.data + r * a.row, rows_adjacent ? a.column : a.row, b + col, b_stride,
                                              c + r * c_stride + col, c_stride, k);
    }
  if constexpr (R > 1) {
    if (r < rows)
      multiply_columns<(R > 6 ? 6 : R - 1), V, rows_adjacent, add>(Matrix<E>{a.data + r * a.row, a.row, a.column}, b, b_stride,
                                                                   c + r * c_stride, c_stride, rows - r, columns, k, ahead);
  }
}

#if defined(FT_AMX)
// Tile registers, 16 rows of 64 bytes each: 0 to 3 for C, 4 and 5 for A, 6 and 7 for B.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileRegisters() { _tile_release(); }
};

template <int R, int V, bool add>
inline void multiply_tiles(const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride, float* c, int64_t c_stride,
                           int64_t k) {
  const int64_t a_bytes = a_stride * sizeof(Pair), b_bytes = b_stride * sizeof(Pair), c_bytes = c_stride * sizeof(float);
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if (V > 1) _tile_loadd(1, c + 16, c_bytes);
    if (R > 1) _tile_loadd(2, c + 16 * c_stride, c_bytes);
    if (R > 1 && V > 1) _tile_loadd(3, c + 16 * c_stride + 16, c_bytes);
  } else {
    _tile_zero(0);
    if (V > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && V > 1) _tile_zero(3);
  }
  for (int64_t i = 0; i < k; i += 16) {
    _tile_loadd(4, a + i, a_bytes);
    _tile_loadd(6, b + i * b_stride, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (V > 1) _tile_loadd(7, b + i * b_stride + 16, b_bytes);
    if (V > 1) _tile_dpbf16ps(1, 4, 7);
    if (R > 1) _tile_loadd(5, a + 16 * a_stride + i, a_bytes);
    if (R > 1) _tile_dpbf16ps(2, 5, 6);
    if (R > 1 && V > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  if (V > 1) _tile_stored(1, c + 16, c_bytes);
  if (R > 1) _tile_stored(2, c + 16 * c_stride, c_bytes);
  if (R > 1 && V > 1) _tile_stored(3, c + 16 * c_stride + 16, c_bytes);
}

// The same on tile registers. Rows and pairs of k are rounded up to 16: what is read beyond them must be finite, and 0 in A.
template <bool rows_adjacent, bool add>
inline void multiply(Matrix<Pair> a, const Pair* b, int64_t b_stride, float* c, int64_t c_stride, int64_t rows, int64_t columns,
                     int64_t k, Ahead& ahead) {
  __asm__ volatile("" : : : "memory");  // the intrinsics do not say that they read memory
  for (int64_t r = 0; r < rows; r += 32) {
    const Pair* a_row = a.data + r * a.row;
    float* c_row = c + r * c_stride;
    const bool two = r + 16 < rows;
    int64_t col = 0;
    for (; col + 32 <= columns; col += 32) {
      ahead.fetch();
      if (two)
        multiply_tiles<2, 2, add>(a_row, a.row, b + col, b_stride, c_row + col, c_stride, k);
      else
        multiply_tiles<1, 2, add>(a_row, a.row, b + col, b_stride, c_row + col, c_stride, k);
    }
    if (col < columns) {
      if (two)
        multiply_tiles<2, 1, add>(a_row, a.row, b + col, b_stride, c_row + col, c_stride, k);
      else
        multiply_tiles<1, 1, add>(a_row, a.row, b + col, b_stride, c_row + col, c_stride, k);
    }
  }
}
#else
struct TileRegisters {};
#endif

// b (k, columns) with rows b_stride elements apart, c (rows, columns); columns is a number of whole vectors.
template <bool rows_adjacent, bool add, typename E>
inline void multiply(Matrix<E> a, const E* b, int64_t b_stride, Sum<E>* c, int64_t c_stride, int64_t rows, int64_t columns,
                     int64_t k, Ahead& ahead) {
  constexpr int n = kLanes<Sum<E>>;
  int64_t col = columns / (kTileVectors * n) * (kTileVectors * n);
  multiply_columns<6, kTileVectors, rows_adjacent, add>(a, b, b_stride, c, c_stride, rows, col, k, ahead);
  if (kTileVectors > 2 && col + 2 * n <= columns) {
    multiply_columns<12, 2, rows_adjacent, add>(a, b + col, b_stride, c + col, c_stride, rows, 2 * n, k, ahead);
    col += 2 * n;
  }
  if (col < columns) multiply_columns<12, 1, rows_adjacent, add>(a, b + col, b_stride, c + col, c_stride, rows, n, k, ahead);
}

}  // namespace FT_LEVEL
}  // namespace ft
