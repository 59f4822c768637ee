// Which table of kernels runs on this CPU.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace ft {

// The table in use: the fastest this CPU can run, unless use_level lowered it.
const Kernels& kernels();

// Names of the levels that this CPU can run, slowest first.
std::vector<std::string> levels();

// Whether the CPU is AMD's, for which MKL has no code for AVX-512.
bool is_amd();

// Takes the kernels of the level called `name`, one of levels(). Not meant to run beside a call of a kernel.
void use_level(const std::string& name);

}  // namespace ft
