// What the glue of activation_dropout is on every device: tensors in, the kernels' arguments and room for the results out.
#pragma once

#include <ATen/ops/empty.h>

#include <string>

#include "checks.h"

namespace ft {

// Forward: `grad` is absent. `empty(sizes, options)` allocates the large result; `parts(rows, n)` says of how many partial sums
// the kernels make bias's gradient.
struct ActivationCall {
  at::Tensor out;        // the result, or the gradient of x
  at::Tensor grad_bias;  // (N,), or empty
  ActivationArgs args;

  template <typename Empty, typename Parts>
  ActivationCall(const OptionalTensor& x, const OptionalTensor& grad, const OptionalTensor& bias, const std::string& activation,
                 double dropout_p, const OptionalTensor& seed, bool want_bias, Empty empty, Parts parts) {
    const Activation kind = activation_of(activation);
    TORCH_CHECK_VALUE(present(x) || (present(grad) && kind == Activation::none), "the derivative of ", activation, " needs x");
    const at::Tensor& like = present(grad) ? *grad : *x;
    const at::Tensor rows = as_rows(like);
    const auto wide = like.options().dtype(compute_type(like));
    if (present(grad)) grad_ = rows;
    if (!present(grad) || kind != Activation::none) x_ = as_rows_like(x, rows, like.scalar_type());
    bias_ = as_parameter(bias, rows);
    out = empty(like.sizes(), like.options());
    if (present(grad)) grad_bias = at::empty({want_bias ? rows.size(1) : 0}, wide);
    if (want_bias) bias_partials_ = at::empty({parts(rows.size(0), rows.size(1)), rows.size(1)}, wide);
    args = {const_rows(x_),
            const_rows(grad_),
            parameter(bias_),
            out.mutable_data_ptr(),
            want_bias ? bias_partials_.mutable_data_ptr() : nullptr,
            rows.size(0),
            rows.size(1),
            kind,
            dropout_of(dropout_p, seed, like.device())};
  }

 private:
  at::Tensor x_, grad_, bias_, bias_partials_;  // what args points to, where it is not the caller's own
};

}  // namespace ft
