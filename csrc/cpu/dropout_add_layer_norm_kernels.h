// LayerNorm or RMSNorm of residual + dropout(x), a row at a time. T: dtype of the activations, R: that of the residual stream.
//
// Forward reads x and residual once and writes the result (and the sum, if asked for) once; between the passes over a row
// (mean, variance, result) the sum waits in a float32 buffer that stays in the first-level cache. A sum that is also returned
// (prenorm) is normalised as returned, that is rounded. Backward reads grad_out, x and residual once and builds the sum again
// from the seed, so that forward keeps nothing but two numbers a row:
//     xhat = (sum - mean) rstd,   g = grad_out weight,
//     d sum = rstd (g - mean(g) - xhat mean(g xhat)),   d weight = sum over rows of grad_out xhat,   d bias = that of grad_out.
// RMSNorm is the same with mean = 0 and mean(g) = 0.
#pragma once

#include "philox_simd.h"

namespace ft {
namespace FT_LEVEL {

// body(col, lanes, partial) adds to the K vectors `partial`; their sums over all columns and lanes go to `totals`, in double
// beyond each run of 1024 columns, so that long rows lose nothing.
template <typename C, int K, typename Body>
inline void sum_columns(int64_t n, double (&totals)[K], Body body) {
  constexpr int64_t kRun = 1024;
  for (double& total : totals) total = 0;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    Vec<C> partial[K] = {};
    for_columns<C>(n - begin < kRun ? n - begin : kRun, [&](int64_t col, auto lanes) { body(begin + col, lanes, partial); });
    for (int k = 0; k < K; ++k) totals[k] += sum<C>(partial[k]);
  }
}

// A row of residual + dropout(x). Copied into locals, so that the compiler knows that no store changes it.
template <typename T, typename R>
struct SumRow {
  using C = Compute<T>;
  const T* x;  // this or residual may be null
  const R* residual;
  const uint32_t* keep;  // may be null
  C scale;

  template <typename Lanes>
  Vec<C> at(int64_t col, Lanes lanes) const {
    Vec<C> v = x ? drop<C>(keep, col, scale, lanes.load(x + col)) : Vec<C>{};
    if (residual) v += lanes.load(residual + col);
    return v;
  }
};

// Asks for the same columns of the next row while this one is worked on in the cache, so that memory is never idle.
// (Past the last row it asks for what it will not use, which is allowed.)
template <typename T>
inline void prefetch_next(const T* row, int64_t stride, int64_t col) {
  if (row) __builtin_prefetch(row + stride + col);
}

template <typename T, typename R>
void layer_norm_forward(const LayerNormForward& a, int64_t begin_row, int64_t end_row) {
  using C = Compute<T>;
  const int64_t n = a.n;
  Buffer<C> weight_values(n), bias_values(n), total_values(n);
  KeepBits keep(n);
  read_parameter<T>(a.weight, n, 1, weight_values);
  read_parameter<T>(a.bias, n, 0, bias_values);
  const C *weight = weight_values, *bias = bias_values;
  C *total = total_values, *stats = (C*)a.stats;
  const int64_t x_stride = a.x.stride, residual_stride = a.residual.stride;
  for (int64_t row = begin_row; row < end_row; ++row) {
    const SumRow<T, R> sum_row = {row_of<T>(a.x, row), row_of<R>(a.residual, row), keep.draw(a.dropout, row, 0, n),
                                  (C)a.dropout.scale};
    T* out = (T*)a.out + row * n;
    R* sum_out = a.sum ? (R*)a.sum + row * n : nullptr;
    double sums[1], squares[1];
    sum_columns<C>(n, sums, [=](int64_t col, auto lanes, auto& partial) {
      Vec<C> v = sum_row.at(col, lanes);
      if (sum_out) {
        lanes.store(sum_out + col, v);
        v = lanes.load(sum_out + col);  // rounded, as backward will find it
      }
      store(total + col, v);
      partial[0] += lanes.template clip<C>(v);
    });
    const C mean = a.rms ? 0 : (C)(sums[0] / n);
    sum_columns<C>(n, squares, [=](int64_t col, auto lanes, auto& partial) {
      prefetch_next(sum_row.x, x_stride, col);
      prefetch_next(sum_row.residual, residual_stride, col);
      const Vec<C> centred = lanes.template clip<C>(load(total + col) - mean);
      partial[0] += centred * centred;
    });
    // A variance past the range of C gives NaN, as in PyTorch, not a row of zeros.
    const C rstd = squares[0] < INFINITY ? (C)(1 / sqrt(squares[0] / n + a.eps)) : (C)NAN;
    for_columns<C>(n, [=](int64_t col, auto lanes) {
      lanes.store(out + col, (load(total + col) - mean) * rstd * load(weight + col) + load(bias + col));
    });
    stats[2 * row] = mean;
    stats[2 * row + 1] = rstd;
  }
}

template <typename T, typename R>
void layer_norm_backward(const LayerNormBackward& a, const RowBlocks& blocks, int64_t block) {
  using C = Compute<T>;
  const int64_t n = a.n;
  Buffer<C> weight_values(n), xhat_values(n), g_values(n), grad_weight_values(n), grad_bias_values(n);
  KeepBits keep(n);
  read_parameter<T>(a.weight, n, 1, weight_values);
  memset(grad_weight_values, 0, n * sizeof(C));
  memset(grad_bias_values, 0, n * sizeof(C));
  const C *weight = weight_values, *stats = (const C*)a.stats;
  C *xhat = xhat_values, *g = g_values, *grad_weight = grad_weight_values, *grad_bias = grad_bias_values;
  const C scale = (C)a.dropout.scale;
  for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
    const uint32_t* kept = keep.draw(a.dropout, row, 0, n);
    const SumRow<T, R> sum_row = {row_of<T>(a.x, row), row_of<R>(a.residual, row), kept, scale};
    const T* grad_out = row_of<T>(a.grad_out, row);
    const R* grad_sum = row_of<R>(a.grad_sum, row);
    const C mean = stats[2 * row], rstd = stats[2 * row + 1];
    double sums[2];  // of g and of g xhat
    sum_columns<C>(n, sums, [=](int64_t col, auto lanes, auto& partial) {
      const Vec<C> xh = (sum_row.at(col, lanes) - mean) * rstd;
      const Vec<C> grad = lanes.load(grad_out + col), weighted = grad * load(weight + col);
      store(xhat + col, xh);
      store(g + col, weighted);
      store(grad_weight + col, load(grad_weight + col) + grad * xh);
      store(grad_bias + col, load(grad_bias + col) + grad);
      partial[0] += weighted;
      partial[1] += weighted * xh;
    });
    const C mean_g = a.rms ? 0 : (C)(sums[0] / n), mean_gx = (C)(sums[1] / n);
    R* grad_total = (R*)a.grad_total + row * n;
    T* grad_x = a.grad_x ? (T*)a.grad_x + row * n : nullptr;
    for_columns<C>(n, [=](int64_t col, auto lanes) {
      Vec<C> d = rstd * (load(g + col) - mean_g - load(xhat + col) * mean_gx);
      if (grad_sum) d += lanes.load(grad_sum + col);
      lanes.store(grad_total + col, d);
      if (grad_x) lanes.store(grad_x + col, drop<C>(kept, col, scale, d));
    });
  }
  if (a.weight_partials) memcpy((C*)a.weight_partials + n * block, grad_weight, n * sizeof(C));
  if (a.bias_partials) memcpy((C*)a.bias_partials + n * block, grad_bias, n * sizeof(C));
}

// out (n) = sum over blocks of partials (count, n).
template <typename T>
void sum_blocks(const void* partials, void* out, int64_t count, int64_t n) {
  using C = Compute<T>;
  for_columns<C>(n, [&](int64_t col, auto lanes) {
    Vec<C> total = {};
    for (int64_t block = 0; block < count; ++block) total += lanes.load((const C*)partials + block * n + col);
    lanes.store((C*)out + col, total);
  });
}

}  // namespace FT_LEVEL
}  // namespace ft
