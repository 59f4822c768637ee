// As much of CUDA as csrc/cuda/*.cuh use, emulated on one thread of the host, so that the kernels' arithmetic, indexing and
// barriers run where there is no GPU. The threads of a block are fibers that take turns at barriers and shuffles; blocks run
// one after the other.
//
// What this shows: every number the kernels compute, every address they touch (under UndefinedBehaviorSanitizer, that a 16-byte
// access is aligned), and that all threads of a block reach the same barriers. What it cannot show: races between barriers
// (fibers never run at once), the limits of a GPU (registers, shared memory), the last bits (other math functions, other
// fused multiply-adds), what nvcc makes of the code, and speed.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local  // static, and may be declared extern in a function

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half2 {
  __half x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
template <typename T>
inline void __stwb(T* where, T value) {
  *where = value;
}
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678f); }

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulation {

constexpr int kWarp = 32, kMaxThreads = 1024, kStackBytes = 64 << 10, kSharedBytes = 96 << 10;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda_on_cpu: %s\n", what);
  abort();
}

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t start;
  jmp_buf resume;
  dim3 index;
  bool started, done;
};

// Threads that wait until `size` of them have come.
struct Barrier {
  unsigned size = 0, arrived = 0, generation = 0;
};

struct Block {
  std::vector<Fiber> fibers{kMaxThreads};
  std::vector<Barrier> warps{kMaxThreads / kWarp};
  std::vector<float> lanes = std::vector<float>(kMaxThreads);
  Barrier all;
  std::function<void()> kernel;
  unsigned running = 0;  // index of the fiber
  unsigned events = 0;   // arrivals and ends: without any, nobody will ever move again
  jmp_buf scheduler;
};
inline Block block;

inline void body() {
  block.kernel();
  block.fibers[block.running].done = true;
  _longjmp(block.scheduler, 1);
}

inline void wait(Barrier& barrier) {
  ++block.events;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation)
    if (_setjmp(block.fibers[block.running].resume) == 0) _longjmp(block.scheduler, 1);
}

inline void resume(Fiber& fiber) {
  threadIdx = fiber.index;
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void run_block(unsigned threads) {
  block.all = {threads};
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.index = dim3(i % blockDim.x, i / blockDim.x);
    fiber.started = fiber.done = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, body, 0);
    if (i % kWarp == 0) block.warps[i / kWarp] = {threads - i < kWarp ? threads - i : kWarp};
  }
  for (unsigned left = threads; left > 0;) {
    const unsigned before = block.events;
    for (block.running = 0; block.running < threads; ++block.running) {
      Fiber& fiber = block.fibers[block.running];
      if (fiber.done) continue;
      resume(fiber);
      if (fiber.done) --left, ++block.events;
    }
    if (block.events == before) fail("threads of a block wait for each other at different barriers");
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block.all); }

inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
  using namespace emulation;
  const unsigned thread = block.running;
  Barrier& warp = block.warps[thread / kWarp];
  if (mask != 0xFFFFFFFF || warp.size != kWarp) fail("a shuffle wants the whole warp");
  block.lanes[thread] = value;
  wait(warp);
  const float other = block.lanes[thread ^ distance];
  wait(warp);
  return other;
}

namespace ft {
namespace cuda {
inline thread_local uint4 shared_memory[emulation::kSharedBytes / sizeof(uint4)];
}
}  // namespace ft

// The `launch` that the host's side of csrc/cuda/*.cuh wants.
struct Emulate {
  int multiprocessors;
  int64_t shared_bytes;

  template <typename Kernel, typename... Args>
  void operator()(Kernel kernel, dim3 grid, dim3 block, int64_t shared, const Args&... args) const {
    if (block.x * block.y > emulation::kMaxThreads || shared > emulation::kSharedBytes) emulation::fail("a block is too large");
    if (grid.x == 0 || grid.y == 0) emulation::fail("a grid without blocks");
    gridDim = grid;
    blockDim = block;
    emulation::block.kernel = [&] { kernel(args...); };
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y);
        memset(ft::cuda::shared_memory, 0xFF, sizeof ft::cuda::shared_memory);  // NaN
        emulation::run_block(block.x * block.y);
      }
  }
};
