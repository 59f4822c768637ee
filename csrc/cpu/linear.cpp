// Torch glue of the CPU kernel in linear_kernels.h: tensors, threads, registration. The op computes no gradient.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "../checks.h"
#include "allocate.h"
#include "dispatch.h"

namespace ft {
namespace {

using at::Tensor;

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  check_linear(x, weight, bias);
  const Tensor x_rows = as_rows(x), weight_rows = as_rows(weight);
  const Tensor bias_row = present(bias) ? bias->contiguous() : Tensor();
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  const Tensor out = empty(sizes, x.options());
  const LinearArgs args = {
      const_rows(x_rows),     const_rows(weight_rows),  bias_row.defined() ? bias_row.const_data_ptr() : nullptr,
      out.mutable_data_ptr(), x_rows.size(0),           weight.size(0),
      weight.size(1),         activation_of(activation)};
  const auto kernel = kernels().linear[static_cast<int>(dtype_of(x))];
  // Arithmetic for 8 rows takes about as long as reading the weights.
  const int64_t elements = kLinearColumns * args.k * std::max<int64_t>(1, args.rows / 8);
  at::parallel_for(0, (args.n + kLinearColumns - 1) / kLinearColumns, grain(elements),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

Tensor refuse_gradients(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const std::string& activation) {
  const bool wanted = x.requires_grad() || weight.requires_grad() || (present(bias) && bias->requires_grad());
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !wanted,
                              "fast_transformer::linear computes no gradient and an input needs one; functional.linear then "
                              "calls torch's own product");
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<LinearOp>("fast_transformer::linear");
  return op.call(x, weight, bias, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) { m.impl("linear", linear); }
TORCH_LIBRARY_IMPL(fast_transformer, Autograd, m) { m.impl("linear", refuse_gradients); }

}  // namespace ft
