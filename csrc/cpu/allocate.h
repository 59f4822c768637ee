// Output tensors of the CPU kernels.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ft {

// `t`, just allocated, whose memory, if it is large, the kernel may hand out in huge pages. A large tensor is fresh memory
// almost every time, and then its page faults cost more than the arithmetic of a normalisation: 512 times fewer of them do
// not. Only a hint, and harmless: every byte is about to be written.
inline at::Tensor in_huge_pages(at::Tensor t) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + t.nbytes()) / kHugePage * kHugePage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return t;
}

inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(at::empty(sizes, options));
}
inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  return in_huge_pages(at::empty_strided(sizes, strides, options));
}

}  // namespace ft
