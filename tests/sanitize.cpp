// Every CPU kernel of every instruction set this machine has, on buffers of exactly the right size, under AddressSanitizer and
// UndefinedBehaviorSanitizer (`make sanitize`): no access outside the tensors, whatever the sizes. Scratch memory and the
// results of attention start as NaN, and finite inputs must leave none: every element is written, from memory that was.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../csrc/cpu/levels.h"

using namespace ft;

struct Bytes : std::vector<char> {
  explicit Bytes(int64_t n) : std::vector<char>(n) {
    for (int64_t i = 0; i < n; ++i) (*this)[i] = static_cast<char>(i * 37 % 64);
  }
};

// options: 1 float32 parameters; 2 a residual, a sum and a gradient of it; both: backward gets the sum instead of x; 4 float32
// residual, sum and gradient of it; 8 RMSNorm.
void run(const Kernels& kernels, int dtype, int64_t rows, int64_t n, const Dropout& dropout, int options) {
  const int64_t size = dtype == static_cast<int>(DType::f64) ? 8 : dtype == static_cast<int>(DType::f32) ? 4 : 2;
  const int64_t wide = size == 8 ? 8 : 4, total = rows * n * size, stream = rows * n * (options & 4 ? wide : size);
  const bool float_parameters = options & 1 && size != 8, residual = options & 2, x_is_sum = (options & 3) == 3,
             rms = options & 8;
  const RowBlocks blocks(rows);
  Bytes x(total), second(stream), out(total), sum(stream), stats(rows * 2 * wide), grad(total), grad_total(stream),
      grad_x(total);
  Bytes weight(n * (float_parameters ? 4 : size)), partials(blocks.count * n * wide), sums(n * wide);
  const Parameter parameter = {weight.data(), float_parameters ? DType::f32 : static_cast<DType>(dtype)};
  const ConstRows x_rows = {x.data(), n}, second_rows = {residual ? second.data() : nullptr, n}, grad_rows = {grad.data(), n};

  LayerNormForward forward = {x_rows,       second_rows, parameter, parameter, out.data(), residual ? sum.data() : nullptr,
                              stats.data(), rows,        n,         1e-5,      rms,        dropout};
  kernels.layer_norm_forward[(options & 4) != 0][dtype](forward, 0, rows);

  LayerNormBackward backward = {grad_rows,
                                second_rows,
                                x_is_sum ? ConstRows() : x_rows,
                                second_rows,
                                parameter,
                                stats.data(),
                                grad_total.data(),
                                grad_x.data(),
                                partials.data(),
                                partials.data(),
                                rows,
                                n,
                                rms,
                                dropout};
  for (int64_t block = 0; block < blocks.count; ++block)
    kernels.layer_norm_backward[(options & 4) != 0][dtype](backward, blocks, block);
  kernels.sum_blocks[dtype](partials.data(), sums.data(), blocks.count, n);

  for (Activation kind : {Activation::none, Activation::relu, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    ActivationArgs args = {x_rows, grad_rows, residual ? parameter : Parameter(), out.data(), partials.data(), rows, n,
                           kind,   dropout};
    const int64_t chunks = rows * chunks_per_row(n);
    kernels.activation_forward[dtype](args, 0, chunks);
    if (kind == Activation::none) args.x = {};
    kernels.activation_backward[dtype](args, 0, chunks);
    for (int64_t block = 0; block < blocks.count; ++block) kernels.activation_backward_block[dtype](args, blocks, block);
  }
}

template <typename Args>
void run_tasks(void (*kernel)(const Args&, Tasks&), const Args& args, int64_t count) {
  Tasks tasks(count, 1);
  kernel(args, tasks);
}

struct Results : std::vector<uint8_t> {
  explicit Results(int64_t n) : std::vector<uint8_t>(n, 0xFF) {}

  // Infinity is a result too (the log-sum-exp of a query that sees nothing), NaN is not.
  void check(DType dtype, const char* what) const {
    const int64_t bytes = dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
    for (size_t i = 0; i + bytes <= size(); i += bytes) {
      uint64_t bits = 0;
      memcpy(&bits, data() + i, bytes);
      const int mantissa = dtype == DType::f64 ? 52 : dtype == DType::f32 ? 23 : dtype == DType::bf16 ? 7 : 10;
      const uint64_t magnitude = bits & ((uint64_t(1) << (8 * bytes - 1)) - 1);
      const uint64_t infinity = ((uint64_t(1) << (8 * bytes - 1)) - 1) >> mantissa << mantissa;
      if (magnitude > infinity) {
        printf("%s holds NaN at %zu of %zu bytes\n", what, i, size());
        abort();
      }
    }
  }
};

// options: 1 a mask for every score, 2 a bias, 4 causal, 8 dropout, 16 a softcap and gradients of the weights, 32 mask and bias
// of the keys alone, 64 a narrow band, or with causal one that no query sees.
void run_attention(const Kernels& kernels, int dtype, int64_t L, int64_t S, int64_t D, int64_t Dv, int options) {
  const DType type = static_cast<DType>(dtype), wide_type = type == DType::f64 ? DType::f64 : DType::f32;
  const int64_t H = 2, size = type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2, wide = type == DType::f64 ? 8 : 4;
  const int64_t rows = options & 32 ? 1 : L;
  Bytes query(H * L * D * size), key(S * D * size), value(S * Dv * size), mask(rows * S), bias(rows * S * size);
  Bytes grad_out(H * L * Dv * size), grad_weights(L * S * size);
  for (char& byte : mask) byte &= 1;
  Results out(H * L * Dv * size), lse(H * L * wide), mean(L * S * size), weight_sums(H * L * wide);
  Results grad_query(H * L * D * size), grad_key(S * D * size), grad_value(S * Dv * size);

  AttentionProblem p;
  p.query = {query.data(), H * L * D, L * D, D};
  p.key = {key.data(), S * D, S * D, D};
  p.value = {value.data(), S * Dv, S * Dv, Dv};
  const int64_t row = options & 32 ? 0 : S;
  if (options & 1) p.mask = {mask.data(), DType::f32, 0, 0, row, 1};
  if (options & 2) p.bias = {bias.data(), type, 0, 0, row, 1};
  p.batch = p.kv_heads = 1;
  p.heads = H;
  p.L = L;
  p.S = S;
  p.D = D;
  p.Dv = Dv;
  p.first = options & 64 && !(options & 4) ? -3 : -L;
  p.last = options & 64 ? (options & 4 ? -L : 2) : options & 4 ? 0 : S;
  p.scale = 0.3;
  p.softcap = options & 16 ? 2.0 : 0.0;
  if (options & 8) p.dropout = Dropout(0.3, 7);

  AttentionForward forward = {p, {out.data(), H * L * Dv, L * Dv, Dv}, lse.data(), 1, mean.data(), 0, 0.5, false};
  run_tasks(kernels.attention_rows[dtype], forward, 1);
  out.check(type, "output (rows)");
  std::fill(out.begin(), out.end(), 0xFF);
  run_tasks(kernels.attention_forward[dtype], forward, 1);
  out.check(type, "output");
  lse.check(wide_type, "lse");
  std::fill(out.begin(), out.end(), 0xFF);
  forward.groups = 1;
  run_tasks(kernels.attention_forward[dtype], forward, (L + kQueries - 1) / kQueries);
  out.check(type, "output beside weights");
  mean.check(type, "weights");

  const Scores weights_grad = {grad_weights.data(), type, 0, 0, S, 1};
  AttentionWeightSums pass = {p, lse.data(), weights_grad, 0.5, weight_sums.data()};
  run_tasks(kernels.attention_weight_sums[dtype], pass, H * ((L + kQueries - 1) / kQueries));
  weight_sums.check(wide_type, "sums of the weights");

  const bool dense = rows != 1 && S != 1;
  const int64_t bias_heads = dense && options & 8 ? 1 : H;  // one: its gradient sums over the heads
  Results grad_bias(dense ? bias_heads * L * S * size : H * 2 * rows * S * 8);
  if (!dense) std::fill(grad_bias.begin(), grad_bias.end(), 0);
  for (int64_t chunks : {1, 2}) {
    Results parts(chunks * H * L * D * wide);
    AttentionBackward backward = {p};
    backward.out = {out.data(), H * L * Dv, L * Dv, Dv};
    backward.grad_out = {grad_out.data(), H * L * Dv, L * Dv, Dv};
    backward.lse = lse.data();
    if (options & 16) {
      backward.grad_weights = weights_grad;
      backward.grad_weights_scale = 0.5;
      backward.weight_sums = weight_sums.data();
    }
    backward.grad_query = {grad_query.data(), H * L * D, L * D, D};
    backward.grad_key = {grad_key.data(), S * D, S * D, D};
    backward.grad_value = {grad_value.data(), S * Dv, S * Dv, Dv};
    backward.grad_query_parts = chunks > 1 ? parts.data() : nullptr;
    const int64_t head = bias_heads == 1 ? 0 : rows * S * (dense ? 1 : 2);
    if (options & 2)
      backward.grad_bias = {grad_bias.data(),        dense ? type : DType::f64, 0,      head,
                            dense ? 0 : rows * S,    rows != 1 ? S : 0,         S != 1, false,
                            dense && bias_heads == 1};
    backward.batch_tasks = backward.head_tasks = 1;
    backward.chunks = chunks;
    run_tasks(kernels.attention_backward[dtype], backward, chunks);
    if (chunks > 1)
      parts.check(wide_type, "parts of the gradient of query");
    else
      grad_query.check(type, "gradient of query");
    grad_key.check(type, "gradient of key");
    grad_value.check(type, "gradient of value");
    if (options & 2) grad_bias.check(dense ? type : DType::f64, "gradient of bias");
  }
}

void run_additive(const Kernels& kernels, int dtype, int64_t L, int64_t S, int64_t D) {
  const DType type = static_cast<DType>(dtype), wide_type = type == DType::f64 ? DType::f64 : DType::f32;
  const int64_t size = type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2, wide = type == DType::f64 ? 8 : 4, batch = 2;
  Bytes query(batch * L * D * size), key(batch * S * D * size), weight(D * size), grad(batch * L * S * wide);
  Results scores(batch * L * S * wide), partials(batch * D * wide), grad_weight(D * wide);
  Results grad_query(batch * L * D * size), grad_key(batch * S * D * size);
  const AdditiveProblem p = {{query.data(), L * D, 0, D}, {key.data(), S * D, 0, D}, weight.data(), batch, L, S, D};
  const auto blocks = [](int64_t length, int64_t block) { return (length + block - 1) / block; };

  AdditiveForward forward = {p, scores.data()};
  run_tasks(kernels.additive_forward[dtype], forward, batch * blocks(L, kAdditiveQueries) * blocks(S, kAdditiveKeys));
  scores.check(wide_type, "additive scores");
  AdditiveBackward backward = {p, grad.data(), grad_query.data(), grad_key.data(), partials.data()};
  run_tasks(kernels.additive_backward[dtype], backward, batch * blocks(D, kAdditiveColumns));
  kernels.sum_blocks[dtype](partials.data(), grad_weight.data(), batch, D);
  grad_query.check(type, "gradient of an additive query");
  grad_key.check(type, "gradient of an additive key");
  grad_weight.check(wide_type, "gradient of the additive weight");
}

void run_linear(const Kernels& kernels, int dtype, int64_t rows, int64_t n, int64_t k, Activation activation) {
  const DType type = static_cast<DType>(dtype);
  const int64_t size = type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2;
  const Bytes x(rows * k * size), weight(n * k * size), bias(n * size);
  Results out(rows * n * size);
  const LinearArgs args = {{x.data(), k}, {weight.data(), k}, rows % 2 ? bias.data() : nullptr, out.data(), rows, n, k,
                           activation};
  for (int64_t task = 0; task * kLinearColumns < n; ++task) kernels.linear[dtype](args, task, task + 1);
  out.check(type, "linear");
}

int main() {
  const std::vector<Kernels> levels = find_levels();
  int runs = 0;
  for (const Kernels& kernels : levels)
    for (int dtype = 0; dtype < kDTypes; ++dtype)
      for (int64_t n : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 1000, 1024, 1025, 4095, 4097, 5000})
        for (int64_t rows : {1, 2, 17})
          for (int options = 0; options < 16; ++options)
            for (const Dropout& dropout : {Dropout(), Dropout(0.3, 7)}) {
              run(kernels, dtype, rows, n, dropout, options);
              ++runs;
            }
  for (const Kernels& kernels : levels)
    for (int dtype = 0; dtype < kDTypes; ++dtype)
      for (int64_t L : {1, 65})
        for (int64_t S : {1, 31, 200})
          for (int64_t D : {1, 20, 64})
            for (int options = 0; options < 128; ++options) {
              if (options & 32 && !(options & 3)) continue;
              run_attention(kernels, dtype, L, S, D, D == 20 ? 7 : D, options);
              ++runs;
            }
  for (const Kernels& kernels : levels)
    for (int dtype = 0; dtype < kDTypes; ++dtype)
      for (int64_t L : {1, 4, 19})
        for (int64_t S : {1, 15, 16, 67, 130})
          for (int64_t D : {1, 3, 16, 17, 31, 64, 100}) {
            run_additive(kernels, dtype, L, S, D);
            ++runs;
          }
  for (const Kernels& kernels : levels)
    for (int dtype = 0; dtype < kDTypes; ++dtype)
      for (int64_t rows : {1, 2, 3, 4, 7, 65})
        for (int64_t n : {1, 5, 16, 37})
          for (int64_t k : {1, 7, 16, 33, 1024, 1100}) {
            run_linear(kernels, dtype, rows, n, k, static_cast<Activation>(runs % 5));
            ++runs;
          }
  printf("%d runs of the kernels, nothing read or written out of bounds\n", runs);
}
