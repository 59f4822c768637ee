// AVX-512 with bfloat16 instructions, and AMX: products of bfloat16 on tile registers.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")
#endif
#define FT_LEVEL amx
#define FT_AVX512
#define FT_AVX512_BF16
#define FT_AMX
#include "table.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
