// dropout(activation(x + bias)), elementwise: one pass forward, one pass backward, which computes the activation's
// derivative from x again and the decisions from the seed. Without an activation it is plain dropout and needs no x backward.
#pragma once

#include "philox_simd.h"
#include "simd_math.h"

namespace ft {
namespace FT_LEVEL {

// An activation: its value, and its gradient for a gradient d of the value.

struct Identity {
  template <typename C>
  static Vec<C> value(Vec<C> x) {
    return x;
  }
  template <typename C>
  static Vec<C> gradient(Vec<C>, Vec<C> d) {
    return d;
  }
};

struct Relu {
  template <typename C>
  static Vec<C> value(Vec<C> x) {
    return x < 0 ? Vec<C>{} : x;  // NaN stays NaN
  }
  template <typename C>
  static Vec<C> gradient(Vec<C> x, Vec<C> d) {
    return x <= 0 ? Vec<C>{} : d;
  }
};

struct Gelu {  // x times the normal distribution function
  template <typename C>
  static Vec<C> value(Vec<C> x) {
    Vec<C> gauss;
    return x * normal_cdf(x, gauss);
  }
  template <typename C>
  static Vec<C> gradient(Vec<C> x, Vec<C> d) {
    Vec<C> gauss;
    const Vec<C> cdf = normal_cdf(x, gauss);
    return d * (cdf + x * gauss * (C)0x1.9884533d43651p-2);  // 1 / sqrt(2 pi)
  }
};

struct GeluTanh {                                                      // (1 + tanh(u)) / 2 is the sigmoid of 2u = x (a + b x^2)
  static constexpr double a = 0x1.9884533d43651p+0, b = a * 0.044715;  // a = 2 sqrt(2 / pi)

  template <typename C>
  static Vec<C> value(Vec<C> x) {
    Vec<C> rest;
    return x * sigmoid<C>(x * (x * x * (C)b + (C)a), rest);
  }
  template <typename C>
  static Vec<C> gradient(Vec<C> x, Vec<C> d) {
    Vec<C> rest;
    const Vec<C> s = sigmoid<C>(x * (x * x * (C)b + (C)a), rest);
    return d * (s + x * s * rest * (x * x * (C)(3 * b) + (C)a));
  }
};

struct Silu {
  template <typename C>
  static Vec<C> value(Vec<C> x) {
    Vec<C> rest;
    return x * sigmoid<C>(x, rest);
  }
  template <typename C>
  static Vec<C> gradient(Vec<C> x, Vec<C> d) {
    Vec<C> rest;
    const Vec<C> s = sigmoid<C>(x, rest);
    return d * (s + x * s * rest);
  }
};

template <typename Run>
inline void with_curve(Activation kind, Run run) {
  switch (kind) {
    case Activation::none: return run(Identity());
    case Activation::relu: return run(Relu());
    case Activation::gelu: return run(Gelu());
    case Activation::gelu_tanh: return run(GeluTanh());
    case Activation::silu: return run(Silu());
  }
}

// What a task works with: the bias in the compute type (null if there is none) and room for the decisions.
template <typename T>
struct ActivationScratch {
  using C = Compute<T>;
  Buffer<C> bias_values;
  const C* bias = nullptr;
  KeepBits keep;

  explicit ActivationScratch(const ActivationArgs& a) : bias_values(a.bias.data ? a.n : 0), keep(a.n < kChunk ? a.n : kChunk) {
    if (!a.bias.data) return;
    read_parameter<T>(a.bias, a.n, 0, bias_values);
    bias = bias_values;
  }
};

// Columns [begin, begin + n) of one row, n <= kChunk. (All in locals, so that the compiler knows that no store changes it.)
template <typename T, typename Curve>
inline void forward_run(const ActivationArgs& a, int64_t row, int64_t begin, int64_t n, ActivationScratch<T>& scratch) {
  using C = Compute<T>;
  const T* x = row_of<T>(a.x, row) + begin;
  T* out = (T*)a.out + row * a.n + begin;
  const C* bias = scratch.bias ? scratch.bias + begin : nullptr;
  const uint32_t* keep = scratch.keep.draw(a.dropout, row, begin, n);
  const C scale = (C)a.dropout.scale;
  for_columns<C>(n, [=](int64_t col, auto lanes) {
    Vec<C> v = lanes.load(x + col);
    if (bias) v += load(bias + col);
    lanes.store(out + col, drop<C>(keep, col, scale, Curve::template value<C>(v)));
  });
}

// The gradient of x in the same columns, added to grad_bias (n) too unless that is null. x is null without an activation.
template <typename T, typename Curve>
inline void backward_run(const ActivationArgs& a, int64_t row, int64_t begin, int64_t n, ActivationScratch<T>& scratch,
                         Compute<T>* grad_bias) {
  using C = Compute<T>;
  const T *x = row_of<T>(a.x, row), *grad = row_of<T>(a.grad, row);
  T* out = (T*)a.out + row * a.n;
  const C* bias = scratch.bias;
  const uint32_t* keep = scratch.keep.draw(a.dropout, row, begin, n);
  const C scale = (C)a.dropout.scale;
  for_columns<C>(n, [=](int64_t run_col, auto lanes) {
    const int64_t col = begin + run_col;
    Vec<C> d = drop<C>(keep, run_col, scale, lanes.load(grad + col));
    if (x) {
      Vec<C> v = lanes.load(x + col);
      if (bias) v += load(bias + col);
      d = Curve::template gradient<C>(v, d);
    }
    lanes.store(out + col, d);
    if (grad_bias) store(grad_bias + col, load(grad_bias + col) + d);
  });
}

// Tasks of the elementwise walk: `run(row, first column, columns)` for chunks numbered row by row.
template <typename Run>
inline void for_chunks(const ActivationArgs& a, int64_t begin_chunk, int64_t end_chunk, Run run) {
  const int64_t per_row = chunks_per_row(a.n);
  for (int64_t chunk = begin_chunk; chunk < end_chunk; ++chunk) {
    const int64_t begin = chunk % per_row * kChunk;
    run(chunk / per_row, begin, a.n - begin < kChunk ? a.n - begin : kChunk);
  }
}

template <typename T>
void activation_forward(const ActivationArgs& a, int64_t begin_chunk, int64_t end_chunk) {
  ActivationScratch<T> scratch(a);
  with_curve(a.activation, [&](auto curve) {
    for_chunks(a, begin_chunk, end_chunk,
               [&](int64_t row, int64_t begin, int64_t n) { forward_run<T, decltype(curve)>(a, row, begin, n, scratch); });
  });
}

template <typename T>
void activation_backward(const ActivationArgs& a, int64_t begin_chunk, int64_t end_chunk) {
  ActivationScratch<T> scratch(a);
  with_curve(a.activation, [&](auto curve) {
    for_chunks(a, begin_chunk, end_chunk, [&](int64_t row, int64_t begin, int64_t n) {
      backward_run<T, decltype(curve)>(a, row, begin, n, scratch, nullptr);
    });
  });
}

// The same for whole rows, with the bias's gradient of the block.
template <typename T>
void activation_backward_block(const ActivationArgs& a, const RowBlocks& blocks, int64_t block) {
  using C = Compute<T>;
  ActivationScratch<T> scratch(a);
  Buffer<C> grad_bias(a.n);
  memset(grad_bias, 0, a.n * sizeof(C));
  const int64_t per_row = chunks_per_row(a.n);
  with_curve(a.activation, [&](auto curve) {
    for_chunks(a, blocks.begin(block) * per_row, blocks.end(block) * per_row, [&](int64_t row, int64_t begin, int64_t n) {
      backward_run<T, decltype(curve)>(a, row, begin, n, scratch, grad_bias);
    });
  });
  memcpy((C*)a.bias_partials + block * a.n, grad_bias, a.n * sizeof(C));
}

}  // namespace FT_LEVEL
}  // namespace ft
