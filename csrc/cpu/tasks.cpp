// How the threads of a call share its tasks. In a file of its own, as what the kernels' files define is made for one
// instruction set.
#include "kernels.h"

namespace ft {

bool Tasks::take(Range& range) {
  range.begin = __atomic_load_n(&next_, __ATOMIC_RELAXED);
  do {
    const int64_t left = count_ - range.begin;
    if (left == 0) return false;
    // Two thirds of a fair share: not too much even for a core of half the others' speed.
    range.end = range.begin + (2 * left + 3 * threads_ - 1) / (3 * threads_);
  } while (!__atomic_compare_exchange_n(&next_, &range.begin, range.end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return true;
}

}  // namespace ft
