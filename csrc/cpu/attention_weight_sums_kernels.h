// What the weights' gradient adds to that of the scores, before backward: for each query, the sum over its keys of weight times
// the weight's gradient. Weights are those of the saved log-sum-exp, as in backward.
#pragma once

#include "attention_tile.h"

namespace ft {
namespace FT_LEVEL {

// A task is a block of queries of one head.
template <typename T>
class WeightSumsTask {
  using C = Compute<T>;
  using E = Element<T>;
  static constexpr int n = kLanes<C>;

  const AttentionWeightSums& a_;
  TileRegisters registers_;
  ScoreTile<T> tile_;
  Buffer<E> query_, key_;
  Buffer<C> grad_weights_;
  C offset_[kQueries], sums_[kQueries];

 public:
  explicit WeightSumsTask(const AttentionWeightSums& a)
      : a_(a),
        tile_(a, false),
        query_(depth<T>(a.D) * kQueries),
        key_(Operand<T>::scratch(kKeys, a.D)),
        grad_weights_(kKeys * kQueries) {}

  void run(int64_t task) {
    const int64_t blocks = (a_.L + kQueries - 1) / kQueries, query = task % blocks * kQueries;
    const int64_t head = task / blocks % a_.heads, batch = task / blocks / a_.heads;
    const int64_t queries = a_.L - query < kQueries ? a_.L - query : kQueries, at = (batch * a_.heads + head) * a_.L + query;
    const Rows<const T> q = head_of<T>(a_.query, batch, head);
    const Rows<const T> key = head_of<T>(a_.key, batch, head / (a_.heads / a_.kv_heads));
    transposed_operand<T>({q[query], q.stride}, queries, a_.D, query_);
    weight_offsets<C>((const C*)a_.lse + at, queries, offset_);
    for (C& sum : sums_) sum = 0;
    tile_.at_head(batch, head);
    const KeyRange range(a_, query, queries);
    for (int64_t k = range.begin / kKeys * kKeys; k < range.end; k += kKeys) {
      const int64_t keys = range.end - k < kKeys ? range.end - k : kKeys;
      if (!tile_.locate(query, queries, k, keys)) continue;
      const Operand<T> block({key[k], key.stride}, keys, a_.D, key_, true, false);
      tile_.compute(query_, block.rows);
      load_scores<T>(a_.grad_weights, batch, head, query, queries, k, keys, grad_weights_);
      for (int s = 0; s < tile_.strip_count; ++s) add(tile_.strips[s]);
    }
    memcpy((C*)a_.sums + at, sums_, queries * sizeof(C));
  }

 private:
  void add(const Strip& strip) {
    const auto* words = tile_.kept(strip);
    const C scale = (C)(a_.grad_weights_scale * a_.dropout.scale);
    for (int v = strip.first; v < strip.last; ++v) {
      const Vec<C> offset = load(offset_ + v * n);
      Ints<C> kept = {};
      if (words) memcpy(&kept, words + v * n, sizeof kept);
      Vec<C> dot = {};
      for (int key = strip.begin; key < strip.end; ++key) {
        const int64_t at = key * kQueries + v * n;
        Vec<C> w = exp2((load(tile_.scores + at) * tile_.factor - offset) * (C)kLog2E);
        if (words) w = select_bit<C>(kept, Ints<C>{} + (int)(1u << (key - strip.begin)), w, Vec<C>{});
        dot += w * load(grad_weights_ + at);
      }
      store(sums_ + v * n, load(sums_ + v * n) + dot * scale);
    }
  }
};

template <typename T>
void attention_weight_sums(const AttentionWeightSums& a, Tasks& tasks) {
  WeightSumsTask<T> task(a);
  for_tasks(tasks, [&](int64_t i, bool) { task.run(i); });
}

}  // namespace FT_LEVEL
}  // namespace ft
