// The signatures of the ops, as the dispatcher wants them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <tuple>

namespace ft {

using c10::SymInt;
using Text = std::optional<std::string>;
using OptionalTensor = std::optional<at::Tensor>;

using AttentionOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                                   const OptionalTensor&, const OptionalTensor&, SymInt, SymInt,
                                                                   double, double, double, const OptionalTensor&, const Text&,
                                                                   bool);
using AttentionBackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const OptionalTensor&, const OptionalTensor&, SymInt, SymInt, double, double, double, const OptionalTensor&, const Text&,
    const at::Tensor&, const at::Tensor&, bool);
using AdditiveScoresOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&);
using AdditiveScoresBackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                                                const at::Tensor&, const at::Tensor&);
using ActivationDropoutOp = at::Tensor(const at::Tensor&, const OptionalTensor&, const std::string&, double,
                                       const OptionalTensor&);
using ActivationDropoutBackwardOp = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                                                       const OptionalTensor&, const std::string&, double,
                                                                       const OptionalTensor&, bool);
using DropoutAddLayerNormOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                                                             const OptionalTensor&, const OptionalTensor&,
                                                                             double, double, const OptionalTensor&, bool, bool,
                                                                             bool);
using DropoutAddLayerNormBackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const at::Tensor&, double, double, const OptionalTensor&, bool, bool, bool);
using LinearOneDnnBackwardOp = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const OptionalTensor&,
                                                                              const OptionalTensor&, bool);
using LinearOp = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const std::string&);

// The op `name` of this library.
template <typename Signature>
inline c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace ft
