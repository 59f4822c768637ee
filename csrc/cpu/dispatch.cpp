#include "dispatch.h"

#include <c10/util/Exception.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ft {
namespace {

#if defined(__x86_64__)
// Whether the CPU has tile registers with bfloat16 products, and the kernel of the system lets this process use them.
bool amx_usable() {
#if defined(__linux__)
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
#endif

std::vector<const Kernels*> find_usable() {
  std::vector<const Kernels*> usable = {&kernels_generic};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    usable.push_back(&kernels_avx2);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && usable.size() == 2) usable.push_back(&kernels_avx512);
  if (__builtin_cpu_supports("avx512bf16") && usable.size() == 3) usable.push_back(&kernels_avx512_bf16);
  if (usable.size() == 4 && amx_usable()) usable.push_back(&kernels_amx);
#endif
  return usable;
}

const std::vector<const Kernels*>& usable() {
  static const std::vector<const Kernels*> tables = find_usable();
  return tables;
}

const Kernels*& active() {
  static const Kernels* table = usable().back();
  return table;
}

}  // namespace

const Kernels& kernels() { return *active(); }

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const Kernels* table : usable()) names.push_back(table->name);
  return names;
}

void use_level(const std::string& name) {
  for (const Kernels* table : usable()) {
    if (name == table->name) {
      active() = table;
      return;
    }
  }
  std::string known;
  for (const std::string& level : levels()) known += " " + level;
  TORCH_CHECK_VALUE(false, "instruction-set level '", name, "' is not one that this CPU can run:", known);
}

}  // namespace ft
