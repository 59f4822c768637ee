#include <ATen/ops/zeros_like.h>

#include <optional>
#include <string>
#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward_below(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const OptionalTensor& mask, const OptionalTensor& bias, const SymInt& first,
                                                 const SymInt& last, double scale, double softcap, double dropout_p,
                                                 const OptionalTensor& seed, const Text& return_weights, bool with_lse) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<AttentionOp>("fast_transformer::attention");
  return op.call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse);
}

using Options = std::tuple<SymInt, SymInt, double, double, double, Text, bool>;  // ... and whether bias wants a gradient

// Keeps the inputs, the output, a number a row and the seed.
struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& mask, const OptionalTensor& bias, const SymInt& first, const SymInt& last,
                               double scale, double softcap, double dropout_p, const OptionalTensor& seed,
                               const Text& return_weights, bool with_lse) {
    auto [out, weights, lse] =
        forward_below(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, true);
    ctx->save_for_backward({query, key, value, tensor(mask), tensor(bias), tensor(seed), out, lse});
    ctx->saved_data["options"] = Options(first, last, scale, softcap, dropout_p, return_weights, wants_grad(bias));
    ctx->set_materialize_grads(false);
    if (!return_weights) ctx->mark_non_differentiable({weights});
    return {out, weights, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [first, last, scale, softcap, dropout_p, return_weights, bias_grad] = ctx->saved_data["options"].to<Options>();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<AttentionBackwardOp>("fast_transformer::attention_backward");
    const auto [grad_query, grad_key, grad_value, grad_bias] =
        op.call(grads[0].defined() ? grads[0] : at::zeros_like(saved[6]), optional(grads[1]), optional(grads[2]), saved[0],
                saved[1], saved[2], optional(saved[3]), optional(saved[4]), first, last, scale, softcap, dropout_p,
                optional(saved[5]), return_weights, saved[6], saved[7], bias_grad);
    const Tensor none;
    return {grad_query, grad_key, grad_value, none, bias_grad ? grad_bias : none, none, none, none, none,
            none,       none,     none,       none};
  }
};

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const OptionalTensor& mask, const OptionalTensor& bias, SymInt first, SymInt last,
                                             double scale, double softcap, double dropout_p, const OptionalTensor& seed,
                                             const Text& return_weights, bool with_lse) {
  if (at::GradMode::is_enabled() &&
      (query.requires_grad() || key.requires_grad() || value.requires_grad() || wants_grad(bias))) {
    auto results =
        Attention::apply(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse);
    return {results[0], results[1], results[2]};
  }
  return forward_below(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("attention", attention); }

}  // namespace ft
