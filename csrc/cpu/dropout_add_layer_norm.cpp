// Torch glue of the CPU kernels in dropout_add_layer_norm_kernels.h: tensors, threads, registration.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "../checks.h"
#include "allocate.h"
#include "dispatch.h"

namespace ft {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const OptionalTensor& residual,
                                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                          double dropout_p, const OptionalTensor& seed, bool prenorm) {
  const Tensor x_rows = as_rows(x);
  const int64_t rows = x_rows.size(0), n = x_rows.size(1);
  TORCH_CHECK_VALUE(n >= 1, "x must have a last dimension of size >= 1");
  const Tensor residual_rows = present(residual) ? as_rows_like(*residual, x_rows) : Tensor();
  const Tensor w = as_parameter(weight, x_rows), b = as_parameter(bias, x_rows);
  Tensor out = empty(x.sizes(), x.options());
  Tensor sum = empty(prenorm ? x.sizes() : at::IntArrayRef({0}), x.options());
  Tensor stats = at::empty({rows, 2}, x.options().dtype(compute_type(x)));

  LayerNormForward args;
  args.x = const_rows(x_rows);
  if (residual_rows.defined()) args.residual = const_rows(residual_rows);
  args.weight = parameter(w);
  args.bias = parameter(b);
  args.out = out.mutable_data_ptr();
  args.sum = prenorm ? sum.mutable_data_ptr() : nullptr;
  args.stats = stats.mutable_data_ptr();
  args.n = n;
  args.eps = eps;
  args.dropout = dropout_of(dropout_p, seed);
  const auto kernel = kernels().layer_norm_forward[static_cast<int>(dtype_of(x))];
  at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return {out, sum, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(const Tensor& grad_out,
                                                                           const OptionalTensor& grad_sum, const Tensor& x,
                                                                           const OptionalTensor& residual, bool x_is_sum,
                                                                           const OptionalTensor& weight, const Tensor& stats,
                                                                           double eps, double dropout_p,
                                                                           const OptionalTensor& seed, bool parameter_grads) {
  const Tensor x_rows = as_rows(x);
  const int64_t rows = x_rows.size(0), n = x_rows.size(1);
  const Tensor grad_out_rows = as_rows_like(grad_out, x_rows);
  const Tensor grad_sum_rows = present(grad_sum) ? as_rows_like(*grad_sum, x_rows) : Tensor();
  const Tensor residual_rows = present(residual) ? as_rows_like(*residual, x_rows) : Tensor();
  const Tensor w = as_parameter(weight, x_rows);
  const Tensor statistics = stats.contiguous();
  TORCH_CHECK_VALUE(statistics.numel() == 2 * rows && statistics.scalar_type() == compute_type(x),
                    "stats must be (rows, 2), as forward returned them");
  const RowBlocks blocks(rows);
  const Dropout dropout = dropout_of(dropout_p, seed);
  const auto wide = x.options().dtype(compute_type(x));
  Tensor grad_total = empty(x.sizes(), x.options());
  Tensor grad_x = empty(dropout.on() ? x.sizes() : at::IntArrayRef({0}), x.options());
  Tensor partials = at::empty({parameter_grads ? blocks.count : 0, 2, n}, wide);
  Tensor grad_parameters = at::empty({parameter_grads ? 2 : 0, n}, wide);

  LayerNormBackward args;
  args.grad_out = const_rows(grad_out_rows);
  if (grad_sum_rows.defined()) args.grad_sum = const_rows(grad_sum_rows);
  args.x = const_rows(x_rows);
  if (residual_rows.defined()) args.residual = const_rows(residual_rows);
  args.x_is_sum = x_is_sum;
  args.weight = parameter(w);
  args.stats = statistics.const_data_ptr();
  args.grad_total = grad_total.mutable_data_ptr();
  args.grad_x = dropout.on() ? grad_x.mutable_data_ptr() : nullptr;
  args.grad_partials = parameter_grads ? partials.mutable_data_ptr() : nullptr;
  args.n = n;
  args.dropout = dropout;
  const int dtype = static_cast<int>(dtype_of(x));
  const auto kernel = kernels().layer_norm_backward[dtype];
  at::parallel_for(0, blocks.count, grain(n * blocks.per_block), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) kernel(args, blocks, block);
  });
  if (!parameter_grads) return {grad_total, grad_x, grad_parameters, at::empty_like(grad_parameters)};
  kernels().sum_blocks[dtype](partials.const_data_ptr(), grad_parameters.mutable_data_ptr(), blocks.count, 2 * n);
  return {grad_total, grad_x, grad_parameters[0].clone(), grad_parameters[1].clone()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm);
  m.impl("dropout_add_layer_norm_backward", dropout_add_layer_norm_backward);
}

}  // namespace ft
