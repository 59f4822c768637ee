#include "dispatch.h"

#include <c10/util/Exception.h>

#include "amx.h"

namespace ft {
namespace {

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

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
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
