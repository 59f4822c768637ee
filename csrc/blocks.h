// Blocks of a layer, and a layer, as chains of ops. In a small model Python takes longer to make these calls than the ops to do
// their work. Every op goes through the dispatcher, so autograd and whoever else watches sees what it would see from Python.
#pragma once

#include <string>
#include <tuple>

#include "signatures.h"

namespace ft {

// The number of heads, mask, bias, causal, and dropout with its seed, after the projections' weights and biases.
using SelfAttention = std::tuple<at::Tensor, OptionalTensor, at::Tensor, OptionalTensor, int64_t, OptionalTensor,
                                 OptionalTensor, bool, double, OptionalTensor>;
// Weights and biases of the two linear layers, the activation between them, and dropout with its seed.
using FeedForward = std::tuple<at::Tensor, OptionalTensor, at::Tensor, OptionalTensor, std::string, double, OptionalTensor>;
// Weight, bias and eps.
using LayerNorm = std::tuple<OptionalTensor, OptionalTensor, double>;
using SeededDropout = std::tuple<double, OptionalTensor>;

// Of x (N, L, E); with the weights, if asked for.
std::tuple<at::Tensor, at::Tensor> self_attention(const at::Tensor& x, const SelfAttention& block, const Text& return_weights);

at::Tensor feed_forward(const at::Tensor& x, const FeedForward& block);

// A layer of an encoder. Each dropout is that of a block's result, before it is added to the residual stream.
at::Tensor encoder_layer(const at::Tensor& x, const SelfAttention& attention, const SeededDropout& dropout1,
                         const LayerNorm& norm1, const FeedForward& feed_forward, const SeededDropout& dropout2,
                         const LayerNorm& norm2, bool norm_first);

}  // namespace ft
