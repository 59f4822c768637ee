#include "levels.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ft {
namespace {

// Whether this process may use AMX: the CPU must have tile registers with bfloat16 products, and the system must let the
// process use them, which it does once asked.
bool amx_usable() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
  if ((edx & kBfloat16) == 0 || (edx & kTiles) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// A level with the kernels that it leaves out taken from the one below. A table is a name and pointers to functions.
Kernels completed(const Kernels& level, const Kernels& below) {
  const void *own[sizeof level / sizeof(void*)], *others[sizeof level / sizeof(void*)];
  memcpy(own, &level, sizeof level);
  memcpy(others, &below, sizeof below);
  for (size_t i = 0; i < sizeof level / sizeof(void*); ++i)
    if (!own[i]) own[i] = others[i];
  Kernels table;
  memcpy(&table, own, sizeof table);
  return table;
}

}  // namespace

std::vector<Kernels> find_levels() {
  std::vector<Kernels> levels = {kernels_generic};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto add = [&](bool supported, const Kernels& level, size_t above) {
    if (supported && levels.size() == above) levels.push_back(completed(level, levels.back()));
  };
  add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"), kernels_avx2, 1);
  add(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq"),
      kernels_avx512, 2);
  add(__builtin_cpu_supports("avx512bf16"), kernels_avx512_bf16, 3);
  if (levels.size() == 4) add(amx_usable(), kernels_amx, 4);
#endif
  return levels;
}

}  // namespace ft
