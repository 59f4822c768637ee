// How the glue starts kernels: on the current stream of the device that its tensors are on.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../checks.h"

namespace ft {
namespace cuda {

class Launcher {
  static constexpr int64_t kAlwaysAllowed = 48 << 10, kStaticShared = 1 << 10;

 public:
  explicit Launcher(const at::Tensor& t)
      : guard_(gpu_of(t)),
        stream_(c10::cuda::getCurrentCUDAStream()),
        multiprocessors(attribute(cudaDevAttrMultiProcessorCount)),
        shared_bytes(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticShared) {}

  // See "The host's side" in rows.cuh.
  template <typename... Parameters, typename... Args>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared, const Args&... args) const {
    if (shared > kAlwaysAllowed)
      C10_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared)));
    kernel<<<grid, block, shared, stream_>>>(args...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  static at::Device gpu_of(const at::Tensor& t) {
    TORCH_CHECK_VALUE(t.is_cuda(), "expected tensors on one CUDA device, got one on ", t.device());
    return t.device();
  }
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, guard_.current_device().index()));
    return value;
  }

  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;

 public:
  const int multiprocessors;
  const int64_t shared_bytes;  // that a block can have besides its static variables
};

// The dtype of x (..., N) where the kernels take it.
inline DType dtype_of(const at::Tensor& x) {
  const DType dtype = ft::dtype_of(x);
  TORCH_CHECK_TYPE(dtype != DType::f64, "the CUDA kernels take float32, bfloat16 and float16, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.size(-1) <= 1 << 30, "the CUDA kernels take rows of up to 2^30 elements, got ", x.size(-1));
  return dtype;
}

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

}  // namespace cuda
}  // namespace ft
