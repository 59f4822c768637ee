// The kernels' interface: what the glue (torch, threads) hands to them, and the table each instruction set exports.
// No torch header: a call gets pointers, sizes, strides in elements, and a range of the work.
#pragma once

#include <stdint.h>

#include "../philox.h"

namespace ft {

enum class DType { f32, bf16, f16, f64 };
constexpr int kDTypes = 4;
enum class Activation { none, relu, gelu, gelu_tanh, silu };

// Rows are cut into blocks by their number alone, and sums over rows are made of one partial sum a block: the same bits for
// any number of threads.
struct RowBlocks {
  int64_t rows, per_block, count;
  explicit RowBlocks(int64_t rows) : rows(rows) {
    per_block = rows <= 16 * 64 ? 16 : (rows + 63) / 64;
    count = (rows + per_block - 1) / per_block;
  }
  int64_t begin(int64_t block) const { return block * per_block; }
  int64_t end(int64_t block) const { return begin(block) + per_block < rows ? begin(block) + per_block : rows; }
};

// A parameter vector (n), in the activations' dtype or in float32; data may be null.
struct Parameter {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

// Rows of a tensor (rows, n) with unit last stride; data may be null.
struct ConstRows {
  const void* data = nullptr;
  int64_t stride = 0;
};

// "Compute" below: float, for float64 double.
struct LayerNormForward {
  ConstRows x, residual;
  Parameter weight, bias;
  void* out;    // (rows, n)
  void* sum;    // (rows, n) or null: residual + dropout(x)
  void* stats;  // (rows, 2) compute: mean and 1 / sqrt(variance + eps)
  int64_t n;
  double eps;
  Dropout dropout;
};

struct LayerNormBackward {
  ConstRows grad_out, grad_sum;  // grad_sum may be null
  ConstRows x, residual;         // residual may be null; with x_is_sum, x holds residual + dropout(x) instead
  bool x_is_sum;
  Parameter weight;
  const void* stats;
  void* grad_total;     // (rows, n): gradient of the sum, which is the residual's
  void* grad_x;         // (rows, n) or null: the same after dropout
  void* grad_partials;  // (blocks, 2, n) compute, or null: weight's and bias's gradients of each block of rows
  int64_t n;
  Dropout dropout;
};

struct ActivationArgs {
  ConstRows x;     // null where the derivative does not need it
  ConstRows grad;  // backward only
  Parameter bias;
  void* out;            // (rows, n): the result, or the gradient of x
  void* grad_partials;  // (blocks, n) compute, or null: bias's gradient of each block of rows
  int64_t rows, n;
  Activation activation;
  Dropout dropout;
};

// Columns of a row that one task of an elementwise kernel takes.
constexpr int64_t kChunk = 4096;
inline int64_t chunks_per_row(int64_t n) { return (n + kChunk - 1) / kChunk; }

struct Kernels {
  const char* name;
  void (*layer_norm_forward[kDTypes])(const LayerNormForward&, int64_t begin_row, int64_t end_row);
  void (*layer_norm_backward[kDTypes])(const LayerNormBackward&, const RowBlocks&, int64_t block);
  void (*activation_forward[kDTypes])(const ActivationArgs&, int64_t begin_chunk, int64_t end_chunk);
  void (*activation_backward[kDTypes])(const ActivationArgs&, int64_t begin_chunk, int64_t end_chunk);
  void (*activation_backward_block[kDTypes])(const ActivationArgs&, const RowBlocks&, int64_t block);
  void (*sum_blocks[kDTypes])(const void* partials, void* out, int64_t count, int64_t n);
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif

}  // namespace ft
