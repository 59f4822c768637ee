// What the CUDA kernels that walk over rows share.
//
// A thread works on chunks of eight neighbouring columns: one block of the random stream (philox.h), 16 bytes of half precision
// or 32 of float32. Where everything is aligned, memory is read and written 16 bytes at a time, else element by element.
//
// No torch header, and nothing of CUDA but the language: tests/cuda_on_cpu compiles these files for the host, too.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "../arguments.h"

namespace ft {
namespace cuda {

constexpr int kColumns = 8;  // of a chunk

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) {  // by hand, which needs fewer registers than __bfloat162float
  uint16_t half;
  memcpy(&half, &x, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
__device__ inline float widen(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

// Two neighbours as they lie in memory.
template <typename T>
__device__ inline uint32_t narrow_pair(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// A chunk as it lies in memory.
template <typename T>
struct Packed {
  T v[kColumns];
};
// A chunk to calculate with.
struct Values {
  float v[kColumns];
};

// Columns [col, col + 8) of a row of n; those past the end are 0.
template <bool kAligned, typename T>
__device__ inline Packed<T> load(const T* row, int col, int n) {
  Packed<T> chunk;
  if constexpr (kAligned) {
    constexpr int kPer16Bytes = 16 / sizeof(T);
#pragma unroll
    for (int j = 0; j < kColumns; j += kPer16Bytes) {
      const uint4 word = *reinterpret_cast<const uint4*>(row + col + j);
      memcpy(chunk.v + j, &word, sizeof word);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) chunk.v[j] = col + j < n ? row[col + j] : narrow<T>(0.0f);
  }
  return chunk;
}

// Stores to global memory; kGlobal = false: to global or shared memory. (What nvcc makes of the assignment of a vector type is
// not always one store; __stwb is.)
template <bool kAligned, bool kGlobal = true, typename T>
__device__ inline void store(T* row, int col, int n, const Values& values) {
  const float (&v)[kColumns] = values.v;
  const auto store_16_bytes = [](auto* where, const auto& word) {
    if constexpr (kGlobal) {
      __stwb(where, word);
    } else {
      *where = word;
    }
  };
  if constexpr (!kAligned) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if (col + j < n) row[col + j] = narrow<T>(v[j]);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    store_16_bytes(reinterpret_cast<float4*>(row + col), float4{v[0], v[1], v[2], v[3]});
    store_16_bytes(reinterpret_cast<float4*>(row + col) + 1, float4{v[4], v[5], v[6], v[7]});
  } else {
    store_16_bytes(reinterpret_cast<uint4*>(row + col), uint4{narrow_pair<T>(v[0], v[1]), narrow_pair<T>(v[2], v[3]),
                                                              narrow_pair<T>(v[4], v[5]), narrow_pair<T>(v[6], v[7])});
  }
}

template <typename T>
__device__ inline Values widen(const Packed<T>& chunk) {
  Values values;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) values.v[j] = widen(chunk.v[j]);
  return values;
}

// A chunk of a parameter, in float32 or in the activations' dtype T; `absent` everywhere if there is none.
template <typename T, bool kAligned>
__device__ inline Values load_parameter(const Parameter& p, int col, int n, float absent) {
  if (p.data && p.dtype == DType::f32) return widen(load<kAligned>(static_cast<const float*>(p.data), col, n));
  if (p.data) return widen(load<kAligned>(static_cast<const T*>(p.data), col, n));
  Values values;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) values.v[j] = absent;
  return values;
}

template <typename T>
__device__ inline const T* row_of(const ConstRows& rows, int64_t row) {
  return rows.data ? static_cast<const T*>(rows.data) + row * rows.stride : nullptr;
}

// A row of a contiguous (rows, n), or null.
template <typename T>
__device__ inline T* row_of(void* data, int64_t row, int64_t n) {
  return data ? static_cast<T*>(data) + row * n : nullptr;
}

// Dropout, a chunk at a time: a bit for each of its columns says whether it is kept.
struct Dropper {
  uint64_t seed;
  uint32_t threshold;
  float scale;

  __device__ explicit Dropper(const Dropout& d) : seed(0), threshold(d.threshold), scale(static_cast<float>(d.scale)) {
    if (d.on()) seed = static_cast<uint64_t>(*d.seed_on_gpu);
  }

  __device__ uint32_t keep(int64_t row, int col) const {
    if (threshold == 0) return (1u << kColumns) - 1;
    uint32_t c[4] = {static_cast<uint32_t>(col / kColumns), static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), 0};
    philox4x32(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) bits |= static_cast<uint32_t>((c[j / 2] >> (j % 2 * 16) & 0xFFFF) < threshold) << j;
    return bits;
  }

  __device__ void drop(Values& values, uint32_t keep) const {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) values.v[j] = keep >> j & 1 ? values.v[j] * scale : 0.0f;
  }
};

// out[k] (n) = sum over parts of partials[k] (parts, n), k = blockIdx.y: what is null is not wanted.
struct PartialSums {
  const void* partials[2];
  void* out[2];
  int64_t parts, n;
};

constexpr int kSumColumns = 32, kSumThreads = 16;  // columns of a block, threads of a column

static __global__ void __launch_bounds__(kSumColumns* kSumThreads) sum_parts_kernel(const __grid_constant__ PartialSums a) {
  __shared__ float sums[kSumThreads][kSumColumns];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.x;
  const float* partials = static_cast<const float*>(a.partials[blockIdx.y]);
  float sum = 0;
  if (partials && col < a.n)
    for (int64_t part = threadIdx.y; part < a.parts; part += kSumThreads) sum += partials[part * a.n + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !partials || col >= a.n) return;
  for (int i = 1; i < kSumThreads; ++i) sum += sums[i][threadIdx.x];
  static_cast<float*>(a.out[blockIdx.y])[col] = sum;
}

// The host's side. `launch(kernel, grid, block, bytes of dynamic shared memory, arguments...)` starts a kernel; the GPU has
// launch.multiprocessors, each block up to launch.shared_bytes.

template <typename Launch>
void sum_parts(const PartialSums& a, const Launch& launch) {
  if (a.n == 0 || !(a.partials[0] || a.partials[1])) return;
  const unsigned blocks = static_cast<unsigned>((a.n + kSumColumns - 1) / kSumColumns);
  launch(sum_parts_kernel, dim3(blocks, 2), dim3(kSumColumns, kSumThreads), 0, a);
}

// Whether memory can be read 16 bytes at a time.
inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
inline bool aligned(const Parameter& p) { return aligned(p.data); }
inline bool aligned(const ConstRows& rows, int bytes) {
  return aligned(rows.data) && (!rows.data || rows.stride * bytes % 16 == 0);
}
inline int bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// run(Type<T>()) for the type of a dtype, which is float32, bfloat16 or float16.
template <typename T>
struct Type {
  using type = T;
};
template <typename Run>
void with_type(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32: return run(Type<float>());
    case DType::bf16: return run(Type<__nv_bfloat16>());
    case DType::f16: return run(Type<__half>());
    case DType::f64: return;  // goes to the reference
  }
}

}  // namespace cuda
}  // namespace ft
