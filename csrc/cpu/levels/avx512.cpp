// 512-bit vectors: AVX-512 F, BW, VL and DQ.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define FT_LEVEL avx512
#define FT_AVX512
#include "table.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
