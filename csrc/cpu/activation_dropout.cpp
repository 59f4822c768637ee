// Torch glue of the CPU kernels in activation_dropout_kernels.h: tensors, threads, registration.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "../checks.h"
#include "allocate.h"
#include "dispatch.h"

namespace ft {
namespace {

using at::Tensor;

ActivationArgs arguments(const Tensor& rows, const Tensor& bias, const Tensor& out, const std::string& activation,
                         const Dropout& dropout) {
  ActivationArgs args;
  args.bias = parameter(bias);
  args.out = out.mutable_data_ptr();
  args.grad_partials = nullptr;
  args.rows = rows.size(0);
  args.n = rows.size(1);
  args.activation = activation_of(activation);
  args.dropout = dropout;
  return args;
}

template <typename Kernel>
void for_chunks(const ActivationArgs& args, Kernel kernel) {
  at::parallel_for(0, args.rows * chunks_per_row(args.n), grain(std::min(args.n, kChunk)),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Tensor activation_dropout(const Tensor& x, const OptionalTensor& bias, const std::string& activation, double dropout_p,
                          const OptionalTensor& seed) {
  const Tensor rows = as_rows(x), b = as_parameter(bias, rows);
  Tensor out = empty(x.sizes(), x.options());
  ActivationArgs args = arguments(rows, b, out, activation, dropout_of(dropout_p, seed));
  args.x = const_rows(rows);
  for_chunks(args, kernels().activation_forward[static_cast<int>(dtype_of(x))]);
  return out;
}

std::tuple<Tensor, Tensor> activation_dropout_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& bias,
                                                       const std::string& activation, double dropout_p,
                                                       const OptionalTensor& seed, bool bias_grad) {
  const Tensor grad_rows = as_rows(grad), b = as_parameter(bias, grad_rows);
  const Tensor x_rows = present(x) ? as_rows_like(*x, grad_rows) : Tensor();
  Tensor grad_x = empty(grad.sizes(), grad.options());
  ActivationArgs args = arguments(grad_rows, b, grad_x, activation, dropout_of(dropout_p, seed));
  TORCH_CHECK_VALUE(x_rows.defined() || args.activation == Activation::none, "the derivative of ", activation, " needs x");
  if (args.activation != Activation::none) args.x = const_rows(x_rows);
  args.grad = const_rows(grad_rows);
  const auto wide = grad.options().dtype(compute_type(grad));
  Tensor grad_bias = at::empty({bias_grad ? args.n : 0}, wide);
  const int dtype = static_cast<int>(dtype_of(grad));
  if (!bias_grad) {
    for_chunks(args, kernels().activation_backward[dtype]);
    return {grad_x, grad_bias};
  }
  const RowBlocks blocks(args.rows);
  Tensor partials = at::empty({blocks.count, args.n}, wide);
  args.grad_partials = partials.mutable_data_ptr();
  const auto kernel = kernels().activation_backward_block[dtype];
  at::parallel_for(0, blocks.count, grain(args.n * blocks.per_block), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) kernel(args, blocks, block);
  });
  kernels().sum_blocks[dtype](partials.const_data_ptr(), grad_bias.mutable_data_ptr(), blocks.count, args.n);
  return {grad_x, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("activation_dropout", activation_dropout);
  m.impl("activation_dropout_backward", activation_dropout_backward);
}

}  // namespace ft
