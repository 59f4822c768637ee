// Torch glue of the CUDA kernels in activation_dropout_kernels.cuh: device, stream, launches, registration.
#include <torch/library.h>

#include <string>
#include <tuple>

#include "../activation_dropout.h"
#include "activation_dropout_kernels.cuh"
#include "launch.h"

namespace ft {
namespace {

using at::Tensor;

auto parts_for(const cuda::Launcher& launch) {
  return [&](int64_t rows, int64_t n) { return cuda::activation_parts(rows, n, launch.multiprocessors); };
}

Tensor activation_dropout(const Tensor& x, const OptionalTensor& bias, const std::string& activation, double dropout_p,
                          const OptionalTensor& seed) {
  const cuda::Launcher launch(x);
  ActivationCall call(x, {}, bias, activation, dropout_p, seed, false, cuda::empty, parts_for(launch));
  cuda::activation_dropout(call.args, cuda::dtype_of(x), nullptr, launch);
  return call.out;
}

std::tuple<Tensor, Tensor> activation_dropout_backward(const Tensor& grad, const OptionalTensor& x, const OptionalTensor& bias,
                                                       const std::string& activation, double dropout_p,
                                                       const OptionalTensor& seed, bool bias_grad) {
  const cuda::Launcher launch(grad);
  ActivationCall call(x, grad, bias, activation, dropout_p, seed, bias_grad, cuda::empty, parts_for(launch));
  cuda::activation_dropout(call.args, cuda::dtype_of(grad), call.grad_bias.mutable_data_ptr(), launch);
  return {call.out, call.grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CUDA, m) {
  m.impl("activation_dropout", activation_dropout);
  m.impl("activation_dropout_backward", activation_dropout_backward);
}

}  // namespace ft
