// Conversions from torch's world into the kernels', and the checks that keep them from reading or writing out of bounds.
// Python has already refused bad arguments with better words; these guard the ops against being called past it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "arguments.h"
#include "signatures.h"

namespace ft {

inline bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }

inline DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    case at::kDouble: return DType::f64;
    default: TORCH_CHECK_TYPE(false, "expected float32, bfloat16, float16 or float64, got ", t.scalar_type());
  }
}

inline at::ScalarType compute_type(const at::Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Whether query (B, H, L, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv) fit together: each key head serves H / Hkv heads.
inline bool heads_fit(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  const int64_t heads = query.size(1), kv_heads = key.size(1);
  return key.size(0) == query.size(0) && key.size(3) == query.size(3) && value.size(0) == key.size(0) &&
         value.size(1) == kv_heads && value.size(2) == key.size(2) && heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 &&
         query.size(3) >= 1 && value.size(3) >= 1;
}

inline void check_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1) && weight.size(1) >= 1,
                    "expected x (..., K) and a weight (N, K) with K >= 1, got ", x.sizes(), " and ", weight.sizes());
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type() && (!present(bias) || bias->scalar_type() == x.scalar_type()),
                   "expected x, weight and bias of one dtype, got ", x.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(!present(bias) || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "expected a bias of ",
                    weight.size(0), " elements, got ", present(bias) ? bias->sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(weight.is_cpu() && (!present(bias) || bias->is_cpu()), "expected all tensors on the CPU");
}

// A tensor (..., N) as (rows, N) with unit last stride; copies only where no view will do.
inline at::Tensor as_rows(const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() >= 1, "expected at least one dimension");
  const int64_t n = t.size(-1);
  const at::Tensor rows = t.reshape({n == 0 ? 0 : t.numel() / n, n});
  return n == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// `t`, if present, as rows of the shape of `like`, which is already rows, and of the dtype `type`.
inline at::Tensor as_rows_like(const OptionalTensor& t, const at::Tensor& like, at::ScalarType type) {
  if (!present(t)) return {};
  at::Tensor rows = as_rows(*t);
  TORCH_CHECK_VALUE(rows.sizes() == like.sizes() && rows.scalar_type() == type && rows.device() == like.device(),
                    "expected rows of shape ", like.sizes(), " and dtype ", type, ", got ", rows.sizes(), " ",
                    rows.scalar_type());
  return rows;
}

inline ConstRows const_rows(const at::Tensor& rows) {
  return rows.defined() ? ConstRows{rows.const_data_ptr(), rows.stride(0)} : ConstRows{};
}

// A parameter (N,), contiguous, in the dtype of `rows` or in its compute type.
inline at::Tensor as_parameter(const OptionalTensor& p, const at::Tensor& rows) {
  if (!present(p)) return {};
  TORCH_CHECK_VALUE(p->dim() == 1 && p->size(0) == rows.size(1) && p->device() == rows.device(), "expected a parameter of ",
                    rows.size(1), " elements on ", rows.device(), ", got ", p->sizes(), " on ", p->device());
  return (p->scalar_type() == rows.scalar_type() ? *p : p->to(compute_type(rows))).contiguous();
}

inline Parameter parameter(const at::Tensor& p) {
  return p.defined() ? Parameter{p.const_data_ptr(), dtype_of(p)} : Parameter{};
}

// On the CPU the seed is read here, which waits for nothing; on a GPU the kernel reads it.
inline Dropout dropout_of(double p, const OptionalTensor& seed, at::Device device = at::kCPU) {
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "dropout_p must be in [0, 1), got ", p);
  if (p == 0.0) return {};
  TORCH_CHECK_VALUE(present(seed) && seed->numel() == 1 && seed->scalar_type() == at::kLong,
                    "dropout needs a seed: an int64 tensor of one element");
  if (device.is_cpu()) return Dropout(p, static_cast<uint64_t>(seed->item<int64_t>()));
  TORCH_CHECK_VALUE(seed->device() == device, "expected a seed on ", device, ", got one on ", seed->device());
  Dropout dropout(p, 0);
  dropout.seed_on_gpu = seed->const_data_ptr<int64_t>();
  return dropout;
}

inline Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::none;
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  TORCH_CHECK_VALUE(false, "activation must be none, relu, gelu, gelu_tanh or silu, got ", name);
}

// Elements that are worth another thread.
constexpr int64_t kGrain = 16384;
inline int64_t grain(int64_t elements_per_task) {
  return elements_per_task >= kGrain ? 1 : kGrain / (elements_per_task + 1) + 1;
}

}  // namespace ft
