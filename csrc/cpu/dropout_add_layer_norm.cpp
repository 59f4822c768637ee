// Torch glue of the CPU kernels in dropout_add_layer_norm_kernels.h: threads, registration.
#include "../dropout_add_layer_norm.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "allocate.h"
#include "dispatch.h"

namespace ft {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const OptionalTensor& residual,
                                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                          double dropout_p, const OptionalTensor& seed, bool rms, bool prenorm,
                                                          bool residual_in_fp32) {
  LayerNormForwardCall call(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32, empty);
  const auto kernel = kernels().layer_norm_forward[residual_in_fp32][static_cast<int>(dtype_of(x))];
  at::parallel_for(0, call.args.rows, grain(call.args.n), [&](int64_t begin, int64_t end) { kernel(call.args, begin, end); });
  return {call.out, call.sum, call.stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const OptionalTensor& x, const OptionalTensor& residual,
    const OptionalTensor& weight, const Tensor& stats, double eps, double dropout_p, const OptionalTensor& seed, bool rms,
    bool weight_grad, bool bias_grad) {
  LayerNormBackwardCall call(grad_out, grad_sum, x, residual, weight, stats, dropout_p, seed, rms, weight_grad, bias_grad,
                             empty, [](int64_t rows, int64_t) { return RowBlocks(rows).count; });
  const RowBlocks blocks(call.args.rows);
  const int64_t n = call.args.n;
  const int dtype = static_cast<int>(dtype_of(grad_out));
  const auto kernel = kernels().layer_norm_backward[call.stream_type != call.type][dtype];
  at::parallel_for(0, blocks.count, grain(n * blocks.per_block), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) kernel(call.args, blocks, block);
  });
  const auto sum_blocks = kernels().sum_blocks[dtype];
  if (weight_grad) sum_blocks(call.args.weight_partials, call.grad_weight.mutable_data_ptr(), blocks.count, n);
  if (bias_grad) sum_blocks(call.args.bias_partials, call.grad_bias.mutable_data_ptr(), blocks.count, n);
  return {call.grad_total, call.grad_x, call.grad_weight, call.grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm);
  m.impl("dropout_add_layer_norm_backward", dropout_add_layer_norm_backward);
}

}  // namespace ft
