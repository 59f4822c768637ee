// AVX-512 with the instructions that round to bfloat16.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif
#define FT_LEVEL avx512_bf16
#define FT_AVX512
#define FT_AVX512_BF16
#include "table.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
