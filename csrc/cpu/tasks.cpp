// How the threads of a call share its tasks. In a file of its own, as what the kernels' files define is made for one
// instruction set.
#include <atomic>

#include "kernels.h"

namespace ft {

bool Tasks::take(Range& range) {
  std::atomic_ref<int64_t> next(next_);
  range.begin = next.load(std::memory_order_relaxed);
  do {
    const int64_t left = count_ - range.begin;
    if (left == 0) return false;
    // Two thirds of a fair share: not too much even for a core of half the others' speed.
    range.end = range.begin + (2 * left + 3 * threads_ - 1) / (3 * threads_);
  } while (!next.compare_exchange_weak(range.begin, range.end, std::memory_order_relaxed));
  return true;
}

}  // namespace ft
