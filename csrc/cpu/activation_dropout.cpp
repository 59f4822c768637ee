// Torch glue of the CPU kernels in activation_dropout_kernels.h: threads, registration.
#include "../activation_dropout.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "allocate.h"
#include "dispatch.h"

namespace ft {
namespace {

using at::Tensor;

int64_t parts(int64_t rows, int64_t) { return RowBlocks(rows).count; }

template <typename Kernel>
void for_chunks(const ActivationArgs& args, Kernel kernel) {
  at::parallel_for(0, args.rows * chunks_per_row(args.n), grain(std::min(args.n, kChunk)),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Tensor activation_dropout(const Tensor& x, const OptionalTensor& bias, const std::string& activation, double dropout_p,
                          const OptionalTensor& seed) {
  ActivationCall call(x, {}, bias, activation, dropout_p, seed, false, empty, parts);
  for_chunks(call.args, kernels().activation_forward[static_cast<int>(dtype_of(x))]);
  return call.out;
}

std::tuple<Tensor, Tensor> activation_dropout_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& bias,
                                                       const std::string& activation, double dropout_p,
                                                       const OptionalTensor& seed, bool bias_grad) {
  ActivationCall call(x, grad, bias, activation, dropout_p, seed, bias_grad, empty, parts);
  const int dtype = static_cast<int>(dtype_of(grad));
  if (!bias_grad) {
    for_chunks(call.args, kernels().activation_backward[dtype]);
    return {call.out, call.grad_bias};
  }
  const RowBlocks blocks(call.args.rows);
  const int64_t n = call.args.n;
  const auto kernel = kernels().activation_backward_block[dtype];
  at::parallel_for(0, blocks.count, grain(n * blocks.per_block), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) kernel(call.args, blocks, block);
  });
  kernels().sum_blocks[dtype](call.args.bias_partials, call.grad_bias.mutable_data_ptr(), blocks.count, n);
  return {call.out, call.grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("activation_dropout", activation_dropout);
  m.impl("activation_dropout_backward", activation_dropout_backward);
}

}  // namespace ft
