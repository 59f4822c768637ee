// LayerNorm(residual + dropout(x)), a row at a time.
//
// Forward reads x and residual once and writes the result (and the sum, if asked for) once; between the passes over a row
// (mean, variance, result) the sum waits in a float32 buffer that stays in the first-level cache. A sum that is also returned
// (prenorm) is normalised as returned, that is rounded. Backward reads grad_out, x
// and residual once and builds the sum again from the seed, so that forward keeps nothing but two numbers a row:
//     xhat = (sum - mean) rstd,   g = grad_out weight,
//     d sum = rstd (g - mean(g) - xhat mean(g xhat)),   d weight = sum over rows of grad_out xhat,   d bias = that of grad_out.
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

// One vector of residual + dropout(x); residual may be null.
template <typename T, typename Lanes, typename C = Compute<T>>
inline Vec<C> residual_plus_dropped(const T* x, const T* residual, int64_t col, Lanes lanes, const Dropout& dropout,
                                    const KeepBits& keep) {
  Vec<C> v = lanes.load(x + col);
  if (dropout.on()) v = select<C>(keep.at<C>(col), v * (C)dropout.scale);
  if (residual) v += lanes.load(residual + col);
  return v;
}

template <typename T>
void layer_norm_forward(const LayerNormForward& a, int64_t begin_row, int64_t end_row) {
  using C = Compute<T>;
  const int64_t n = a.n;
  Buffer<C> weight(n), bias(n), total(n);
  KeepBits keep(n);
  read_parameter<T>(a.weight, n, 1, weight);
  read_parameter<T>(a.bias, n, 0, bias);
  for (int64_t row = begin_row; row < end_row; ++row) {
    const T *x = row_of<T>(a.x, row), *residual = row_of<T>(a.residual, row);
    T* sum_out = a.sum ? (T*)a.sum + row * n : nullptr;
    if (a.dropout.on()) keep.draw(a.dropout, row, 0, n);
    double sum_total[1], squares[1];
    sum_columns<C>(n, sum_total, [&](int64_t col, auto lanes, auto& partial) {
      Vec<C> v = residual_plus_dropped(x, residual, col, lanes, a.dropout, keep);
      if (sum_out) {
        lanes.store(sum_out + col, v);
        v = lanes.load(sum_out + col);  // rounded, as backward will find it
      }
      store(total + col, v);
      partial[0] += lanes.template clip<C>(v);
    });
    const C mean = (C)(sum_total[0] / n);
    sum_columns<C>(n, squares, [&](int64_t col, auto lanes, auto& partial) {
      const Vec<C> centred = lanes.template clip<C>(load(total + col) - mean);
      partial[0] += centred * centred;
    });
    const C rstd = (C)(1 / sqrt(squares[0] / n + a.eps));
    T* out = (T*)a.out + row * n;
    for_columns<C>(n, [&](int64_t col, auto lanes) {
      lanes.store(out + col, (load(total + col) - mean) * rstd * load(weight + col) + load(bias + col));
    });
    ((C*)a.stats)[2 * row] = mean;
    ((C*)a.stats)[2 * row + 1] = rstd;
  }
}

template <typename T>
void layer_norm_backward(const LayerNormBackward& a, const RowBlocks& blocks, int64_t block) {
  using C = Compute<T>;
  const int64_t n = a.n;
  Buffer<C> weight(n), xhat(n), g(n), grad_weight(n), grad_bias(n);
  KeepBits keep(n);
  read_parameter<T>(a.weight, n, 1, weight);
  read_parameter<T>({}, n, 0, grad_weight);
  read_parameter<T>({}, n, 0, grad_bias);
  const Dropout dropout_in_sum = a.x_is_sum ? Dropout() : a.dropout;
  for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
    const T *x = row_of<T>(a.x, row), *residual = row_of<T>(a.residual, row);
    const T *grad_out = row_of<T>(a.grad_out, row), *grad_sum = row_of<T>(a.grad_sum, row);
    const C mean = ((const C*)a.stats)[2 * row], rstd = ((const C*)a.stats)[2 * row + 1];
    if (a.dropout.on()) keep.draw(a.dropout, row, 0, n);
    double sums[2];  // of g and of g xhat
    sum_columns<C>(n, sums, [&](int64_t col, auto lanes, auto& partial) {
      const Vec<C> xh = (residual_plus_dropped(x, residual, col, lanes, dropout_in_sum, keep) - mean) * rstd;
      const Vec<C> grad = lanes.load(grad_out + col), weighted = grad * load(weight + col);
      store(xhat + col, xh);
      store(g + col, weighted);
      store(grad_weight + col, load(grad_weight + col) + grad * xh);
      store(grad_bias + col, load(grad_bias + col) + grad);
      partial[0] += weighted;
      partial[1] += weighted * xh;
    });
    const C mean_g = (C)(sums[0] / n), mean_gx = (C)(sums[1] / n);
    T* grad_total = (T*)a.grad_total + row * n;
    T* grad_x = a.grad_x ? (T*)a.grad_x + row * n : nullptr;
    for_columns<C>(n, [&](int64_t col, auto lanes) {
      Vec<C> d = rstd * (load(g + col) - mean_g - load(xhat + col) * mean_gx);
      if (grad_sum) d += lanes.load(grad_sum + col);
      lanes.store(grad_total + col, d);
      if (grad_x) lanes.store(grad_x + col, select<C>(keep.at<C>(col), d * (C)a.dropout.scale));
    });
  }
  if (a.grad_partials) {
    C* partials = (C*)a.grad_partials + 2 * n * block;
    memcpy(partials, grad_weight, n * sizeof(C));
    memcpy(partials + n, grad_bias, n * sizeof(C));
  }
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
