// The table of one instruction set: included last by its translation unit, which has set the target and FT_LEVEL.
#include "../activation_dropout_kernels.h"
#include "../additive_attention_kernels.h"
#include "../attention_backward_kernels.h"
#include "../attention_forward_kernels.h"
#include "../attention_rows_kernels.h"
#include "../attention_weight_sums_kernels.h"
#include "../dropout_add_layer_norm_kernels.h"
#include "../linear_kernels.h"

#define FT_CONCAT(a, b) a##b
#define FT_TABLE(level) FT_CONCAT(kernels_, level)
#define FT_TEXT(x) #x
#define FT_NAME(level) FT_TEXT(level)
// By dtype. Instructions for bfloat16 change the kernels of that alone, tile registers those that multiply matrices: what is
// left out is as in the level below.
#if defined(FT_AVX512_BF16)
#define FT_PRODUCTS(kernel) {nullptr, kernel<bfloat16>}
#else
#define FT_PRODUCTS(kernel) {kernel<float>, kernel<bfloat16>, kernel<half>, kernel<double>}
#endif
#if defined(FT_AMX)
#define FT_EACH_DTYPE(kernel) \
  {                           \
  }
#define FT_EACH_RESIDUAL(kernel) \
  {                              \
  }
#elif defined(FT_AVX512_BF16)
#define FT_EACH_DTYPE(kernel) FT_PRODUCTS(kernel)
#define FT_EACH_RESIDUAL(kernel)                                                \
  {                                                                             \
    {nullptr, kernel<bfloat16, bfloat16>}, { nullptr, kernel<bfloat16, float> } \
  }
#else
#define FT_EACH_DTYPE(kernel) FT_PRODUCTS(kernel)
#define FT_EACH_RESIDUAL(kernel)                                                                      \
  {                                                                                                   \
    {kernel<float, float>, kernel<bfloat16, bfloat16>, kernel<half, half>, kernel<double, double>}, { \
      kernel<float, float>, kernel<bfloat16, float>, kernel<half, float>, kernel<double, double>      \
    }                                                                                                 \
  }
#endif

namespace ft {

using namespace FT_LEVEL;

extern const Kernels FT_TABLE(FT_LEVEL) = {
    FT_NAME(FT_LEVEL),
    FT_EACH_RESIDUAL(layer_norm_forward),
    FT_EACH_RESIDUAL(layer_norm_backward),
    FT_EACH_DTYPE(activation_forward),
    FT_EACH_DTYPE(activation_backward),
    FT_EACH_DTYPE(activation_backward_block),
    FT_PRODUCTS(attention_forward),
    FT_EACH_DTYPE(attention_rows),
    FT_PRODUCTS(attention_weight_sums),
    FT_PRODUCTS(attention_backward),
    FT_EACH_DTYPE(additive_forward),
    FT_EACH_DTYPE(additive_backward),
    FT_EACH_DTYPE(linear),
    FT_EACH_DTYPE(sum_blocks),
};

}  // namespace ft
