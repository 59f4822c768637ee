#include "dispatch.h"

#include <c10/util/Exception.h>

#include "levels.h"

namespace ft {
namespace {

const std::vector<Kernels>& usable() {
  static const std::vector<Kernels> tables = find_levels();
  return tables;
}

const Kernels*& active() {
  static const Kernels* table = &usable().back();
  return table;
}

}  // namespace

const Kernels& kernels() { return *active(); }

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const Kernels& table : usable()) names.push_back(table.name);
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
  for (const Kernels& table : usable()) {
    if (name == table.name) {
      active() = &table;
      return;
    }
  }
  std::string known;
  for (const std::string& level : levels()) known += " " + level;
  TORCH_CHECK_VALUE(false, "instruction-set level '", name, "' is not one that this CPU can run:", known);
}

}  // namespace ft
