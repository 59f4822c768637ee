// 128-bit vectors that every CPU has: SSE2 on x86-64, NEON on aarch64.
#define FT_LEVEL generic
#include "table.h"
