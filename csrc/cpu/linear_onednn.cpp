// Matrix products of linear layers through oneDNN, as torch ships it: at::linear takes it for half precision only, and leaves
// float32 to MKL, which runs at half of that on AMD's processors.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "../checks.h"
#include "../signatures.h"

namespace ft {
namespace {

using at::Tensor;
using LinearPointwiseOp = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                                 c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);

Tensor product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
               std::optional<c10::string_view> algorithm) {
  if (x.numel() == 0 || weight.numel() == 0) return at::matmul(x, weight.t());  // oneDNN refuses these; nothing, or zeros
  static const auto op = find_op<LinearPointwiseOp>("mkldnn::_linear_pointwise");
  return op.call(x, weight, bias, activation, c10::List<std::optional<at::Scalar>>(), algorithm);
}

Tensor linear_onednn(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  check_linear(x, weight, bias);
  if (activation == "relu") return product(x, weight, bias, "none", {}).relu_();  // oneDNN's makes 0 of NaN
  if (activation == "gelu_tanh") return product(x, weight, bias, "gelu", "tanh");
  return product(x, weight, bias, activation == "silu" ? "swish" : activation,
                 activation == "gelu" ? std::optional<c10::string_view>("none") : std::nullopt);
}

// x (..., K) and weight (N, K): each is there if the gradient of the other is wanted.
std::tuple<Tensor, Tensor, Tensor> linear_onednn_backward(const Tensor& grad, const OptionalTensor& x,
                                                          const OptionalTensor& weight, bool bias_grad) {
  const int64_t M = c10::multiply_integers(grad.sizes().slice(0, grad.dim() - 1));
  const Tensor rows = grad.reshape({M, grad.size(-1)});  // (M, N)
  const auto none = [&] { return at::empty({0}, grad.options()); };
  return {present(weight) ? product(grad, weight->t(), {}, "none", {}) : none(),
          present(x) ? product(rows.t(), x->reshape({M, x->size(-1)}).t(), {}, "none", {}) : none(),
          bias_grad ? rows.sum(0) : none()};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("linear_onednn", linear_onednn);
  m.impl("linear_onednn_backward", linear_onednn_backward);
}

}  // namespace ft
