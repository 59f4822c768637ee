// What the glue of dropout_add_layer_norm is on every device: tensors in, the kernels' arguments and room for the results out.
#pragma once

#include <ATen/ops/empty.h>

#include "checks.h"

namespace ft {

// `empty(sizes, options)` allocates the large results.
struct LayerNormForwardCall {
  at::Tensor out, sum, stats;
  LayerNormForward args;

  template <typename Empty>
  LayerNormForwardCall(const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, double dropout_p, const OptionalTensor& seed, bool rms,
                       bool prenorm, bool residual_in_fp32, Empty empty)
      : x_(as_rows(x)) {
    TORCH_CHECK_VALUE(x_.size(1) >= 1, "x must have a last dimension of size >= 1");
    const at::ScalarType stream_type = residual_in_fp32 ? compute_type(x) : x.scalar_type();
    residual_ = as_rows_like(residual, x_, stream_type);
    weight_ = as_parameter(weight, x_);
    bias_ = as_parameter(bias, x_);
    out = empty(x.sizes(), x.options());
    sum = empty(prenorm ? x.sizes() : at::IntArrayRef({0}), x.options().dtype(stream_type));
    stats = at::empty({x_.size(0), 2}, x.options().dtype(compute_type(x)));
    args = {const_rows(x_),
            const_rows(residual_),
            parameter(weight_),
            parameter(bias_),
            out.mutable_data_ptr(),
            prenorm ? sum.mutable_data_ptr() : nullptr,
            stats.mutable_data_ptr(),
            x_.size(0),
            x_.size(1),
            eps,
            rms,
            dropout_of(dropout_p, seed, x.device())};
  }

 private:
  at::Tensor x_, residual_, weight_, bias_;  // what args points to, where it is not the caller's own
};

// `parts(rows, n)` says of how many partial sums the kernels make the parameters' gradients.
struct LayerNormBackwardCall {
  at::Tensor grad_total, grad_x, grad_weight, grad_bias;
  at::ScalarType type, stream_type;  // of the activations, of the residual and the sum
  LayerNormBackward args;

  template <typename Empty, typename Parts>
  LayerNormBackwardCall(const at::Tensor& grad_out, const OptionalTensor& grad_sum, const OptionalTensor& x,
                        const OptionalTensor& residual, const OptionalTensor& weight, const at::Tensor& stats, double dropout_p,
                        const OptionalTensor& seed, bool rms, bool want_weight, bool want_bias, Empty empty, Parts parts)
      : type(grad_out.scalar_type()), grad_out_(as_rows(grad_out)), stats_(stats.contiguous()) {
    TORCH_CHECK_VALUE(present(x) || present(residual), "backward needs x, residual or both");
    const int64_t rows = grad_out_.size(0), n = grad_out_.size(1);
    const auto wide = grad_out.options().dtype(compute_type(grad_out));
    stream_type = present(residual) ? residual->scalar_type() : type;
    TORCH_CHECK_VALUE(stream_type == type || stream_type == compute_type(grad_out), "residual must be ", type, " or ",
                      compute_type(grad_out), ", got ", stream_type);
    TORCH_CHECK_VALUE(
        stats_.numel() == 2 * rows && stats_.scalar_type() == compute_type(grad_out) && stats_.device() == grad_out.device(),
        "stats must be (rows, 2), as forward returned them");
    x_ = as_rows_like(x, grad_out_, type);
    residual_ = as_rows_like(residual, grad_out_, stream_type);
    grad_sum_ = as_rows_like(grad_sum, grad_out_, stream_type);
    weight_ = as_parameter(weight, grad_out_);
    const Dropout dropout = dropout_of(dropout_p, seed, grad_out.device());
    const bool two_gradients = dropout.on() || stream_type != type;
    grad_total = empty(grad_out.sizes(), grad_out.options().dtype(stream_type));
    grad_x = empty(two_gradients ? grad_out.sizes() : at::IntArrayRef({0}), grad_out.options());
    grad_weight = at::empty({want_weight ? n : 0}, wide);
    grad_bias = at::empty({want_bias ? n : 0}, wide);
    if (want_weight) weight_partials_ = at::empty({parts(rows, n), n}, wide);
    if (want_bias) bias_partials_ = at::empty({parts(rows, n), n}, wide);
    args = {const_rows(grad_out_),
            const_rows(grad_sum_),
            const_rows(x_),
            const_rows(residual_),
            parameter(weight_),
            stats_.const_data_ptr(),
            grad_total.mutable_data_ptr(),
            two_gradients ? grad_x.mutable_data_ptr() : nullptr,
            want_weight ? weight_partials_.mutable_data_ptr() : nullptr,
            want_bias ? bias_partials_.mutable_data_ptr() : nullptr,
            rows,
            n,
            rms,
            dropout};
  }

 private:
  at::Tensor grad_out_, stats_, x_, residual_, grad_sum_, weight_;
  at::Tensor weight_partials_, bias_partials_;  // (parts, N)
};

}  // namespace ft
