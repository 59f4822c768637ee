// 256-bit vectors: AVX2 with fused multiply-add and half-precision conversions.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define FT_LEVEL avx2
#define FT_AVX2
#include "table.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
