#include <ATen/ops/zeros_like.h>

#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward_below(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, double eps, double dropout_p,
                                                 const OptionalTensor& seed, bool rms, bool prenorm, bool residual_in_fp32) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<DropoutAddLayerNormOp>("fast_transformer::dropout_add_layer_norm");
  return op.call(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32);
}

// Keeps the inputs, or where it is an output anyway (prenorm) the sum instead of them, two numbers a row and the seed.
struct DropoutAddLayerNorm : torch::autograd::Function<DropoutAddLayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps, double dropout_p,
                               const OptionalTensor& seed, bool rms, bool prenorm, bool residual_in_fp32) {
    auto [out, sum, stats] = forward_below(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32);
    ctx->save_for_backward({prenorm ? Tensor() : x, prenorm ? sum : tensor(residual), tensor(weight), stats, tensor(seed)});
    ctx->saved_data["dtype"] = out.scalar_type();
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["rms"] = rms;
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
    const bool normalised = grads[0].defined();  // else only the sum was used, and the parameters took no part
    const bool weight_grad = normalised && ctx->saved_data["weight_grad"].toBool();
    const bool bias_grad = normalised && ctx->saved_data["bias_grad"].toBool();
    const Tensor& like = saved[0].defined() ? saved[0] : saved[1];
    const Tensor grad_out =
        normalised ? grads[0] : at::zeros_like(like, like.options().dtype(ctx->saved_data["dtype"].toScalarType()));
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<DropoutAddLayerNormBackwardOp>("fast_transformer::dropout_add_layer_norm_backward");
    const double dropout_p = ctx->saved_data["dropout_p"].toDouble();
    const auto [grad_total, grad_x, grad_w, grad_b] =
        op.call(grad_out, optional(grads[1]), optional(saved[0]), optional(saved[1]), optional(saved[2]), saved[3],
                ctx->saved_data["eps"].toDouble(), dropout_p, optional(saved[4]), ctx->saved_data["rms"].toBool(), weight_grad,
                bias_grad);
    const Tensor none;
    return {dropout_p > 0 || grad_total.scalar_type() != grad_out.scalar_type() ? grad_x : grad_total,
            ctx->saved_data["has_residual"].toBool() ? grad_total : none,
            weight_grad ? grad_w : none,
            bias_grad ? grad_b : none,
            none,
            none,
            none,
            none,
            none,
            none};
  }
};

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const OptionalTensor& residual,
                                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                                          double dropout_p, const OptionalTensor& seed, bool rms, bool prenorm,
                                                          bool residual_in_fp32) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || wants_grad(residual) || wants_grad(weight) || wants_grad(bias))) {
    const auto outputs =
        DropoutAddLayerNorm::apply(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32);
    return {outputs[0], outputs[1], outputs[2]};
  }
  return forward_below(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("dropout_add_layer_norm", dropout_add_layer_norm); }

}  // namespace ft
