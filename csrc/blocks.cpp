#include "blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include <cmath>

#include "checks.h"

namespace ft {
namespace {

using at::Tensor;

constexpr int64_t kUnlimited = int64_t(1) << 62;

Tensor activation_dropout(const Tensor& x, const std::string& activation, double p, const OptionalTensor& seed) {
  static const auto op = find_op<ActivationDropoutOp>("fast_transformer::activation_dropout");
  return op.call(x, {}, activation, p, seed);
}

Tensor activate(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::relu: return at::relu(x);
    case Activation::gelu: return at::gelu(x);
    case Activation::gelu_tanh: return at::gelu(x, "tanh");
    case Activation::silu: return at::silu(x);
    case Activation::none: break;
  }
  return x;
}

// norm(residual + dropout(x)) and, with `prenorm`, the sum.
std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const OptionalTensor& residual, const SeededDropout& dropout,
                                    const LayerNorm& norm, bool prenorm) {
  static const auto op = find_op<DropoutAddLayerNormOp>("fast_transformer::dropout_add_layer_norm");
  const auto& [weight, bias, eps] = norm;
  const auto& [p, seed] = dropout;
  const auto [out, sum, stats] = op.call(x, residual, weight, bias, eps, p, seed, false, prenorm, false);
  return {out, sum};
}

}  // namespace

std::tuple<Tensor, Tensor> self_attention(const Tensor& x, const SelfAttention& block, const Text& return_weights) {
  static const auto attention = find_op<AttentionOp>("fast_transformer::attention");
  const auto& [in_weight, in_bias, out_weight, out_bias, heads, mask, bias, causal, p, seed] = block;
  const int64_t N = x.size(0), L = x.size(1), E = x.size(2), D = E / heads;
  const auto qkv = at::linear(x, in_weight, in_bias).view({N, L, 3, heads, D}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto [out, weights, lse] = attention.call(qkv[0], qkv[1], qkv[2], mask, bias, -kUnlimited, causal ? 0 : kUnlimited,
                                                  std::pow(static_cast<double>(D), -0.5), 0.0, p, seed, return_weights, false);
  return {at::linear(out.transpose(1, 2).reshape({N, L, E}), out_weight, out_bias), weights};
}

Tensor feed_forward(const Tensor& x, const FeedForward& block) {
  const auto& [weight1, bias1, weight2, bias2, activation, p, seed] = block;
  const Tensor h = at::linear(x, weight1, bias1);
  const bool drops = p > 0.0;
  return at::linear(drops ? activation_dropout(h, activation, p, seed) : activate(h, activation_of(activation)), weight2,
                    bias2);
}

Tensor encoder_layer(const Tensor& x, const SelfAttention& attention, const SeededDropout& dropout1, const LayerNorm& norm1,
                     const FeedForward& feed_forward, const SeededDropout& dropout2, const LayerNorm& norm2, bool norm_first) {
  const auto attend = [&](const Tensor& h) { return std::get<0>(self_attention(h, attention, {})); };
  const auto feed = [&](const Tensor& h) { return ft::feed_forward(h, feed_forward); };
  if (norm_first) {
    const Tensor first = std::get<0>(add_norm(x, {}, {0.0, {}}, norm1, false));
    const auto [h, sum] = add_norm(attend(first), x, dropout1, norm2, true);
    const auto& [p, seed] = dropout2;
    return sum + (p > 0.0 ? activation_dropout(feed(h), "none", p, seed) : feed(h));
  }
  const Tensor h = std::get<0>(add_norm(attend(x), x, dropout1, norm1, false));
  return std::get<0>(add_norm(feed(h), h, dropout2, norm2, false));
}

}  // namespace ft
