// Torch glue of the CPU kernels in attention_*_kernels.h: tensors, tasks for the threads, registration.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "../checks.h"
#include "allocate.h"
#include "dispatch.h"
#include "tasks.h"

namespace ft {
namespace {

using at::Tensor;

constexpr int64_t kLeastWork = 1 << 18;  // multiplications that are worth another thread
constexpr int64_t kFewQueries = 4;       // up to which attention_rows is the faster forward
constexpr int64_t kTasks = 16;      // of a pass that adds up at least; a constant, so that sums are cut alike for any threads
constexpr int64_t kLeastChunk = 8;  // blocks of keys in a task of a backward pass that could have another head

int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

// (batch, heads, length, size) with unit last stride; copies only if it has another.
Tensor as_heads(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 4, "expected (batch, heads, length, size), got ", x.sizes());
  return x.size(3) == 1 || x.stride(3) == 1 ? x : x.contiguous();
}

ConstHeads const_heads(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }
Heads heads(const Tensor& x) { return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// A result (batch, heads, length, size) that lies as (batch, length, heads, size): merging the heads needs no copy.
Tensor empty_heads(const Tensor& like, int64_t batch, int64_t heads, int64_t length, int64_t size) {
  return empty_strided({batch, heads, length, size}, {length * heads * size, size, heads * size, 1}, like.options());
}

// A gradient lies as what it belongs to, if that is contiguous: autograd would copy it to that. Else like a result.
Tensor empty_gradient(const Tensor& x) {
  return x.is_contiguous() ? empty(x.sizes(), x.options()) : empty_heads(x, x.size(0), x.size(1), x.size(2), x.size(3));
}

// The call's tensors in a shape the kernels take, kept alive while they run, and the problem they make.
struct Call {
  Tensor query, key, value, mask, bias;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& m, const OptionalTensor& b, int64_t first,
       int64_t last, double scale, double softcap, double dropout_p, const OptionalTensor& seed, AttentionProblem& p)
      : query(as_heads(q)), key(as_heads(k)), value(as_heads(v)) {
    TORCH_CHECK_VALUE(heads_fit(q, k, v) && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                      "query, key and value do not fit: ", q.sizes(), " ", k.sizes(), " ", v.sizes());
    p.query = const_heads(query);
    p.key = const_heads(key);
    p.value = const_heads(value);
    p.batch = query.size(0);
    p.heads = query.size(1);
    p.kv_heads = key.size(1);
    p.L = query.size(2);
    p.S = key.size(2);
    p.D = query.size(3);
    p.Dv = value.size(3);
    p.first = std::clamp(first, -p.L, p.S);
    p.last = std::clamp(last, -p.L, p.S);
    p.scale = scale;
    p.softcap = softcap;
    p.dropout = dropout_of(dropout_p, seed);
    if (present(m)) {
      TORCH_CHECK_TYPE(m->scalar_type() == at::kBool, "mask must be bool, got ", m->scalar_type());
      p.mask = scores(mask = *m, p, DType::f32);
    }
    if (present(b)) {
      bias = b->scalar_type() == q.scalar_type() ? *b : b->to(compute_type(q));
      p.bias = scores(bias, p, dtype_of(bias));
    }
  }

  // `x` broadcast to the scores; as its keys must be neighbours, it may be copied (without what it broadcasts).
  static Scores scores(Tensor& x, const AttentionProblem& p, DType dtype) {
    if (x.dim() > 0 && x.size(-1) != 1 && x.stride(-1) != 1) x = x.contiguous();
    const Tensor full = x.expand({p.batch, p.heads, p.L, p.S});
    return {x.const_data_ptr(), dtype, full.stride(0), full.stride(1), full.stride(2), x.dim() == 0 || x.size(-1) == 1 ? 0 : 1};
  }
};

template <typename Args>
void run(const Args& args, int64_t tasks, void (*kernel)(const Args&, Tasks&)) {
  share_tasks(args, tasks, args.batch * args.heads * args.L * args.S * (args.D + args.Dv), kLeastWork, kernel);
}

// Into how many groups to put the heads whose weights are averaged: a task adds up one of them, and tasks should be many.
int64_t head_groups(int64_t heads, int64_t query_blocks) {
  int64_t groups = 1;
  while (groups < heads && (heads % groups != 0 || groups * query_blocks < kTasks)) ++groups;
  return groups;
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const OptionalTensor& mask, const OptionalTensor& bias, int64_t first,
                                             int64_t last, double scale, double softcap, double dropout_p,
                                             const OptionalTensor& seed, const Text& return_weights, bool with_lse) {
  AttentionForward args = {};
  const Call call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, args);
  const int dtype = static_cast<int>(dtype_of(query));
  const bool per_head = return_weights == "per_head";
  Tensor out = empty_heads(query, args.batch, args.heads, args.L, args.Dv);
  const auto wide = query.options().dtype(compute_type(query));
  Tensor lse = at::empty(with_lse ? at::IntArrayRef{args.batch, args.heads, args.L} : at::IntArrayRef{0}, wide);
  Tensor weights = at::empty({0}, query.options());
  args.out = heads(out);
  args.lse = with_lse ? lse.mutable_data_ptr() : nullptr;
  const int64_t kv_heads = args.batch * args.kv_heads;
  if (return_weights) {
    const int64_t query_blocks = args.batch * blocks(args.L, kQueries);
    args.groups = per_head ? args.heads : head_groups(args.heads, query_blocks);
    args.weights_scale = per_head ? 1.0 : 1.0 / static_cast<double>(args.heads);
    args.wide = !per_head && args.groups > 1;
    weights = empty({args.batch, args.groups, args.L, args.S}, args.wide ? wide : query.options());
    args.weights = weights.mutable_data_ptr();
    run(args, args.groups * query_blocks, kernels().attention_forward[dtype]);
    if (args.wide)
      weights = weights.sum(1).to(query.scalar_type());
    else if (!per_head)
      weights = weights.squeeze(1);
  } else if (args.L <= kFewQueries) {
    args.chunks = 1;
    run(args, kv_heads, kernels().attention_rows[dtype]);
  } else {
    const int64_t wanted = blocks(4 * at::get_num_threads(), std::max<int64_t>(kv_heads, 1));
    args.chunks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(blocks(args.L, kQueries), 1));
    run(args, kv_heads * args.chunks, kernels().attention_forward[dtype]);
  }
  return {out, weights, lse};
}

// The most equal groups, of two or more, that n can be put in, up to `most`; one, if n allows no more.
int64_t groups(int64_t n, int64_t most) {
  int64_t count = std::min(n / 2, most);
  while (count > 1 && n % count != 0) --count;
  return std::max(count, std::min<int64_t>(n, 1));
}

// How a backward pass is cut into tasks. Batches and heads that share a dense bias share a task, which sums their gradients of
// it, but for a few groups where there is too little else to share out. Of many keys a task gets a chunk; of few that would be
// dear, as each has every query to lay out.
void cut(AttentionBackward& args) {
  const BiasGrad& g = args.grad_bias;
  const int64_t key_blocks = std::max<int64_t>(1, blocks(args.S, kBackwardKeys));
  const int64_t wanted = blocks(kTasks, std::max<int64_t>(1, key_blocks / kLeastChunk));
  args.batch_tasks = args.batch;
  args.head_tasks = args.kv_heads;
  if (g.over_batches) args.batch_tasks = groups(args.batch, g.over_heads ? wanted : blocks(wanted, args.kv_heads));
  if (g.over_heads) args.head_tasks = groups(args.kv_heads, blocks(wanted, std::max<int64_t>(1, args.batch_tasks)));
  const int64_t tasks = std::max<int64_t>(1, args.batch_tasks * args.head_tasks);
  args.chunks = std::min(blocks(kTasks, tasks), key_blocks);
}

// Whether `bias` broadcasts along a dimension of the scores, counted from the last, which is 1.
bool broadcasts(const Tensor& bias, int64_t dim) { return bias.dim() < dim || bias.size(bias.dim() - dim) == 1; }

// Memory for the gradient of the bias or its parts.
Tensor bias_parts(const Tensor& bias, const AttentionBackward& args, BiasGrad& g) {
  const int64_t rows = broadcasts(bias, 2) ? 1 : args.L, columns = broadcasts(bias, 1) ? 1 : args.S;
  g.query = rows == 1 ? 0 : columns;
  g.key = columns == 1 ? 0 : 1;
  Tensor parts;
  if (g.dense()) {
    const int64_t batches = args.batch_tasks, heads = g.over_heads ? args.head_tasks : args.heads;
    const bool whole = (!g.over_batches || batches == 1) && (!g.over_heads || heads == 1);
    const auto options = whole ? bias.options() : bias.options().dtype(compute_type(bias));
    parts = empty({batches, heads, rows, columns}, options);
  } else {
    parts = at::zeros({args.batch, args.heads, args.chunks, rows, columns}, bias.options().dtype(at::kDouble));
  }
  g.dtype = dtype_of(parts);
  g.batch = parts.stride(0);
  g.head = parts.stride(1);
  if (!g.dense()) g.chunk = parts.stride(2);
  g.data = parts.mutable_data_ptr();
  return parts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_weights, const OptionalTensor& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const OptionalTensor& mask, const OptionalTensor& bias, int64_t first, int64_t last,
    double scale, double softcap, double dropout_p, const OptionalTensor& seed, const Text& return_weights, const Tensor& out,
    const Tensor& lse, bool bias_grad) {
  AttentionBackward args = {};
  const Call call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, args);
  const int dtype = static_cast<int>(dtype_of(query));
  const Tensor grad = as_heads(grad_out), result = as_heads(out), log_sums = lse.contiguous();
  const auto expected = {args.batch, args.heads, args.L, args.Dv};
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(expected) && result.sizes() == grad.sizes() &&
                        log_sums.numel() == args.batch * args.heads * args.L && log_sums.scalar_type() == compute_type(query) &&
                        grad.scalar_type() == query.scalar_type() && result.scalar_type() == query.scalar_type(),
                    "grad_out, out and lse must be as forward returned them");
  const Tensor lse_grad = present(grad_lse) ? grad_lse->contiguous() : Tensor();
  TORCH_CHECK_VALUE(
      !lse_grad.defined() || (lse_grad.numel() == log_sums.numel() && lse_grad.scalar_type() == lse.scalar_type()),
      "grad_lse must be like lse");
  TORCH_CHECK_VALUE(!present(grad_weights) || grad_weights->scalar_type() == query.scalar_type(),
                    "grad_weights must have the dtype of query");

  args.out = const_heads(result);
  args.grad_out = const_heads(grad);
  args.lse = log_sums.const_data_ptr();
  args.grad_lse = lse_grad.defined() ? lse_grad.const_data_ptr() : nullptr;
  Tensor weights_grad, weight_sums;
  if (present(grad_weights)) {
    const bool per_head = return_weights == "per_head";  // the mean's gradient is the same for every head
    weights_grad = per_head ? *grad_weights : grad_weights->unsqueeze(1);
    weight_sums = at::empty_like(log_sums);
    args.grad_weights = Call::scores(weights_grad, args, dtype_of(query));
    args.grad_weights_scale = per_head ? 1.0 : 1.0 / static_cast<double>(args.heads);
    args.weight_sums = weight_sums.const_data_ptr();
    AttentionWeightSums pass = {args, args.lse, args.grad_weights, args.grad_weights_scale, weight_sums.mutable_data_ptr()};
    run(pass, args.batch * args.heads * blocks(args.L, kQueries), kernels().attention_weight_sums[dtype]);
  }

  Tensor grad_query = empty_gradient(query), grad_key = empty_gradient(key), grad_value = empty_gradient(value);
  args.grad_query = heads(grad_query);
  args.grad_key = heads(grad_key);
  args.grad_value = heads(grad_value);
  bias_grad = bias_grad && call.bias.defined();
  const bool dense = bias_grad && !broadcasts(call.bias, 1) && !broadcasts(call.bias, 2);
  args.grad_bias.over_batches = dense && broadcasts(call.bias, 4);
  args.grad_bias.over_heads = dense && broadcasts(call.bias, 3);
  cut(args);
  Tensor query_parts, grad_bias = at::empty({0}, query.options());
  if (bias_grad) grad_bias = bias_parts(call.bias, args, args.grad_bias);
  if (args.chunks > 1) {
    query_parts = at::empty({args.chunks, args.batch, args.heads, args.L, args.D}, log_sums.options());
    args.grad_query_parts = query_parts.mutable_data_ptr();
  }
  run(args, args.batch_tasks * args.head_tasks * args.chunks, kernels().attention_backward[dtype]);
  if (args.chunks > 1) grad_query.copy_(query_parts.sum(0));
  if (bias_grad) {
    if (grad_bias.dim() == 5) grad_bias = grad_bias.sum(2);
    if (grad_bias.numel() != bias->numel()) grad_bias = at::sum_to(grad_bias, bias->sizes());
    grad_bias = grad_bias.to(bias->scalar_type()).reshape(bias->sizes());
  }
  return {grad_query, grad_key, grad_value, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(fast_transformer, CPU, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
}

}  // namespace ft
