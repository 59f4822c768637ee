#include <optional>
#include <tuple>

#include "autograd.h"

namespace ft {
namespace {

Tensor forward_below(const Tensor& query, const Tensor& key, const Tensor& weight) {
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<AdditiveScoresOp>("fast_transformer::additive_scores");
  return op.call(query, key, weight);
}

// Keeps the inputs.
struct AdditiveScores : torch::autograd::Function<AdditiveScores> {
  static Tensor forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& weight) {
    ctx->save_for_backward({query, key, weight});
    return forward_below(query, key, weight);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    static const auto op = find_op<AdditiveScoresBackwardOp>("fast_transformer::additive_scores_backward");
    const auto [grad_query, grad_key, grad_weight] = op.call(grads[0], saved[0], saved[1], saved[2]);
    return {grad_query, grad_key, grad_weight};
  }
};

Tensor additive_scores(const Tensor& query, const Tensor& key, const Tensor& weight) {
  if (at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || weight.requires_grad()))
    return AdditiveScores::apply(query, key, weight);
  return forward_below(query, key, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("additive_scores", additive_scores); }

}  // namespace ft
