#include <optional>
#include <string>
#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

using c10::SymInt;
using Text = std::optional<std::string>;
using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                   const OptionalTensor&, SymInt, SymInt, double, double, double,
                                                   const OptionalTensor&, const Text&, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                            const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                            const OptionalTensor&, SymInt, SymInt, double, double, double,
                                                            const OptionalTensor&, const Text&, const Tensor&, const Tensor&,
                                                            bool);

std::tuple<Tensor, Tensor, Tensor> forward_below(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const OptionalTensor& mask, const OptionalTensor& bias, const SymInt& first,
                                                 const SymInt& last, double scale, double softcap, double dropout_p,
                                                 const OptionalTensor& seed, const Text& return_weights, bool with_lse) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<Forward>("fast_transformer::attention");
  return op.call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse);
}

// Keeps the inputs, the output, a number a row and the seed.
struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& mask, const OptionalTensor& bias, const SymInt& first, const SymInt& last,
                               double scale, double softcap, double dropout_p, const OptionalTensor& seed,
                               const Text& return_weights, bool with_lse) {
    auto [out, weights, lse] =
        forward_below(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, true);
    ctx->save_for_backward({query, key, value, tensor(mask), tensor(bias), tensor(seed), out, lse});
    ctx->saved_data["first"] = first;
    ctx->saved_data["last"] = last;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["return_weights"] = return_weights;
    ctx->saved_data["bias_grad"] = wants_grad(bias);
    ctx->set_materialize_grads(false);
    if (!return_weights) ctx->mark_non_differentiable({weights});
    return {out, weights, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const bool bias_grad = ctx->saved_data["bias_grad"].toBool();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<Backward>("fast_transformer::attention_backward");
    const auto [grad_query, grad_key, grad_value, grad_bias] =
        op.call(grads[0].defined() ? grads[0] : at::zeros_like(saved[6]), optional(grads[1]), optional(grads[2]), saved[0],
                saved[1], saved[2], optional(saved[3]), optional(saved[4]), ctx->saved_data["first"].toSymInt(),
                ctx->saved_data["last"].toSymInt(), ctx->saved_data["scale"].toDouble(), ctx->saved_data["softcap"].toDouble(),
                ctx->saved_data["dropout_p"].toDouble(), optional(saved[5]),
                ctx->saved_data["return_weights"].toOptional<std::string>(), saved[6], saved[7], bias_grad);
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
