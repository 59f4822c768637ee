// The CPU kernels' interface: what the glue (torch, threads) hands to them, and the table each instruction set exports.
// No torch header: a call gets pointers, sizes, strides in elements, and a range of the work.
#pragma once

#include <stdint.h>

#include "../arguments.h"

namespace ft {

// Rows are cut into blocks by their number alone, and sums over rows are made of one partial sum a block: the same bits for
// any number of threads.
struct RowBlocks {
  int64_t rows, per_block, count;
  explicit RowBlocks(int64_t rows) : rows(rows) {
    per_block = rows <= 16 * 64 ? 16 : (rows + 63) / 64;
    count = (rows + per_block - 1) / per_block;
  }
  int64_t begin(int64_t block) const { return block * per_block; }
  int64_t end(int64_t block) const { return begin(block) + per_block < rows ? begin(block) + per_block : rows; }
};

// A tensor (batch, heads, length, size) with unit last stride.
struct Heads {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;  // strides in elements
};
struct ConstHeads {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

// A tensor that broadcasts to (batch, heads, L, S); data may be null. Strides are 0 where it broadcasts; the keys' is 0 or 1.
struct Scores {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, head = 0, query = 0, key = 0;
};

// The gradient of the bias, or parts that add up to it, (batch, head, chunk, query, key). Where the bias has queries and keys
// (`dense`), a part is what one task sums over the batches and heads that share a bias, and has the dtype of the bias or the
// compute type; else it is what one chunk of a head's keys adds, in float64, zero at first. The strides of queries and keys are
// 0 where the bias broadcasts.
struct BiasGrad {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, head = 0, chunk = 0, query = 0, key = 0;
  bool over_batches = false, over_heads = false;  // dense: whether batches, or heads, share a bias
  bool dense() const { return key != 0 && query != 0; }
};

// What attention means, for every kernel of it: softmax(scale q·k, capped, + bias) over the keys that a query sees.
struct AttentionProblem {
  ConstHeads query, key, value;  // (batch, heads, L, D), (batch, kv_heads, S, D), (batch, kv_heads, S, Dv)
  Scores mask, bias;             // mask: bytes, 0 = hidden; bias: the activations' dtype or the compute type
  int64_t batch, heads, kv_heads, L, S, D, Dv;
  int64_t first, last;    // query i sees the keys i + first ... i + last; both in [-L, S]
  double scale, softcap;  // softcap 0: none
  Dropout dropout;
};

struct AttentionForward : AttentionProblem {
  Heads out;       // (batch, heads, L, Dv)
  void* lse;       // (batch, heads, L) compute, or null
  int64_t chunks;  // tasks per key head; but if weights are asked for a task is a block of queries and a group of heads
  // (batch, groups, L, S), in the activations' dtype or, if `wide`, in the compute type: weights_scale times the weights,
  // summed over the heads of a group; if groups is 0, none.
  void* weights;
  int64_t groups;
  double weights_scale;
  bool wide;
};

// sums (batch, heads, L): for each query the sum over its keys of weight times the weight's gradient.
struct AttentionWeightSums : AttentionProblem {
  const void* lse;
  Scores grad_weights;
  double grad_weights_scale;
  void* sums;
};

// A task is every chunks-th block of keys of one key head, or, where batches or heads share a dense bias, of several.
struct AttentionBackward : AttentionProblem {
  ConstHeads out, grad_out;
  const void *lse, *grad_lse;  // grad_lse may be null
  Scores grad_weights;         // null if the weights took no part
  double grad_weights_scale;
  const void* weight_sums;  // with grad_weights: of AttentionWeightSums
  Heads grad_query, grad_key, grad_value;
  void* grad_query_parts;  // chunks > 1: (chunks, batch, heads, L, D) compute, whose sum is the gradient of query; else null
  BiasGrad grad_bias;
  int64_t batch_tasks, head_tasks, chunks;  // tasks = their product
};

// Queries and keys in a block of attention; backward works on half as many keys.
constexpr int kQueries = 64, kKeys = 128, kBackwardKeys = 64;

// scores[l, s] = sum over d of weight[d] tanh(query[l, d] + key[s, d]), batch by batch.
struct AdditiveProblem {
  ConstHeads query, key;  // (batch, 1, L, D), (batch, 1, S, D)
  const void* weight;     // (D)
  int64_t batch, L, S, D;
};

// A task is kAdditiveQueries queries and kAdditiveKeys keys of one batch.
struct AdditiveForward : AdditiveProblem {
  void* scores;  // (batch, L, S) compute
};

// A task is kAdditiveColumns of the D columns of one batch.
struct AdditiveBackward : AdditiveProblem {
  const void* grad;             // (batch, L, S) compute
  void *grad_query, *grad_key;  // (batch, L, D), (batch, S, D)
  void* weight_partials;        // (batch, D) compute: weight's gradient of each batch
};

constexpr int64_t kAdditiveQueries = 16, kAdditiveKeys = 64, kAdditiveColumns = 16;

// activation(x weightᵀ + bias), all of one dtype.
struct LinearArgs {
  ConstRows x, weight;  // (rows, k), (n, k)
  const void* bias;     // (n) or null
  void* out;            // (rows, n)
  int64_t rows, n, k;
  Activation activation;
};

// Columns of the result, rows of weight, that one task of linear takes.
constexpr int64_t kLinearColumns = 16;

// Columns of a row that one task of an elementwise kernel takes.
constexpr int64_t kChunk = 4096;
inline int64_t chunks_per_row(int64_t n) { return (n + kChunk - 1) / kChunk; }

// The tasks of a call, numbered from 0. A thread takes a range of them when it has none, a shorter one as fewer are left: so
// all end together, however fast each core is and whatever else it has to do.
class Tasks {
 public:
  struct Range {
    int64_t begin, end;
  };
  Tasks(int64_t count, int64_t threads) : count_(count), threads_(threads) {}
  bool take(Range& range);  // false if none are left

 private:
  const int64_t count_, threads_;
  int64_t next_ = 0;
};

// The kernels of one instruction set, by dtype. A level leaves out (null) what is as in the level below: levels.h.
struct Kernels {
  const char* name;
  void (*layer_norm_forward[2][kDTypes])(const LayerNormForward&, int64_t begin_row, int64_t end_row);  // [wide_residual]
  void (*layer_norm_backward[2][kDTypes])(const LayerNormBackward&, const RowBlocks&, int64_t block);
  void (*activation_forward[kDTypes])(const ActivationArgs&, int64_t begin_chunk, int64_t end_chunk);
  void (*activation_backward[kDTypes])(const ActivationArgs&, int64_t begin_chunk, int64_t end_chunk);
  void (*activation_backward_block[kDTypes])(const ActivationArgs&, const RowBlocks&, int64_t block);
  void (*attention_forward[kDTypes])(const AttentionForward&, Tasks&);
  void (*attention_rows[kDTypes])(const AttentionForward&, Tasks&);
  void (*attention_weight_sums[kDTypes])(const AttentionWeightSums&, Tasks&);
  void (*attention_backward[kDTypes])(const AttentionBackward&, Tasks&);
  void (*additive_forward[kDTypes])(const AdditiveForward&, Tasks&);
  void (*additive_backward[kDTypes])(const AdditiveBackward&, Tasks&);
  void (*linear[kDTypes])(const LinearArgs&, int64_t begin_task, int64_t end_task);
  void (*sum_blocks[kDTypes])(const void* partials, void* out, int64_t count, int64_t n);
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;
#endif

}  // namespace ft
