// The weights that attention gave, from the saved log-sum-exp, and the sums that backward needs of them: two passes over the
// scores that write no more than is asked for. The mean over heads is summed block by block.
#pragma once

#include "attention_tile.h"

namespace ft {
namespace FT_LEVEL {

// Runs through the weights of one block of queries in one head: visit(tile, strip) with the weights, as backward sees them
// (after dropout), in tile.scores.
template <typename T>
class WeightsPass {
  using C = Compute<T>;
  using E = Element<T>;
  static constexpr int n = kLanes<C>;

  const AttentionProblem& p_;
  TileRegisters registers_;
  ScoreTile<T> tile_;
  Buffer<E> query_, key_;
  // A weight is exp(score - lse), or, to lose no digits of large scores, exp2(factor log2(e) (score - top) - rest), its score
  // before tile_.factor.
  bool by_lse_ = false;
  C offset_[kQueries], rest_[kQueries];

 public:
  explicit WeightsPass(const AttentionProblem& p)
      : p_(p), tile_(p, false), query_(depth<T>(p.D) * kQueries), key_(Operand<T>::scratch(kKeys, p.D)) {}

  void subtract_lse(const C* lse, int64_t count) {
    by_lse_ = true;
    weight_offsets<C>(lse, count, offset_);
    memset(rest_, 0, sizeof rest_);
  }
  void subtract(const C* top, const C* rest, int64_t count) {
    for (int64_t i = 0; i < kQueries; ++i) {
      offset_[i] = i < count ? top[i] : (C)INFINITY;
      rest_[i] = i < count ? rest[i] : 0;
    }
  }

  template <typename Visit>
  void run(int64_t batch, int64_t head, int64_t query, Visit visit) {
    const int64_t queries = p_.L - query < kQueries ? p_.L - query : kQueries;
    const Rows<const T> q = head_of<T>(p_.query, batch, head);
    const Rows<const T> key = head_of<T>(p_.key, batch, head / (p_.heads / p_.kv_heads));
    transposed_operand<T>({q[query], q.stride}, queries, p_.D, query_);
    tile_.at_head(batch, head);
    const KeyRange range(p_, query, queries);
    for (int64_t k = range.begin / kKeys * kKeys; k < range.end; k += kKeys) {
      const int64_t keys = range.end - k < kKeys ? range.end - k : kKeys;
      if (!tile_.locate(query, queries, k, keys)) continue;
      const Operand<T> block({key[k], key.stride}, keys, p_.D, key_, true, false);
      tile_.compute(query_, block.rows);
      for (int s = 0; s < tile_.strip_count; ++s) {
        weigh(tile_.strips[s]);
        visit(tile_, tile_.strips[s]);
      }
    }
  }

 private:
  void weigh(const Strip& strip) {
    const C inner = by_lse_ ? tile_.factor : 1, outer = (by_lse_ ? 1 : tile_.factor) * (C)kLog2E;
    const C scale = (C)p_.dropout.scale;
    const auto* words = tile_.kept(strip);
    for (int v = strip.first; v < strip.last; ++v) {
      const Vec<C> offset = load(offset_ + v * n), rest = load(rest_ + v * n);
      Ints<C> kept = {};
      if (words) memcpy(&kept, words + v * n, sizeof kept);
      for (int key = strip.begin; key < strip.end; ++key) {
        C* at = tile_.scores + key * kQueries + v * n;
        Vec<C> w = exp2((load(at) * inner - offset) * outer - rest);
        if (words) w = select_bit<C>(kept, Ints<C>{} + (int)(1u << (key - strip.begin)), w * scale, Vec<C>{});
        store(at, w);
      }
    }
  }
};

template <typename T>
void attention_weights(const AttentionWeights& a, int64_t begin_task, int64_t end_task) {
  using C = Compute<T>;
  constexpr int n = kLanes<C>;
  WeightsPass<T> pass(a);
  Buffer<C> sums(a.S * kQueries);  // [key][query]
  const int64_t blocks = (a.L + kQueries - 1) / kQueries, groups = a.per_head ? a.heads : 1, heads = a.heads / groups;
  const C scale = (C)1 / heads;
  for (int64_t task = begin_task; task < end_task; ++task) {
    const int64_t query = task % blocks * kQueries, group = task / blocks % groups, batch = task / blocks / groups;
    const int64_t queries = a.L - query < kQueries ? a.L - query : kQueries;
    memset(sums, 0, a.S * kQueries * sizeof(C));
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      const C* exponents = (const C*)a.exponents + (batch * a.heads + head) * a.L + query;
      pass.subtract(exponents, exponents + a.batch * a.heads * a.L, queries);
      pass.run(batch, head, query, [&](const ScoreTile<T>& tile, const Strip& strip) {
        for (int key = strip.begin; key < strip.end; ++key)
          for (int v = strip.first; v < strip.last; ++v) {
            C* sum = sums + (tile.first_key + key) * kQueries + v * n;
            store(sum, load(sum) + load(tile.scores + key * kQueries + v * n));
          }
      });
    }
    T* out = (T*)a.weights + ((batch * groups + group) * a.L + query) * a.S;
    transpose_back<C, T>(queries, a.S, {out, a.S},
                         [&](int64_t key, int64_t row) { return load(sums + key * kQueries + row) * scale; });
  }
}

// A task is a block of queries of one head.
template <typename T>
void attention_weight_sums(const AttentionWeightSums& a, int64_t begin_task, int64_t end_task) {
  using C = Compute<T>;
  constexpr int n = kLanes<C>;
  WeightsPass<T> pass(a);
  Buffer<C> grad_weights(kKeys * kQueries);
  const int64_t blocks = (a.L + kQueries - 1) / kQueries;
  for (int64_t task = begin_task; task < end_task; ++task) {
    const int64_t query = task % blocks * kQueries, head = task / blocks % a.heads, batch = task / blocks / a.heads;
    const int64_t queries = a.L - query < kQueries ? a.L - query : kQueries, at = (batch * a.heads + head) * a.L + query;
    C sums[kQueries] = {};
    int64_t loaded = -1;
    pass.subtract_lse((const C*)a.lse + at, queries);
    pass.run(batch, head, query, [&](const ScoreTile<T>& tile, const Strip& strip) {
      if (loaded != tile.first_key)
        load_scores<T>(a.grad_weights, batch, head, query, queries, loaded = tile.first_key, tile.keys, grad_weights);
      for (int v = strip.first; v < strip.last; ++v) {
        Vec<C> dot = {};
        for (int key = strip.begin; key < strip.end; ++key) {
          const int64_t i = key * kQueries + v * n;
          dot += load(tile.scores + i) * load(grad_weights + i);
        }
        store(sums + v * n, load(sums + v * n) + dot * (C)a.grad_weights_scale);
      }
    });
    memcpy((C*)a.sums + at, sums, queries * sizeof(C));
  }
}

}  // namespace FT_LEVEL
}  // namespace ft
