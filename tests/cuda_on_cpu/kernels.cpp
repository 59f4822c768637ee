// The CUDA kernels behind C functions on host memory, for tests/test_cuda_kernels.py.
// clang-format off: the emulation first
#include "cuda_on_cpu.h"
#include "../../csrc/cuda/activation_dropout_kernels.cuh"
#include "../../csrc/cuda/dropout_add_layer_norm_kernels.cuh"
// clang-format on

using namespace ft;

namespace {

constexpr int kMultiprocessors = 2;  // few, so that a part of the gradients has many rows

struct Rows {  // as ctypes passes it
  const void* data;
  int64_t stride;
  operator ConstRows() const { return {data, stride}; }
};

Dropout dropout_of(double p, const int64_t* seed) {
  Dropout dropout = p > 0 ? Dropout(p, 0) : Dropout();
  dropout.seed_on_gpu = seed;
  return dropout;
}

Emulate gpu(int64_t shared_bytes) { return {kMultiprocessors, shared_bytes}; }

}  // namespace

extern "C" {

int64_t layer_norm_parts(int64_t rows, int64_t n) { return cuda::layer_norm_parts(rows, n, kMultiprocessors); }
int64_t activation_parts(int64_t rows, int64_t n) { return cuda::activation_parts(rows, n, kMultiprocessors); }

void layer_norm_forward(int type, int stream_type, int parameter_type, Rows x, Rows residual, const void* weight,
                        const void* bias, void* out, void* sum, void* stats, int64_t rows, int64_t n, double eps, bool rms,
                        double dropout_p, const int64_t* seed) {
  const DType parameters = static_cast<DType>(parameter_type);
  const LayerNormForward a = {x,   residual, {weight, parameters},       {bias, parameters}, out, sum, stats, rows, n,
                              eps, rms,      dropout_of(dropout_p, seed)};
  cuda::layer_norm_forward(a, static_cast<DType>(type), static_cast<DType>(stream_type), gpu(0));
}

void layer_norm_backward(int type, int stream_type, int parameter_type, Rows grad_out, Rows grad_sum, Rows x, Rows residual,
                         const void* weight, const void* stats, void* grad_total, void* grad_x, void* weight_partials,
                         void* bias_partials, void* grad_weight, void* grad_bias, int64_t rows, int64_t n, bool rms,
                         double dropout_p, const int64_t* seed, int64_t shared_bytes) {
  const LayerNormBackward a = {grad_out,
                               grad_sum,
                               x,
                               residual,
                               {weight, static_cast<DType>(parameter_type)},
                               stats,
                               grad_total,
                               grad_x,
                               weight_partials,
                               bias_partials,
                               rows,
                               n,
                               rms,
                               dropout_of(dropout_p, seed)};
  cuda::layer_norm_backward(a, static_cast<DType>(type), static_cast<DType>(stream_type), grad_weight, grad_bias,
                            gpu(shared_bytes));
}

void activation_dropout(int type, int parameter_type, int activation, Rows x, Rows grad, const void* bias, void* out,
                        void* bias_partials, void* grad_bias, int64_t rows, int64_t n, double dropout_p, const int64_t* seed) {
  const ActivationArgs a = {x,
                            grad,
                            {bias, static_cast<DType>(parameter_type)},
                            out,
                            bias_partials,
                            rows,
                            n,
                            static_cast<Activation>(activation),
                            dropout_of(dropout_p, seed)};
  cuda::activation_dropout(a, static_cast<DType>(type), grad_bias, gpu(0));
}
}
