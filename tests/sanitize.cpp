// Every CPU kernel of every instruction set this machine has, on buffers of exactly the right size, under AddressSanitizer and
// UndefinedBehaviorSanitizer (`make sanitize`): no access outside the tensors, whatever the row length. Says nothing about
// values.
#include <stdio.h>

#include <initializer_list>
#include <vector>

#include "../csrc/cpu/kernels.h"

using namespace ft;

struct Bytes : std::vector<char> {
  explicit Bytes(int64_t n) : std::vector<char>(n) {
    for (int64_t i = 0; i < n; ++i) (*this)[i] = static_cast<char>(i * 37 % 64);
  }
};

// options: 1 float32 parameters; 2 a residual, a sum and a gradient of it; both: backward gets the sum instead of x.
void run(const Kernels& kernels, int dtype, int64_t rows, int64_t n, const Dropout& dropout, int options) {
  const int64_t size = dtype == static_cast<int>(DType::f64) ? 8 : dtype == static_cast<int>(DType::f32) ? 4 : 2;
  const int64_t wide = size == 8 ? 8 : 4, total = rows * n * size;
  const bool float_parameters = options & 1 && size != 8, residual = options & 2;
  const RowBlocks blocks(rows);
  Bytes x(total), second(total), out(total), sum(total), stats(rows * 2 * wide), grad(total), grad_x(total);
  Bytes weight(n * (float_parameters ? 4 : size)), partials(blocks.count * 2 * n * wide), sums(2 * n * wide);
  const Parameter parameter = {weight.data(), float_parameters ? DType::f32 : static_cast<DType>(dtype)};
  const ConstRows x_rows = {x.data(), n}, second_rows = {residual ? second.data() : nullptr, n}, grad_rows = {grad.data(), n};

  LayerNormForward forward = {x_rows,       second_rows, parameter, parameter, out.data(), residual ? sum.data() : nullptr,
                              stats.data(), n,           1e-5,      dropout};
  kernels.layer_norm_forward[dtype](forward, 0, rows);

  const bool x_is_sum = options == 3;
  LayerNormBackward backward = {grad_rows, second_rows,  x_rows,     x_is_sum ? ConstRows() : second_rows,   x_is_sum,
                                parameter, stats.data(), out.data(), dropout.on() ? grad_x.data() : nullptr, partials.data(),
                                n,         dropout};
  for (int64_t block = 0; block < blocks.count; ++block) kernels.layer_norm_backward[dtype](backward, blocks, block);
  kernels.sum_blocks[dtype](partials.data(), sums.data(), blocks.count, 2 * n);

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

int main() {
  std::vector<const Kernels*> tables = {&kernels_generic};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) tables.push_back(&kernels_avx2);
  if (__builtin_cpu_supports("avx512bw")) tables.push_back(&kernels_avx512);
  if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&kernels_avx512_bf16);
#endif
  int runs = 0;
  for (const Kernels* kernels : tables)
    for (int dtype = 0; dtype < kDTypes; ++dtype)
      for (int64_t n : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 1000, 1024, 1025, 4095, 4097, 5000})
        for (int64_t rows : {1, 2, 17})
          for (int options = 0; options < 4; ++options)
            for (const Dropout& dropout : {Dropout(), Dropout(0.3, 7)}) {
              run(*kernels, dtype, rows, n, dropout, options);
              ++runs;
            }
  printf("%d runs of every kernel, nothing read or written out of bounds\n", runs);
}
