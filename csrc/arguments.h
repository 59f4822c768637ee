// What the glue hands to the kernels of dropout_add_layer_norm and activation_dropout, on every device: pointers, sizes,
// strides in elements. No torch header.
#pragma once

#include <stdint.h>

#include "philox.h"

namespace ft {

enum class DType { f32, bf16, f16, f64 };
constexpr int kDTypes = 4;
enum class Activation { none, relu, gelu, gelu_tanh, silu };

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

// "Compute" below: float, for float64 double. x, out and their gradients have the activations' dtype; the residual, the sum and
// their gradients have it too, or the compute type (the residual stream of a model in half precision, kept in float32).

struct LayerNormForward {
  ConstRows x, residual;  // residual may be null
  Parameter weight, bias;
  void* out;    // (rows, n)
  void* sum;    // (rows, n) or null: residual + dropout(x)
  void* stats;  // (rows, 2) compute: mean (RMSNorm: 0) and 1 / sqrt(variance + eps)
  int64_t rows, n;
  double eps;
  bool rms;  // RMSNorm: the mean counts as 0
  Dropout dropout;
};

struct LayerNormBackward {
  ConstRows grad_out, grad_sum;  // grad_sum may be null
  ConstRows x, residual;         // one may be null; without x, residual holds the sum
  Parameter weight;
  const void* stats;
  void* grad_total;       // (rows, n): gradient of the sum, which is the residual's
  void* grad_x;           // (rows, n) or null: the same after dropout and in the dtype of x, where either makes a difference
  void* weight_partials;  // (parts, n) compute, or null: weight's gradient of each part of the rows
  void* bias_partials;    // the same of bias
  int64_t rows, n;
  bool rms;
  Dropout dropout;
};

struct ActivationArgs {
  ConstRows x;     // null where the derivative does not need it
  ConstRows grad;  // backward only
  Parameter bias;
  void* out;            // (rows, n): the result, or the gradient of x
  void* bias_partials;  // (parts, n) compute, or null: bias's gradient of each part of the rows
  int64_t rows, n;
  Activation activation;
  Dropout dropout;
};

}  // namespace ft
