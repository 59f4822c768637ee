// LayerNorm or RMSNorm of residual + dropout(x). T: dtype of the activations, R: that of the residual stream.
//
// A row belongs to one warp (up to 256 columns) or to one block. Forward reads x and residual once into registers, where the
// sum stays for the mean, then the variance about that mean, then the result; backward (the formulas are in
// cpu/dropout_add_layer_norm_kernels.h) reads grad_out, x and residual once. Rows too long for the registers (kHeld = 0) are
// read again in each pass, from the caches. The parameters' gradients: each warp or block adds up those of its rows, in
// registers or for long rows in memory (shared memory, where it is large enough), and writes one part; sum_parts adds the
// parts, in an order that depends on the shape and the number of multiprocessors alone.
#pragma once

#include "rows.cuh"

namespace ft {
namespace cuda {

constexpr int kThreads = 512;                       // of a block, at most: 128 registers each, or 64 in the smallest forward
constexpr int kWarp = 32, kWarpRows = 4;            // rows of a block where each has a warp
constexpr int kForwardHeld = 4, kBackwardHeld = 2;  // chunks of a row that a thread holds in registers, at most

// body(i, col) for the chunks of this thread in a row of n columns; the i-th is held in registers.
template <int kHeld, typename Body>
__device__ inline void for_chunks(int n, Body body) {
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int col = kColumns * static_cast<int>(threadIdx.x + i * blockDim.x);
      if (col < n) body(i, col);
    }
  } else {
    for (int col = kColumns * threadIdx.x; col < n; col += kColumns * blockDim.x) body(0, col);
  }
}

// Replaces v by its sums over the threads of a row: a warp, or the whole block.
template <int kCount>
__device__ inline void sum_over_row(float (&v)[kCount]) {
  const auto sum_over_warp = [&] {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
#pragma unroll
      for (int k = 0; k < kCount; ++k) v[k] += __shfl_xor_sync(0xFFFFFFFF, v[k], distance);
  };
  sum_over_warp();
  if (blockDim.x == kWarp) return;
  __shared__ float sums[kCount][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  __syncthreads();  // until the sums of the last call have been read
  for (int k = 0; k < kCount; ++k)
    if (lane == 0) sums[k][warp] = v[k];
  __syncthreads();
  for (int k = 0; k < kCount; ++k) v[k] = lane < static_cast<int>(blockDim.x) / kWarp ? sums[k][lane] : 0.0f;
  sum_over_warp();
}

// A row of residual + dropout(x); x or residual may be null.
template <typename T, typename R, bool kAligned>
struct SumRow {
  const T* x;
  const R* residual;
  const Dropper& dropper;
  int n;

  struct Loaded {
    Packed<T> x;
    Packed<R> residual;
  };
  __device__ Loaded load(int col) const {
    Loaded loaded;
    if (x) loaded.x = cuda::load<kAligned>(x, col, n);
    if (residual) loaded.residual = cuda::load<kAligned>(residual, col, n);
    return loaded;
  }
  __device__ Values sum(const Loaded& loaded, uint32_t keep) const {
    Values total = {};
    if (x) {
      total = widen(loaded.x);
      dropper.drop(total, keep);
    }
    if (residual)
      for (int j = 0; j < kColumns; ++j) total.v[j] += widen(loaded.residual.v[j]);
    return total;
  }
};

template <typename T, typename R, int kHeld, bool kAligned>
__global__ void __launch_bounds__(kThreads, kHeld == 1 ? 2 : 1)
    layer_norm_forward_kernel(const __grid_constant__ LayerNormForward a) {
  const int n = static_cast<int>(a.n);
  const Dropper dropper(a.dropout);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < a.rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const SumRow<T, R, kAligned> source = {row_of<T>(a.x, row), row_of<R>(a.residual, row), dropper, n};
    T* out = row_of<T>(a.out, row, a.n);
    R* sum_out = row_of<R>(a.sum, row, a.n);

    const auto make_sum = [&](int col) {
      Values total = source.sum(source.load(col), dropper.keep(row, col));
      if (sum_out)
        for (int j = 0; j < kColumns; ++j) total.v[j] = widen(narrow<R>(total.v[j]));  // as it is returned
      return total;
    };
    Values held[kHeld > 0 ? kHeld : 1];
    if constexpr (kHeld > 0) for_chunks<kHeld>(n, [&](int i, int col) { held[i] = make_sum(col); });
    const auto total = [&](int i, int col) -> const Values& {
      if constexpr (kHeld == 0) held[i] = make_sum(col);
      return held[i];
    };

    float sum[1] = {0};
    if (!a.rms) {
      for_chunks<kHeld>(n, [&](int i, int col) {
        const Values& v = total(i, col);
        for (int j = 0; j < kColumns; ++j) sum[0] += v.v[j];
      });
      sum_over_row(sum);
    }
    const float mean = sum[0] / n;
    float squares[1] = {0};
    for_chunks<kHeld>(n, [&](int i, int col) {
      const Values& v = total(i, col);
      for (int j = 0; j < kColumns; ++j)
        if (kAligned || col + j < n) squares[0] += (v.v[j] - mean) * (v.v[j] - mean);
    });
    sum_over_row(squares);
    // A variance past the range of float32 gives NaN, as in PyTorch, not a row of zeros.
    const float rstd = squares[0] < INFINITY ? 1.0f / sqrtf(squares[0] / n + static_cast<float>(a.eps)) : NAN;
    for_chunks<kHeld>(n, [&](int i, int col) {
      const Values &v = total(i, col), weight = load_parameter<T, kAligned>(a.weight, col, n, 1.0f),
                   bias = load_parameter<T, kAligned>(a.bias, col, n, 0.0f);
      Values y;
      for (int j = 0; j < kColumns; ++j) y.v[j] = (v.v[j] - mean) * rstd * weight.v[j] + bias.v[j];
      store<kAligned>(out, col, n, y);
      if (sum_out) store<kAligned>(sum_out, col, n, v);
    });
    if (threadIdx.x == 0) {
      static_cast<float*>(a.stats)[2 * row] = mean;
      static_cast<float*>(a.stats)[2 * row + 1] = rstd;
    }
  }
}

// With `sums_in_shared`, which is for kHeld != 1, dynamic shared memory holds 2 n floats.
template <typename T, typename R, int kHeld, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    layer_norm_backward_kernel(const __grid_constant__ LayerNormBackward a, bool sums_in_shared) {
  extern __shared__ uint4 shared_memory[];
  const int n = static_cast<int>(a.n);
  const Dropper dropper(a.dropout);
  const int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t parts = static_cast<int64_t>(gridDim.x) * blockDim.y;

  // Sums over this part's rows: in registers, or in memory, where each thread has columns of its own, too.
  constexpr bool kSumsInRegisters = kHeld == 1;
  const auto part_of = [&](void* partials) { return row_of<float>(partials, part, a.n); };
  const auto sums_of = [&](void* partials) {
    float* shared = reinterpret_cast<float*>(shared_memory) + (partials == a.bias_partials ? n : 0);
    return sums_in_shared ? shared : part_of(partials);
  };
  Values weight_sums = {}, bias_sums = {};
  if constexpr (!kSumsInRegisters) {
    for_chunks<kHeld>(n, [&](int, int col) {
      if (a.weight_partials) store<kAligned, false>(sums_of(a.weight_partials), col, n, Values{});
      if (a.bias_partials) store<kAligned, false>(sums_of(a.bias_partials), col, n, Values{});
    });
  }

  for (int64_t row = part; row < a.rows; row += parts) {
    const SumRow<T, R, kAligned> source = {row_of<T>(a.x, row), row_of<R>(a.residual, row), dropper, n};
    const T* grad_out = row_of<T>(a.grad_out, row);
    const float mean = static_cast<const float*>(a.stats)[2 * row], rstd = static_cast<const float*>(a.stats)[2 * row + 1];

    struct Chunk {
      Values xhat;     // (sum - mean) rstd
      Packed<T> grad;  // of the result
      uint32_t keep;
    } held[kHeld > 0 ? kHeld : 1];
    const auto make_chunk = [&](int col) {
      const auto loaded = source.load(col);
      Chunk c;
      c.grad = load<kAligned>(grad_out, col, n);
      c.keep = dropper.keep(row, col);
      c.xhat = source.sum(loaded, c.keep);
      for (int j = 0; j < kColumns; ++j) c.xhat.v[j] = (c.xhat.v[j] - mean) * rstd;
      return c;
    };
    if constexpr (kHeld > 0) for_chunks<kHeld>(n, [&](int i, int col) { held[i] = make_chunk(col); });
    const auto chunk = [&](int i, int col) -> const Chunk& {
      if constexpr (kHeld == 0) held[i] = make_chunk(col);
      return held[i];
    };

    float sums[2] = {0, 0};  // of g = grad weight, and of g xhat
    for_chunks<kHeld>(n, [&](int i, int col) {
      const Chunk& c = chunk(i, col);
      const Values grad = widen(c.grad), weight = load_parameter<T, kAligned>(a.weight, col, n, 1.0f);
      for (int j = 0; j < kColumns; ++j) {
        sums[0] += grad.v[j] * weight.v[j];
        sums[1] += grad.v[j] * weight.v[j] * c.xhat.v[j];
      }
      const auto add = [&](Values& part_sums, void* partials, auto term) {
        if (!partials) return;
        if constexpr (!kSumsInRegisters) part_sums = widen(load<kAligned>(sums_of(partials), col, n));
        for (int j = 0; j < kColumns; ++j) part_sums.v[j] += term(j);
        if constexpr (!kSumsInRegisters) store<kAligned, false>(sums_of(partials), col, n, part_sums);
      };
      add(weight_sums, a.weight_partials, [&](int j) { return grad.v[j] * c.xhat.v[j]; });
      add(bias_sums, a.bias_partials, [&](int j) { return grad.v[j]; });
    });
    sum_over_row(sums);
    const R* grad_sum = row_of<R>(a.grad_sum, row);
    R* grad_total = row_of<R>(a.grad_total, row, a.n);
    T* grad_x = row_of<T>(a.grad_x, row, a.n);
    const float mean_g = a.rms ? 0.0f : sums[0] / n, mean_gx = sums[1] / n;
    for_chunks<kHeld>(n, [&](int i, int col) {
      const Chunk& c = chunk(i, col);
      const Values grad = widen(c.grad), weight = load_parameter<T, kAligned>(a.weight, col, n, 1.0f);
      Values d;
      for (int j = 0; j < kColumns; ++j) d.v[j] = rstd * (grad.v[j] * weight.v[j] - mean_g - c.xhat.v[j] * mean_gx);
      if (grad_sum) {
        const Values more = widen(load<kAligned>(grad_sum, col, n));
        for (int j = 0; j < kColumns; ++j) d.v[j] += more.v[j];
      }
      store<kAligned>(grad_total, col, n, d);
      if (grad_x) {
        dropper.drop(d, c.keep);
        store<kAligned>(grad_x, col, n, d);
      }
    });
  }

  if (!kSumsInRegisters && !sums_in_shared) return;
  for_chunks<kHeld>(n, [&](int, int col) {
    const auto write = [&](Values& part_sums, void* partials) {
      if (!partials) return;
      if constexpr (!kSumsInRegisters) part_sums = widen(load<kAligned>(sums_of(partials), col, n));
      store<kAligned>(part_of(partials), col, n, part_sums);
    };
    write(weight_sums, a.weight_partials);
    write(bias_sums, a.bias_partials);
  });
}

// How the threads share a row of n columns. One path serves rows that are not aligned, except the longest.
struct RowShape {
  int held;     // chunks that each keeps in registers; 0: none
  int threads;  // of a row

  RowShape(int64_t n, bool aligned, int most_held) {
    const int64_t chunks = (n + kColumns - 1) / kColumns;
    held = 1;
    while (held > 0 && chunks > held * kThreads) held = aligned && held < most_held ? 2 * held : 0;
    threads = held > 0 ? static_cast<int>((chunks + held * kWarp - 1) / (held * kWarp) * kWarp) : kThreads;
  }
  int rows() const { return threads == kWarp ? kWarpRows : 1; }  // of a block
  dim3 block() const { return dim3(threads, rows()); }
};

// run(Type<T>(), Type<R>()) for the dtypes of the activations and of the residual stream.
template <typename Run>
void with_types(DType type, DType stream_type, Run run) {
  with_type(type, [&](auto t) { type == stream_type ? run(t, t) : run(t, Type<float>()); });
}

template <typename Launch>
void layer_norm_forward(const LayerNormForward& a, DType type, DType stream_type, const Launch& launch) {
  if (a.rows == 0) return;
  const int bytes = bytes_of(type), stream_bytes = bytes_of(stream_type);
  const bool fits = a.n % kColumns == 0 && aligned(a.x, bytes) && aligned(a.residual, stream_bytes) && aligned(a.weight) &&
                    aligned(a.bias) && aligned(a.out) && aligned(a.sum);
  const RowShape shape(a.n, fits, kForwardHeld);
  const int64_t blocks = (a.rows + shape.rows() - 1) / shape.rows(), most = INT32_MAX;
  const dim3 grid(static_cast<unsigned>(blocks < most ? blocks : most));
  with_types(type, stream_type, [&](auto t, auto r) {
    using T = typename decltype(t)::type;
    using R = typename decltype(r)::type;
    const auto kernel = shape.held == 4   ? layer_norm_forward_kernel<T, R, 4, true>
                        : shape.held == 2 ? layer_norm_forward_kernel<T, R, 2, true>
                        : shape.held == 1
                            ? (fits ? layer_norm_forward_kernel<T, R, 1, true> : layer_norm_forward_kernel<T, R, 1, false>)
                        : fits ? layer_norm_forward_kernel<T, R, 0, true>
                               : layer_norm_forward_kernel<T, R, 0, false>;
    launch(kernel, grid, shape.block(), 0, a);
  });
}

// Parts of the parameters' gradients: enough to keep the multiprocessors busy, with some rows in each.
inline int64_t layer_norm_parts(int64_t rows, int64_t n, int multiprocessors) {
  constexpr int kRowsOfPart = 4;
  const RowShape shape(n, true, kBackwardHeld);
  const int64_t busy = static_cast<int64_t>(multiprocessors) * kThreads / shape.threads;
  const int64_t useful = (rows + kRowsOfPart - 1) / kRowsOfPart, parts = busy < useful ? busy : useful;
  return (parts + kWarpRows - 1) / kWarpRows * kWarpRows;
}

// a.weight_partials and a.bias_partials have room for layer_norm_parts; grad_weight and grad_bias (n) get their sums.
template <typename Launch>
void layer_norm_backward(const LayerNormBackward& a, DType type, DType stream_type, void* grad_weight, void* grad_bias,
                         const Launch& launch) {
  const int bytes = bytes_of(type), stream_bytes = bytes_of(stream_type);
  const bool fits = a.n % kColumns == 0 && aligned(a.grad_out, bytes) && aligned(a.grad_sum, stream_bytes) &&
                    aligned(a.x, bytes) && aligned(a.residual, stream_bytes) && aligned(a.weight) && aligned(a.grad_total) &&
                    aligned(a.grad_x) && aligned(a.weight_partials) && aligned(a.bias_partials);
  const RowShape shape(a.n, fits, kBackwardHeld);
  const int64_t parts = layer_norm_parts(a.rows, a.n, launch.multiprocessors), sum_bytes = 2 * a.n * sizeof(float);
  const bool sums_in_shared = shape.held != 1 && (a.weight_partials || a.bias_partials) && sum_bytes <= launch.shared_bytes;
  const dim3 grid(static_cast<unsigned>(parts / shape.rows()));
  with_types(type, stream_type, [&](auto t, auto r) {
    using T = typename decltype(t)::type;
    using R = typename decltype(r)::type;
    const auto kernel = shape.held == 2 ? layer_norm_backward_kernel<T, R, 2, true>
                        : shape.held == 1
                            ? (fits ? layer_norm_backward_kernel<T, R, 1, true> : layer_norm_backward_kernel<T, R, 1, false>)
                        : fits ? layer_norm_backward_kernel<T, R, 0, true>
                               : layer_norm_backward_kernel<T, R, 0, false>;
    if (a.rows > 0) launch(kernel, grid, shape.block(), sums_in_shared ? sum_bytes : 0, a, sums_in_shared);
  });
  sum_parts({{a.weight_partials, a.bias_partials}, {grad_weight, grad_bias}, parts, a.n}, launch);
}

}  // namespace cuda
}  // namespace ft
