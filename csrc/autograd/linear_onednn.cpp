#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

Tensor forward_below(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<LinearOp>("fast_transformer::linear_onednn");
  return op.call(x, weight, bias, activation);
}

// Keeps x and weight.
struct LinearOneDnn : torch::autograd::Function<LinearOneDnn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    ctx->saved_data["bias_grad"] = wants_grad(bias);
    return forward_below(x, weight, bias, "none");
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const bool x_grad = saved[1].defined(), weight_grad = saved[0].defined();
    const bool bias_grad = ctx->saved_data["bias_grad"].toBool();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<LinearOneDnnBackwardOp>("fast_transformer::linear_onednn_backward");
    const auto [grad_x, grad_weight, grad_bias] = op.call(grads[0], optional(saved[0]), optional(saved[1]), bias_grad);
    const Tensor none;
    return {x_grad ? grad_x : none, weight_grad ? grad_weight : none, bias_grad ? grad_bias : none};
  }
};

Tensor linear_onednn(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad() || wants_grad(bias))) {
    TORCH_CHECK_VALUE(activation == "none", "linear_onednn has a gradient without an activation only, got ", activation);
    return LinearOneDnn::apply(x, weight, bias);
  }
  return forward_below(x, weight, bias, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("linear_onednn", linear_onednn); }

}  // namespace ft
