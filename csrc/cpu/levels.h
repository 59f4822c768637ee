// The instruction sets of this CPU. No torch header: the sanitizers' program uses it, too.
#pragma once

#include <vector>

#include "kernels.h"

namespace ft {

// The tables of the levels that this CPU can run, slowest first, each complete.
std::vector<Kernels> find_levels();

}  // namespace ft
