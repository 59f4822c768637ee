// Has nvcc compile the kernels for tests/test_cuda_kernels.py, which reads its report.
#include "../../csrc/cuda/activation_dropout_kernels.cuh"
#include "../../csrc/cuda/dropout_add_layer_norm_kernels.cuh"

struct Launch {
  int multiprocessors;
  int64_t shared_bytes;

  template <typename... Parameters, typename... Args>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared, const Args&... args) const {
    kernel<<<grid, block, shared>>>(args...);
  }
};

void instantiate(const ft::LayerNormForward& forward, const ft::LayerNormBackward& backward, const ft::ActivationArgs& args,
                 ft::DType type, ft::DType stream_type, const Launch& launch) {
  ft::cuda::layer_norm_forward(forward, type, stream_type, launch);
  ft::cuda::layer_norm_backward(backward, type, stream_type, nullptr, nullptr, launch);
  ft::cuda::activation_dropout(args, type, nullptr, launch);
}
