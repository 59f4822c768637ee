// The ops' schemas, and the Python module: direct calls of the ops, facts about the build, a quick look at arguments.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>

#include "blocks.h"
#include "checks.h"
#include "cpu/dispatch.h"
#include "philox.h"
#include "signatures.h"

// `seed` is an int64 tensor of one element, needed where dropout_p > 0. A gradient that was not asked for is an empty tensor.
TORCH_LIBRARY(fast_transformer, m) {
  // Query i sees the keys i + first to i + last. softcap 0: none. return_weights: none, "mean" or "per_head".
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, SymInt first, SymInt last, float scale, "
      "float softcap, float dropout_p, Tensor? seed, str? return_weights, bool with_lse) "
      "-> (Tensor out, Tensor weights, Tensor lse)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_weights, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor? mask, Tensor? bias, SymInt first, SymInt last, float scale, float softcap, float dropout_p, Tensor? seed, "
      "str? return_weights, Tensor out, Tensor lse, bool bias_grad) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");
  // The result is float32, for float64 inputs float64.
  m.def("additive_scores(Tensor query, Tensor key, Tensor weight) -> Tensor");
  m.def(
      "additive_scores_backward(Tensor grad, Tensor query, Tensor key, Tensor weight) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_weight)");
  m.def("activation_dropout(Tensor x, Tensor? bias, str activation, float dropout_p, Tensor? seed) -> Tensor");
  m.def(
      "activation_dropout_backward(Tensor grad, Tensor? x, Tensor? bias, str activation, float dropout_p, Tensor? seed, "
      "bool bias_grad) -> (Tensor grad_x, Tensor grad_bias)");
  // rms: RMSNorm, which subtracts no mean. residual_in_fp32: residual and sum are float32 (float64 for float64), out is like x.
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float dropout_p, "
      "Tensor? seed, bool rms, bool prenorm, bool residual_in_fp32) -> (Tensor out, Tensor sum, Tensor stats)");
  // Without x, residual is the sum. grad_x is empty where it would equal grad_total, the residual's gradient.
  m.def(
      "dropout_add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor? x, Tensor? residual, Tensor? weight, "
      "Tensor stats, float eps, float dropout_p, Tensor? seed, bool rms, bool weight_grad, bool bias_grad) "
      "-> (Tensor grad_total, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  // activation(x weight^T + bias), x (..., K), weight (N, K). The first is for few rows and computes no gradient; the second
  // has one where the activation is "none".
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor");
  m.def("linear_onednn(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor");
  m.def(
      "linear_onednn_backward(Tensor grad, Tensor? x, Tensor? weight, bool bias_grad) "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
}

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = TORCH_VERSION;
  info["cpu_levels"] = ft::levels();
  info["cpu_level"] = ft::kernels().name;
  info["cpu_is_amd"] = ft::is_amd();
#ifdef FT_CUDA_ARCHS
  info["cuda_archs"] = FT_CUDA_ARCHS;
#else
  info["cuda_archs"] = pybind11::none();
#endif
  return info;
}

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key, int rounds) {
  ft::philox4x32(counter.data(), key[0], key[1], rounds);
  return counter;
}

// Whether the CPU kernels take these tensors (from the second on, or None) without a closer look: dense tensors of one dtype,
// no subclass but torch.nn.Parameter; and nothing is about that casts them or has to follow plain PyTorch operations.
bool ready(const pybind11::args& arguments) {
  if (at::autocast::is_autocast_enabled(at::kCPU) || torch::jit::tracer::isTracing() ||
      at::impl::torch_function_mode_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    return false;
  std::optional<at::ScalarType> dtype;
  for (const pybind11::handle argument : arguments) {
    if (argument.is_none() && dtype) continue;
    if (!THPVariable_CheckExact(argument.ptr())) return false;
    const at::Tensor& x = THPVariable_Unpack(argument.ptr());
    if (!x.is_cpu() || x.layout() != at::kStrided || x.is_nested() || x._fw_grad(0).defined()) return false;
    if (!dtype) dtype = x.scalar_type();
    if (x.scalar_type() != dtype) return false;
  }
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

// A Python function that calls an op through the dispatcher as torch.ops does, less the microseconds that torch.ops spends on
// matching Python objects with the schema.
template <typename Result, typename... Args>
void expose(pybind11::module& m, const char* name, c10::TypedOperatorHandle<Result(Args...)> op) {
  m.def(name, [op](Args... args) { return op.call(args...); }, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", build_info, "Versions and instruction sets this module was built for, and those in use.");
  m.def("use_level", ft::use_level, pybind11::arg("name"), "Run the CPU kernels of one of build_info()['cpu_levels'].");
  m.def("heads_fit", ft::heads_fit, "Whether query, key and value of attention fit together.");
  m.def("ready", ready, "Whether the CPU kernels take these tensors without a closer look.");
  expose(m, "attention", ft::find_op<ft::AttentionOp>("fast_transformer::attention"));
  expose(m, "additive_scores", ft::find_op<ft::AdditiveScoresOp>("fast_transformer::additive_scores"));
  expose(m, "activation_dropout", ft::find_op<ft::ActivationDropoutOp>("fast_transformer::activation_dropout"));
  expose(m, "dropout_add_layer_norm", ft::find_op<ft::DropoutAddLayerNormOp>("fast_transformer::dropout_add_layer_norm"));
  expose(m, "linear", ft::find_op<ft::LinearOp>("fast_transformer::linear"));
  expose(m, "linear_onednn", ft::find_op<ft::LinearOp>("fast_transformer::linear_onednn"));
  m.def("self_attention", ft::self_attention, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("feed_forward", ft::feed_forward, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("encoder_layer", ft::encoder_layer, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("philox4x32", philox4x32, pybind11::arg("counter"), pybind11::arg("key"), pybind11::arg("rounds") = ft::kPhiloxRounds,
        "The four random words of a counter, as the kernels draw them.");
}
