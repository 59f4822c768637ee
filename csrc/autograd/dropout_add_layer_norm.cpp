#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward_below(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, double eps, double dropout_p,
                                                 const OptionalTensor& seed, bool prenorm) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<DropoutAddLayerNormOp>("fast_transformer::dropout_add_layer_norm");
  return op.call(x, residual, weight, bias, eps, dropout_p, seed, prenorm);
}

// Keeps the inputs, or where it is an output anyway (prenorm) the sum instead of them, two numbers a row and the seed.
struct DropoutAddLayerNorm : torch::autograd::Function<DropoutAddLayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps, double dropout_p,
                               const OptionalTensor& seed, bool prenorm) {
    auto [out, sum, stats] = forward_below(x, residual, weight, bias, eps, dropout_p, seed, prenorm);
    ctx->save_for_backward({prenorm ? sum : x, prenorm ? Tensor() : tensor(residual), tensor(weight), stats, tensor(seed)});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["prenorm"] = prenorm;
    ctx->saved_data["weight_grad"] = wants_grad(weight);
    ctx->saved_data["bias_grad"] = wants_grad(bias);
    ctx->saved_data["has_residual"] = present(residual);
    ctx->set_materialize_grads(false);
    if (prenorm) {
      ctx->mark_non_differentiable({stats});
    } else {
      ctx->mark_non_differentiable({sum, stats});
    }
    return {out, sum, stats};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &stats = saved[3];
    const bool normalised = grads[0].defined();  // else only the sum was used, and the parameters took no part
    const bool weight_grad = normalised && ctx->saved_data["weight_grad"].toBool();
    const bool bias_grad = normalised && ctx->saved_data["bias_grad"].toBool();
    const double dropout_p = ctx->saved_data["dropout_p"].toDouble();
    const Tensor grad_out = normalised ? grads[0] : at::zeros_like(x);
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<DropoutAddLayerNormBackwardOp>("fast_transformer::dropout_add_layer_norm_backward");
    const auto [grad_total, grad_x, grad_w, grad_b] =
        op.call(grad_out, optional(grads[1]), x, optional(saved[1]), ctx->saved_data["prenorm"].toBool(), optional(saved[2]),
                stats, ctx->saved_data["eps"].toDouble(), dropout_p, optional(saved[4]), weight_grad || bias_grad);
    const Tensor none;
    return {dropout_p > 0 ? grad_x : grad_total,
            ctx->saved_data["has_residual"].toBool() ? grad_total : none,
            weight_grad ? grad_w : none,
            bias_grad ? grad_b : none,
            none,
            none,
            none,
            none};
  }
};

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const OptionalTensor& residual,
                                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                          double dropout_p, const OptionalTensor& seed, bool prenorm) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || wants_grad(residual) || wants_grad(weight) || wants_grad(bias))) {
    const auto outputs = DropoutAddLayerNorm::apply(x, residual, weight, bias, eps, dropout_p, seed, prenorm);
    return {outputs[0], outputs[1], outputs[2]};
  }
  return forward_below(x, residual, weight, bias, eps, dropout_p, seed, prenorm);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("dropout_add_layer_norm", dropout_add_layer_norm); }

}  // namespace ft
