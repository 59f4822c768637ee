// Attention forward: the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over blocks of keys.
//
// For a block of queries: running maximum m, sum l and unnormalised output, rescaled when a block of keys raises m. A task is
// one key head with every chunks-th block of the queries it serves; key and value are laid out for the products once a task.
// If weights are asked for, a task is one block of queries and a group of heads. Then the terms of all keys are kept until the
// maximum and the sum are final, which makes them weights.
#pragma once

#include "attention_tile.h"

namespace ft {
namespace FT_LEVEL {

template <typename T>
class ForwardTask {
  using C = Compute<T>;
  using E = Element<T>;
  static constexpr int n = kLanes<C>, kVectors = kQueries / n, kPer = ElementOf<T>::per;

  const AttentionForward& a_;
  TileRegisters registers_;
  ScoreTile<T> tile_;
  Buffer<E> key_, value_;            // of a task
  Buffer<E> query_;                  // (D, kQueries)
  Buffer<C> output_;                 // (Dv, kQueries)
  C top_[kQueries], sum_[kQueries];  // top: as the scores, before tile_.factor
  // If weights are asked for: of the keys' blocks [key][query] the terms, in units of `tops_`, and how many keys were worked
  // on; the sums over heads, [key][query]; terms as pairs.
  Buffer<C> terms_, tops_;
  Buffer<int64_t> counts_;
  Buffer<C> weights_;
  Buffer<E> pairs_;

 public:
  explicit ForwardTask(const AttentionForward& a)
      : a_(a),
        tile_(a, false),
        key_(Operand<T>::scratch(a.S, a.D)),
        value_(Operand<T>::scratch(a.S, a.Dv)),
        query_(depth<T>(a.D) * kQueries),
        output_(round_up(a.Dv, 16) * kQueries),
        terms_(a.groups ? blocks(a.S) * kKeys * kQueries : 0),
        tops_(a.groups ? blocks(a.S) * kQueries : 0),
        counts_(a.groups ? blocks(a.S) : 0),
        weights_(a.groups ? a.S * kQueries : 0),
        pairs_(a.groups && kPaired<T> ? kKeys / 2 * kQueries : 0) {}

  void run(int64_t task, bool another) {
    const auto [batch, kv_head] = place(task);
    const int64_t chunk = task % a_.chunks, group = a_.heads / a_.kv_heads;
    const KeyRange range = visible(batch, kv_head * group, group, 0, a_.L);
    const int64_t begin = range.begin, keys = range.end > begin ? range.end - begin : 0;
    const Rows<const T> key = head_of<T>(a_.key, batch, kv_head), value = head_of<T>(a_.value, batch, kv_head);
    const Operand<T> keys_a({key[begin], key.stride}, keys, a_.D, key_, true, false);
    const Operand<T> values_a({value[begin], value.stride}, keys, a_.Dv, value_, false, true);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      tile_.at_head(batch, head);
      for (int64_t query = chunk * kQueries; query < a_.L; query += a_.chunks * kQueries) {
        const Rows<T> out = head_of<T>(a_.out, batch, head);
        tile_.ahead.clear();
        tile_.ahead.add(out[query], out.stride, block_queries(query), a_.Dv);
        if (query + a_.chunks * kQueries < a_.L)
          fetch_queries(batch, head, query + a_.chunks * kQueries);
        else if (head + 1 < (kv_head + 1) * group)
          fetch_queries(batch, head + 1, chunk * kQueries);
        else if (another)
          fetch_task(task + 1);
        block(batch, head, query, keys_a.rows, values_a.columns, range);
      }
    }
  }

  void run_with_weights(int64_t task) {
    const int64_t query_blocks = (a_.L + kQueries - 1) / kQueries, query = task % query_blocks * kQueries;
    const int64_t group = task / query_blocks % a_.groups, batch = task / query_blocks / a_.groups;
    const int64_t heads = a_.heads / a_.groups, queries = block_queries(query);
    memset(weights_, 0, a_.S * kQueries * sizeof(C));
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      const int64_t kv_head = head / (a_.heads / a_.kv_heads);
      const KeyRange range = visible(batch, head, 1, query, queries);
      const int64_t begin = range.begin, keys = range.end > begin ? range.end - begin : 0;
      const Rows<const T> key = head_of<T>(a_.key, batch, kv_head), value = head_of<T>(a_.value, batch, kv_head);
      const Operand<T> keys_a({key[begin], key.stride}, keys, a_.D, key_, true, false);
      const Operand<T> values_a({value[begin], value.stride}, keys, a_.Dv, value_, false, true);
      tile_.at_head(batch, head);
      for (int64_t i = 0; i < blocks(keys); ++i) counts_[i] = 0;
      block(batch, head, query, keys_a.rows, values_a.columns, range);
      for (int64_t i = 0; i < blocks(keys); ++i)
        if (counts_[i]) add_weights(i, weights_ + (begin + i * kKeys) * kQueries);
    }
    const int64_t at = ((batch * a_.groups + group) * a_.L + query) * a_.S;
    if (a_.wide)
      write_weights((C*)a_.weights + at, queries);
    else
      write_weights((T*)a_.weights + at, queries);
  }

 private:
  static int64_t blocks(int64_t keys) { return (keys + kKeys - 1) / kKeys; }

  // The keys that some query of [query, query + queries) in these heads may see, from the beginning of a block on.
  KeyRange visible(int64_t batch, int64_t head, int64_t heads, int64_t query, int64_t queries) const {
    KeyRange range(a_, query, queries);
    range.without_padding(a_, batch, head, heads);
    range.begin = range.begin / kKeys * kKeys;
    return range;
  }

  struct Place {
    int64_t batch, kv_head;
  };
  // Batches take turns if they share a bias, as its block may then be the one just used; else the heads of a batch do.
  Place place(int64_t task) const {
    const int64_t i = task / a_.chunks;
    if (a_.bias.data && a_.bias.batch == 0) return {i % a_.batch, i / a_.batch};
    return {i / a_.kv_heads, i % a_.kv_heads};
  }

  int64_t block_queries(int64_t query) const { return a_.L - query < kQueries ? a_.L - query : kQueries; }

  // Has the products fetch the block of queries that comes next ...
  void fetch_queries(int64_t batch, int64_t head, int64_t query) {
    const Rows<const T> x = head_of<T>(a_.query, batch, head);
    tile_.ahead.add(x[query], x.stride, block_queries(query), a_.D);
  }
  // ... or all that the next task begins with.
  void fetch_task(int64_t task) {
    const auto [batch, kv_head] = place(task);
    const Rows<const T> key = head_of<T>(a_.key, batch, kv_head), value = head_of<T>(a_.value, batch, kv_head);
    tile_.ahead.add(key.data, key.stride, a_.S, a_.D);
    tile_.ahead.add(value.data, value.stride, a_.S, a_.Dv);
    fetch_queries(batch, kv_head * (a_.heads / a_.kv_heads), task % a_.chunks * kQueries);
  }

  // One block of queries; key and value are laid out for the keys of `range`.
  void block(int64_t batch, int64_t head, int64_t query, Matrix<E> key, Matrix<E> value, const KeyRange& range) {
    const int64_t queries = block_queries(query);
    const Rows<const T> q = head_of<T>(a_.query, batch, head);
    transposed_operand<T>({q[query], q.stride}, queries, a_.D, query_);
    for (int i = 0; i < kQueries; ++i) {
      top_[i] = -INFINITY;
      sum_[i] = 0;
    }
    bool empty = true;  // output_ holds nothing yet
    const auto clear = [&] { memset(output_, 0, round_up(a_.Dv, 16) * kQueries * sizeof(C)); };
    const KeyRange seen(a_, query, queries);
    const int64_t first = seen.begin > range.begin ? seen.begin / kKeys * kKeys : range.begin;
    const int64_t end = seen.end < range.end ? seen.end : range.end, offset = range.begin;
    for (int64_t k = first; k < end; k += kKeys) {
      const int64_t index = (k - offset) / kKeys;
      if (a_.groups) tile_.scores = terms_ + index * kKeys * kQueries;
      if (!tile_.locate(query, queries, k, end - k < kKeys ? end - k : kKeys)) continue;
      if (a_.groups && !tile_.whole()) memset(tile_.scores, 0, tile_.keys * kQueries * sizeof(C));
      tile_.compute(query_, {key.data + (k - offset) * key.row, key.row, key.column});
      raise_top(empty);
      for (int s = 0; s < tile_.strip_count; ++s) weigh(tile_.strips[s]);
      if (a_.groups) {
        counts_[index] = tile_.keys;
        memcpy(tops_ + index * kQueries, top_, sizeof top_);
      }
      for (int s = 0; s < tile_.strip_count; empty = false) {
        const Strip run = tile_.merged(s);
        const E* weights = (kPaired<T> ? pairs() : (const E*)tile_.scores) + run.begin / kPer * kQueries + run.first * n;
        const bool part = run.first > 0 || run.last < tile_.vectors();
        if (empty && part) clear();
        with_flag(part || !empty, [&](auto add) {
          multiply<!kPaired<T>, add.value>(
              Matrix<E>{value.data + (k - offset + run.begin) / kPer * value.column, value.row, value.column}, weights,
              kQueries, output_ + run.first * n, kQueries, a_.Dv, (run.last - run.first) * n, (run.keys() + kPer - 1) / kPer,
              tile_.ahead);
        });
      }
    }
    if (empty) clear();
    finish(batch, head, query, queries);
  }

  // Raises the running maxima to the block's and rescales what was summed under the old ones, if anything was.
  void raise_top(bool empty) {
    C top[kQueries];
    for (int v = 0; v < kVectors; ++v) store(top + v * n, splat<C>(-INFINITY));
    for (int s = 0; s < tile_.strip_count; ++s) {
      const Strip strip = tile_.strips[s];
      for_groups(strip.first, strip.last, [&](auto group, int v) {
        constexpr int V = group.value;
        Vec<C> m[V];
        for (int i = 0; i < V; ++i) m[i] = load(top + (v + i) * n);
        const C* row = tile_.scores + strip.begin * kQueries + v * n;
        for (int key = strip.begin; key < strip.end; ++key, row += kQueries)
          for (int i = 0; i < V; ++i) m[i] = maximum<C>(m[i], load(row + i * n));
        for (int i = 0; i < V; ++i) store(top + (v + i) * n, m[i]);
      });
    }
    const C factor = tile_.factor * (C)kLog2E;
    for (int v = 0; v < kVectors; ++v) {
      const Vec<C> before = load(top_ + v * n), after = maximum<C>(before, load(top + v * n));
      const Ints<C> raised = after > before;
      bool any = false;
      for (int i = 0; i < n; ++i) any |= raised[i] != 0;
      if (!any) continue;
      store(top_ + v * n, after);
      if (empty) continue;
      const Vec<C> shrink = raised ? exp2((before - after) * factor) : splat<C>(1);  // never -inf - -inf in a raised lane
      store(sum_ + v * n, load(sum_ + v * n) * shrink);
      for (int64_t d = 0; d < a_.Dv; ++d) {
        C* out = output_ + d * kQueries + v * n;
        store(out, load(out) * shrink);
      }
    }
  }

  // Scores to weights exp(score - top), in place, summed; those that dropout drops count in the sum only. The difference comes
  // first: of large scores the product with a factor is off by more than 1.
  void weigh(const Strip& strip) {
    with_flag(a_.dropout.on(), [&](auto drops) { weigh<drops.value>(strip); });
  }
  template <bool drops>
  void weigh(const Strip& strip) {
    for_groups(strip.first, strip.last, [&](auto group, int v) {
      constexpr int V = group.value;
      Vec<C> top[V], sum[V];
      Ints<C> kept[V];
      const C factor = tile_.factor * (C)kLog2E;
      for (int i = 0; i < V; ++i) {
        const Vec<C> m = load(top_ + (v + i) * n);
        top[i] = m == -INFINITY ? Vec<C>{} : m;
        sum[i] = load(sum_ + (v + i) * n);
        if (drops) memcpy(&kept[i], tile_.kept(strip) + (v + i) * n, sizeof kept[i]);
      }
      C* row = tile_.scores + strip.begin * kQueries + v * n;
      const auto weight = [&](int key, int i, const C* scores) {
        const Vec<C> w = exp2((load(scores + i * n) - top[i]) * factor);
        sum[i] += w;
        return drops ? select_bit<C>(kept[i], Ints<C>{} + (int)(1u << (key - strip.begin)), w, Vec<C>{}) : w;
      };
      if constexpr (kPaired<T>) {
#if defined(FT_AVX512_BF16)
        C* out = (C*)pairs() + strip.begin / 2 * kQueries + v * n;
        for (int key = strip.begin; key < strip.begin + kStrip; key += 2, row += 2 * kQueries, out += kQueries)
          for (int i = 0; i < V; ++i) {
            const Vec<C> low = key < strip.end ? weight(key, i, row) : Vec<C>{};
            const Vec<C> high = key + 1 < strip.end ? weight(key + 1, i, row + kQueries) : Vec<C>{};
            store(out + i * n, pairs_of(low, high));
            if (a_.groups && key < strip.end) store(row + i * n, low);
            if (a_.groups && key + 1 < strip.end) store(row + kQueries + i * n, high);
          }
#endif
      } else {
        for (int key = strip.begin; key < strip.end; ++key, row += kQueries)
          for (int i = 0; i < V; ++i) store(row + i * n, weight(key, i, row));
      }
      for (int i = 0; i < V; ++i) store(sum_ + (v + i) * n, sum[i]);
    });
  }

  // Where pairs of terms lie: in the place of the terms, unless these are kept.
  E* pairs() const { return a_.groups ? (E*)pairs_ : (E*)tile_.scores; }

  // Adds the weights of a block of keys.
  void add_weights(int64_t block, C* weights) const {
    const C *terms = terms_ + block * kKeys * kQueries, *tops = tops_ + block * kQueries;
    const C factor = tile_.factor * (C)kLog2E;
    for (int v = 0; v < tile_.vectors(); ++v) {
      const Vec<C> top = load(top_ + v * n), before = load(tops + v * n), sum = load(sum_ + v * n);
      const Vec<C> shrink = before < top ? exp2((before - top) * factor) : splat<C>(1);
      const Vec<C> scale = sum == 0 ? Vec<C>{} : shrink / sum;
      for (int64_t key = 0; key < counts_[block]; ++key) {
        const int64_t at = key * kQueries + v * n;
        store(weights + at, load(weights + at) + load(terms + at) * scale);
      }
    }
  }

  template <typename X>
  void write_weights(X* out, int64_t queries) const {
    const C scale = (C)(a_.weights_scale * a_.dropout.scale);
    transpose_back<C, X>(queries, a_.S, {out, a_.S},
                         [&](int64_t key, int64_t row) { return load(weights_ + key * kQueries + row) * scale; });
  }

  void finish(int64_t batch, int64_t head, int64_t query, int64_t queries) {
    C scale[kQueries];
    for (int v = 0; v * n < queries; ++v) {
      const Vec<C> sum = load(sum_ + v * n), top = load(top_ + v * n);
      const Ints<C> blind = sum == 0;
      store(scale + v * n, blind ? Vec<C>{} : (C)a_.dropout.scale / sum);
      const Vec<C> rest = blind ? Vec<C>{} : FT_LEVEL::log(sum);
      const int64_t at = (batch * a_.heads + head) * a_.L + query + v * n;
      const int64_t count = queries - v * n < n ? queries - v * n : n;
      if (a_.lse) Tail{count}.store((C*)a_.lse + at, blind ? splat<C>(-INFINITY) : top * tile_.factor + rest);
    }
    const Rows<T> out = head_of<T>(a_.out, batch, head);
    transpose_back<C, T>(queries, a_.Dv, {out[query], out.stride}, [&](int64_t column, int64_t row) {
      return load(output_ + column * kQueries + row) * load(scale + row);
    });
  }
};

template <typename T>
void attention_forward(const AttentionForward& a, Tasks& tasks) {
  ForwardTask<T> task(a);
  for_tasks(tasks, [&](int64_t i, bool another) {
    if (a.groups)
      task.run_with_weights(i);
    else
      task.run(i, another);
  });
}

}  // namespace FT_LEVEL
}  // namespace ft
