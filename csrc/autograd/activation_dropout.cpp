#include <string>
#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

Tensor forward_below(const Tensor& x, const OptionalTensor& bias, const std::string& activation, double dropout_p,
                     const OptionalTensor& seed) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<ActivationDropoutOp>("fast_transformer::activation_dropout");
  return op.call(x, bias, activation, dropout_p, seed);
}

// Keeps x and bias, without an activation not even those, and the seed.
struct ActivationDropout : torch::autograd::Function<ActivationDropout> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias, const std::string& activation,
                        double dropout_p, const OptionalTensor& seed) {
    const bool keep_x = activation != "none";
    ctx->save_for_backward({keep_x ? x : Tensor(), keep_x ? tensor(bias) : Tensor(), tensor(seed)});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["bias_grad"] = wants_grad(bias);
    return forward_below(x, bias, activation, dropout_p, seed);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const bool bias_grad = ctx->saved_data["bias_grad"].toBool();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<ActivationDropoutBackwardOp>("fast_transformer::activation_dropout_backward");
    const auto [grad_x, grad_bias] =
        op.call(grads[0], optional(saved[0]), optional(saved[1]), ctx->saved_data["activation"].toStringRef(),
                ctx->saved_data["dropout_p"].toDouble(), optional(saved[2]), bias_grad);
    const Tensor none;
    return {grad_x, bias_grad ? grad_bias : none, none, none, none};
  }
};

Tensor activation_dropout(const Tensor& x, const OptionalTensor& bias, const std::string& activation, double dropout_p,
                          const OptionalTensor& seed) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || wants_grad(bias)))
    return ActivationDropout::apply(x, bias, activation, dropout_p, seed);
  return forward_below(x, bias, activation, dropout_p, seed);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("activation_dropout", activation_dropout); }

}  // namespace ft
