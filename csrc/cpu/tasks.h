// Tasks of a kernel on torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels.h"

namespace ft {

// Runs the kernel on `count` tasks, `work` in all, on one more thread for every `least` of it, up to torch's number of threads.
template <typename Args>
void share_tasks(const Args& args, int64_t count, int64_t work, int64_t least, void (*kernel)(const Args&, Tasks&)) {
  if (count == 0) return;
  const int64_t threads = std::min({count, work / least + 1, static_cast<int64_t>(at::get_num_threads())});
  Tasks tasks(count, threads);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { kernel(args, tasks); });
}

}  // namespace ft
