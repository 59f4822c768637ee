// activation(x weightᵀ + bias) for few rows of x, as in decoding: bound by reading weight, which is done once, as it lies.
//
// A tile is a few rows of weight times a few rows of x: as many dot products as a vector has lanes, each a vector of sums while
// k runs, so that one transposition adds them all up. The rows of x take turns on a stretch of the weights that stays in the
// first-level cache. A product adds its terms in an order that depends on k alone: a row's result has the same bits beside any
// other rows and with any number of threads.
#pragma once

#include "activation_dropout_kernels.h"

namespace ft {
namespace FT_LEVEL {

// How products of T are made: `step` neighbours along k in a vector, widened; or, with bfloat16 instructions, as they are.
template <typename T>
struct Products {
  static constexpr int step = kLanes<Compute<T>>;
  static Vec<Compute<T>> load(const T* p) { return FT_LEVEL::load(p); }
  static Vec<Compute<T>> multiply_add(Vec<Compute<T>> sum, Vec<Compute<T>> a, Vec<Compute<T>> b) { return sum + a * b; }
};

#if defined(FT_AVX512_BF16)
template <>
struct Products<bfloat16> {
  static constexpr int step = 2 * kLanes<float>;
  static Vec<float> load(const bfloat16* p) {
    Vec<float> pairs;
    memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  static Vec<float> multiply_add(Vec<float> sum, Vec<float> a, Vec<float> b) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <typename T>
class LinearTask {
  using C = Compute<T>;
  using P = Products<T>;
  static constexpr int n = kLanes<C>;
  static constexpr int kX = n < 16 ? 2 : 4, kW = n / kX;      // rows of x and of weight in a tile
  static constexpr int64_t kRows = 64;                        // of x at a time: they stay in the second-level cache
  static constexpr int64_t kStretch = 2048 / sizeof(Vec<C>);  // vectors of a row of weight at a time

  // Vectors [begin, end) of kW rows of weight, to be multiplied with `rows` rows of x.
  struct Stretch {
    const T* weight[kW];  // the rows' beginnings
    int64_t begin, end, rows;
    int64_t next;  // elements from here to the stretch that comes next
    bool last;     // of these rows
  };

  const LinearArgs& a_;
  const int64_t steps_;  // vectors along k
  Buffer<C> x_;         // for every kX rows (steps, kX, n): vectors in the order in which a tile reads them, the last filled up
  Buffer<C> sums_;      // for every kX rows (kX, kW, n): sums of the stretches so far
  Buffer<C> products_;  // (kRows, kLinearColumns)

  static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

 public:
  explicit LinearTask(const LinearArgs& a)
      : a_(a),
        steps_((a.k + P::step - 1) / P::step),
        x_(smaller(a.rows, kRows) * steps_ * n),
        sums_(kRows * kW * n),
        products_(kRows * kLinearColumns) {}

  void run(int64_t begin_task, int64_t end_task) {
    for (int64_t row = 0; row < a_.rows; row += kRows) {
      const int64_t rows = smaller(kRows, a_.rows - row);
      read_rows(row, rows);
      for (int64_t task = begin_task; task < end_task; ++task) {
        const int64_t begin = task * kLinearColumns, columns = smaller(kLinearColumns, a_.n - begin);
        for (int64_t col = 0; col < columns; col += kW) multiply(rows, begin + col, products_ + col);
        with_curve(a_.activation, [&](auto curve) { finish<decltype(curve)>(row, rows, begin, columns); });
      }
    }
  }

 private:
  static Vec<C> load_end(const T* p, int64_t count) {
    T buffer[P::step] = {};
    memcpy(buffer, p, count * sizeof(T));
    return P::load(buffer);
  }

  void read_rows(int64_t first, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* x = row_of<T>(a_.x, first + row);
      const int64_t tile = row / kX * kX, together = smaller(kX, rows - tile);
      C* to = x_ + (tile * steps_ + row % kX) * n;
      for (int64_t k = 0; k < a_.k; k += P::step, to += together * n)
        store(to, k + P::step <= a_.k ? P::load(x + k) : load_end(x + k, a_.k - k));
    }
  }

  // products (rows, kW): all rows of x times the rows of weight from `col` on. Past the last one it is repeated, for nothing.
  void multiply(int64_t rows, int64_t col, C* products) {
    Stretch s;
    s.rows = rows;
    for (int w = 0; w < kW; ++w) s.weight[w] = row_of<T>(a_.weight, smaller(col + w, a_.n - 1));
    for (s.begin = 0; s.begin < steps_; s.begin = s.end) {
      s.end = smaller(s.begin + kStretch, steps_);
      s.last = s.end == steps_;
      s.next = s.last ? kW * a_.weight.stride - s.begin * P::step : kStretch * P::step;
      multiply_rows<kX>(s, 0, products);
    }
  }

  template <int R>
  void multiply_rows(const Stretch& s, int64_t row, C* products) {
    for (; row + R <= s.rows; row += R) multiply_tile<R>(s, row, products + row * kLinearColumns);
    if constexpr (R > 1) multiply_rows<R - 1>(s, row, products);
  }

  template <int R>
  void multiply_tile(const Stretch& s, int64_t row, C* products) {
    // The tiles of a stretch share the work of fetching the next one, so that memory has something to do all the time: each its
    // part in one go; of one row the only tile, step by step.
    const bool alone = R == 1 && s.rows == 1;
    const int64_t fetched = (kW * R + s.rows - 1) / s.rows, fetch = row / R * fetched, fetch_end = smaller(fetch + fetched, kW);
    for (int64_t w = fetch; !alone && w < fetch_end; ++w)
      for (int64_t k = s.begin * P::step; k < s.end * P::step; k += 64 / sizeof(T))
        __builtin_prefetch(s.weight[w] + k + s.next);

    C* sums_so_far = sums_ + row * kW * n;
    const T* weight[kW];
    Vec<C> sums[n];
#pragma GCC unroll 4
    for (int w = 0; w < kW; ++w) weight[w] = s.weight[w] + s.begin * P::step;
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) sums[i] = i < R * kW && s.begin > 0 ? load(sums_so_far + i * n) : Vec<C>{};

    const C* x = x_ + (row * steps_ + s.begin * R) * n;
    const int64_t whole = smaller(s.end, a_.k / P::step) - s.begin;
    for (int64_t i = 0; i < whole * P::step; i += P::step, x += R * n) {
      if (alone)
#pragma GCC unroll 4
        for (int w = 0; w < kW; ++w) __builtin_prefetch(weight[w] + i + s.next);
      Vec<C> vectors[kW];
#pragma GCC unroll 4
      for (int w = 0; w < kW; ++w) vectors[w] = P::load(weight[w] + i);
      add<R>(sums, x, vectors);
    }
    if (s.begin + whole < s.end) {
      Vec<C> vectors[kW];
      for (int w = 0; w < kW; ++w) vectors[w] = load_end(weight[w] + whole * P::step, a_.k % P::step);
      add<R>(sums, x, vectors);
    }

    if (!s.last) {
#pragma GCC unroll 16
      for (int i = 0; i < R * kW; ++i) store(sums_so_far + i * n, sums[i]);
      return;
    }
    const Vec<C> totals = lane_sums<C>(sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) memcpy(products + r * kLinearColumns, (const C*)&totals + r * kW, kW * sizeof(C));
  }

  // A vector of each row of weight times those of R rows of x.
  template <int R>
  static void add(Vec<C> (&sums)[n], const C* x, const Vec<C> (&weight)[kW]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec<C> row = load(x + r * n);
#pragma GCC unroll 4
      for (int w = 0; w < kW; ++w) sums[r * kW + w] = P::multiply_add(sums[r * kW + w], row, weight[w]);
    }
  }

  template <typename Curve>
  void finish(int64_t first, int64_t rows, int64_t begin, int64_t columns) {
    const T* bias = a_.bias ? (const T*)a_.bias + begin : nullptr;
    for (int64_t row = 0; row < rows; ++row) {
      const C* products = products_ + row * kLinearColumns;
      T* out = (T*)a_.out + (first + row) * a_.n + begin;
      for_columns<C>(columns, [=](int64_t col, auto lanes) {
        Vec<C> v = load(products + col);
        if (bias) v += lanes.load(bias + col);
        lanes.store(out + col, Curve::template value<C>(v));
      });
    }
  }
};

template <typename T>
void linear(const LinearArgs& a, int64_t begin_task, int64_t end_task) {
  LinearTask<T>(a).run(begin_task, end_task);
}

}  // namespace FT_LEVEL
}  // namespace ft
