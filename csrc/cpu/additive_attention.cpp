// Torch glue of the CPU kernels in additive_attention_kernels.h: tensors, tasks for the threads, registration.
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "../checks.h"
#include "allocate.h"
#include "dispatch.h"
#include "tasks.h"

namespace ft {
namespace {

using at::Tensor;

constexpr int64_t kLeastWork = 1 << 15;  // tangents that are worth another thread

int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

// (batch, length, size) with unit last stride; copies only if it has another.
Tensor as_sequence(const Tensor& x) { return x.size(2) == 1 || x.stride(2) == 1 ? x : x.contiguous(); }

// The call's tensors in a shape the kernels take, kept alive while they run, and the problem they make.
struct Call {
  Tensor query, key, weight;

  Call(const Tensor& q, const Tensor& k, const Tensor& w, AdditiveProblem& p) {
    TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && w.dim() == 1 && k.size(0) == q.size(0) && k.size(2) == q.size(2) &&
                          w.size(0) == q.size(2) && k.scalar_type() == q.scalar_type() && w.scalar_type() == q.scalar_type(),
                      "query (B, L, D), key (B, S, D) and weight (D) do not fit: ", q.sizes(), " ", k.sizes(), " ", w.sizes());
    query = as_sequence(q);
    key = as_sequence(k);
    weight = w.contiguous();
    p.query = {query.const_data_ptr(), query.stride(0), 0, query.stride(1)};
    p.key = {key.const_data_ptr(), key.stride(0), 0, key.stride(1)};
    p.weight = weight.const_data_ptr();
    p.batch = query.size(0);
    p.L = query.size(1);
    p.S = key.size(1);
    p.D = query.size(2);
  }
};

template <typename Args>
void run(const Args& args, int64_t tasks, void (*kernel)(const Args&, Tasks&)) {
  share_tasks(args, tasks, args.batch * args.L * args.S * args.D, kLeastWork, kernel);
}

Tensor additive_scores(const Tensor& query, const Tensor& key, const Tensor& weight) {
  AdditiveForward args;
  const Call call(query, key, weight, args);
  Tensor scores = empty({args.batch, args.L, args.S}, query.options().dtype(compute_type(query)));
  args.scores = scores.mutable_data_ptr();
  const int64_t tasks = args.batch * blocks(args.L, kAdditiveQueries) * blocks(args.S, kAdditiveKeys);
  run(args, tasks, kernels().additive_forward[static_cast<int>(dtype_of(query))]);
  return scores;
}

std::tuple<Tensor, Tensor, Tensor> additive_scores_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                            const Tensor& weight) {
  AdditiveBackward args;
  const Call call(query, key, weight, args);
  const int dtype = static_cast<int>(dtype_of(query));
  const auto expected = {args.batch, args.L, args.S};
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(expected) && grad.scalar_type() == compute_type(query),
                    "grad must be like the scores, ", at::IntArrayRef(expected), ", got ", grad.sizes());
  const Tensor dense = grad.contiguous();
  Tensor grad_query = empty(query.sizes(), query.options()), grad_key = empty(key.sizes(), key.options());
  Tensor partials = at::empty({args.batch, args.D}, dense.options()), grad_weight = at::empty({args.D}, dense.options());
  args.grad = dense.const_data_ptr();
  args.grad_query = grad_query.mutable_data_ptr();
  args.grad_key = grad_key.mutable_data_ptr();
  args.weight_partials = partials.mutable_data_ptr();
  run(args, args.batch * blocks(args.D, kAdditiveColumns), kernels().additive_backward[dtype]);
  kernels().sum_blocks[dtype](args.weight_partials, grad_weight.mutable_data_ptr(), args.batch, args.D);
  return {grad_query, grad_key, grad_weight.to(weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("additive_scores", additive_scores);
  m.impl("additive_scores_backward", additive_scores_backward);
}

}  // namespace ft
