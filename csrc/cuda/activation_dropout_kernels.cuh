// dropout(activation(x + bias)), elementwise: one pass forward, one pass backward, as in cpu/activation_dropout_kernels.h.
//
// A thread owns a chunk of columns and walks down the rows, so that it reads the bias once and can add up its gradient, of
// which it writes one part; sum_parts (rows.cuh) adds the parts.
#pragma once

#include "rows.cuh"

namespace ft {
namespace cuda {

// Each kind of activation: its value at x, and its gradient there for a gradient d of the value.

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

constexpr float kGeluA = 1.5957691216057308f, kGeluB = 0.044715f * kGeluA;  // 2 sqrt(2 / pi); see GeluTanh on the CPU

__device__ inline float activation_value(Activation kind, float x) {
  switch (kind) {
    case Activation::none: return x;
    case Activation::relu: return x < 0 ? 0.0f : x;  // NaN stays NaN
    case Activation::gelu: return x * normcdff(x);
    case Activation::gelu_tanh: return x * sigmoid(x * (x * x * kGeluB + kGeluA));
    case Activation::silu: return x * sigmoid(x);
  }
  return x;
}

__device__ inline float activation_gradient(Activation kind, float x, float d) {
  switch (kind) {
    case Activation::none: return d;
    case Activation::relu: return x <= 0 ? 0.0f : d;
    case Activation::gelu: return d * (normcdff(x) + x * expf(-0.5f * x * x) * 0.3989422804014327f);  // 1 / sqrt(2 pi)
    case Activation::gelu_tanh: {
      const float u = x * (x * x * kGeluB + kGeluA), s = sigmoid(u);
      return d * (s + x * s * sigmoid(-u) * (x * x * (3 * kGeluB) + kGeluA));
    }
    case Activation::silu: {
      const float s = sigmoid(x);
      return d * (s + x * s * sigmoid(-x));
    }
  }
  return d;
}

constexpr int kActivationThreads = 256;  // of a block

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kActivationThreads) activation_forward_kernel(const __grid_constant__ ActivationArgs a) {
  const int n = static_cast<int>(a.n), col = kColumns * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (col >= n) return;
  const Dropper dropper(a.dropout);
  const Values bias = load_parameter<T, kAligned>(a.bias, col, n, 0.0f);
  const int64_t rows_apart = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < a.rows; row += rows_apart) {
    Values y = widen(load<kAligned>(row_of<T>(a.x, row), col, n));
    for (int j = 0; j < kColumns; ++j) y.v[j] = activation_value(a.activation, y.v[j] + bias.v[j]);
    dropper.drop(y, dropper.keep(row, col));
    store<kAligned>(row_of<T>(a.out, row, a.n), col, n, y);
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kActivationThreads) activation_backward_kernel(const __grid_constant__ ActivationArgs a) {
  const int n = static_cast<int>(a.n), col = kColumns * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (col >= n) return;
  const Dropper dropper(a.dropout);
  const Values bias = load_parameter<T, kAligned>(a.bias, col, n, 0.0f);
  const int64_t part = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t parts = static_cast<int64_t>(gridDim.y) * blockDim.y;
  Values sum = {};
  for (int64_t row = part; row < a.rows; row += parts) {
    const Packed<T> grad = load<kAligned>(row_of<T>(a.grad, row), col, n);
    Packed<T> x = grad;  // any value will do where there is no x: the activation is none
    if (a.x.data) x = load<kAligned>(row_of<T>(a.x, row), col, n);
    Values d = widen(grad);
    dropper.drop(d, dropper.keep(row, col));
    for (int j = 0; j < kColumns; ++j) {
      d.v[j] = activation_gradient(a.activation, widen(x.v[j]) + bias.v[j], d.v[j]);
      sum.v[j] += d.v[j];
    }
    store<kAligned>(row_of<T>(a.out, row, a.n), col, n, d);
  }
  if (a.bias_partials) store<kAligned>(row_of<float>(a.bias_partials, part, a.n), col, n, sum);
}

// The threads of a block: as many chunks of columns as there are, up to 256, times rows.
struct Tile {
  int columns = 1, rows;
  int64_t blocks_x;

  explicit Tile(int64_t n) {
    const int64_t chunks = (n + kColumns - 1) / kColumns;
    while (columns < chunks && columns < kActivationThreads) columns *= 2;
    rows = kActivationThreads / columns;
    blocks_x = (chunks + columns - 1) / columns;
  }
};

// Parts of bias's gradient: enough to keep the multiprocessors busy, with some rows in each.
inline int64_t activation_parts(int64_t rows, int64_t n, int multiprocessors) {
  constexpr int kBlocksAtOnce = 4, kRowsOfPart = 16;
  const Tile tile(n);
  const int64_t busy = (kBlocksAtOnce * multiprocessors + tile.blocks_x - 1) / tile.blocks_x;
  const int64_t useful = (rows + kRowsOfPart * tile.rows - 1) / (kRowsOfPart * tile.rows);
  return (busy < useful ? busy : useful) * tile.rows;
}

// Forward where there is no a.grad. a.bias_partials has room for activation_parts; grad_bias (n) gets their sum.
template <typename Launch>
void activation_dropout(const ActivationArgs& a, DType type, void* grad_bias, const Launch& launch) {
  if (a.n == 0) return;
  constexpr int64_t kMostBlocks = 65535;
  const Tile tile(a.n);
  const int bytes = bytes_of(type);
  const bool all_aligned = a.n % kColumns == 0 && aligned(a.x, bytes) && aligned(a.grad, bytes) && aligned(a.bias) &&
                           aligned(a.out) && aligned(a.bias_partials);
  const int64_t parts = activation_parts(a.rows, a.n, launch.multiprocessors);
  int64_t blocks_y = (a.bias_partials ? parts : a.rows + tile.rows - 1) / tile.rows;
  blocks_y = blocks_y < kMostBlocks ? blocks_y : kMostBlocks;
  const dim3 grid(static_cast<unsigned>(tile.blocks_x), static_cast<unsigned>(blocks_y)), block(tile.columns, tile.rows);
  with_type(type, [&](auto t) {
    using T = typename decltype(t)::type;
    if (a.rows == 0) return;
    if (a.grad.data)
      launch(all_aligned ? activation_backward_kernel<T, true> : activation_backward_kernel<T, false>, grid, block, 0, a);
    else
      launch(all_aligned ? activation_forward_kernel<T, true> : activation_forward_kernel<T, false>, grid, block, 0, a);
  });
  sum_parts({{a.bias_partials, nullptr}, {grad_bias, nullptr}, parts, a.n}, launch);
}

}  // namespace cuda
}  // namespace ft
