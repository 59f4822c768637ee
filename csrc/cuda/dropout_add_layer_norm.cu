// Torch glue of the CUDA kernels in dropout_add_layer_norm_kernels.cuh: device, stream, launches, registration.
#include <torch/library.h>

#include <tuple>

#include "../dropout_add_layer_norm.h"
#include "dropout_add_layer_norm_kernels.cuh"
#include "launch.h"

namespace ft {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const OptionalTensor& residual,
                                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                          double dropout_p, const OptionalTensor& seed, bool rms, bool prenorm,
                                                          bool residual_in_fp32) {
  const cuda::Launcher launch(x);
  LayerNormForwardCall call(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32, cuda::empty);
  const DType type = cuda::dtype_of(x);
  cuda::layer_norm_forward(call.args, type, residual_in_fp32 ? DType::f32 : type, launch);
  return {call.out, call.sum, call.stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const OptionalTensor& x, const OptionalTensor& residual,
    const OptionalTensor& weight, const Tensor& stats, double eps, double dropout_p, const OptionalTensor& seed, bool rms,
    bool weight_grad, bool bias_grad) {
  const cuda::Launcher launch(grad_out);
  const auto parts = [&](int64_t rows, int64_t n) { return cuda::layer_norm_parts(rows, n, launch.multiprocessors); };
  LayerNormBackwardCall call(grad_out, grad_sum, x, residual, weight, stats, dropout_p, seed, rms, weight_grad, bias_grad,
                             cuda::empty, parts);
  const DType type = cuda::dtype_of(grad_out);
  cuda::layer_norm_backward(call.args, type, call.stream_type == call.type ? type : DType::f32,
                            call.grad_weight.mutable_data_ptr(), call.grad_bias.mutable_data_ptr(), launch);
  return {call.grad_total, call.grad_x, call.grad_weight, call.grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CUDA, m) {
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm);
  m.impl("dropout_add_layer_norm_backward", dropout_add_layer_norm_backward);
}

}  // namespace ft
