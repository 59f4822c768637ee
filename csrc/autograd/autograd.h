// What the autograd formulas of the ops share. They hold for every device: each calls its op again, below autograd, and the
// dispatcher finds the kernel.
//
// A backward that is itself recorded (create_graph=True) calls the backward op with autograd on, where Python has registered
// the reference (fast_transformer/ops/): derivatives of any order, at the reference's speed.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "../checks.h"
#include "../signatures.h"

namespace ft {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool wants_grad(const OptionalTensor& t) { return present(t) && t->requires_grad(); }
inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }
inline Tensor tensor(const OptionalTensor& t) { return t.value_or(Tensor()); }

}  // namespace ft
