// Attention forward for few queries, as in decoding: bound by reading key and value, which is done once, as they lie.
//
// A task is one key head. For a block of keys and a query: scores by dot products, the online softmax of
// attention_forward_kernels.h over a row of scores, then the weighted sum of the rows of value. Further queries of the head
// find the block in the cache.
#pragma once

#include "attention_tile.h"

namespace ft {
namespace FT_LEVEL {

template <typename T>
class RowsTask {
  using C = Compute<T>;
  static constexpr int n = kLanes<C>;
  static constexpr int kBlock = 512;  // keys, if only one query reads them: long runs, which memory delivers fastest

  const AttentionForward& a_;
  const int64_t group_, rows_;         // heads that share a key head, and all their queries
  const int64_t block_;                // keys: if a second query reads them, as many as the first-level cache holds
  const int64_t ahead_;                // rows from the one at work to the one that is fetched: 4 KiB, what memory needs in time
  Buffer<C> query_, output_, scores_;  // output (rows, Dv), unnormalised
  Buffer<C> top_, sum_;                // (rows): as in ForwardTask

 public:
  explicit RowsTask(const AttentionForward& a)
      : a_(a),
        group_(a.heads / a.kv_heads),
        rows_(group_ * a.L),
        block_(rows_ > 1 ? kStrip : kBlock),
        ahead_(4096 / ((a.D > a.Dv ? a.D : a.Dv) * (int64_t)sizeof(T)) + 1),
        query_(a.D),
        output_(rows_ * round_up(a.Dv, n)),
        scores_(kBlock),
        top_(rows_),
        sum_(rows_) {}

  void run(int64_t batch, int64_t kv_head) {
    const Rows<const T> key = head_of<T>(a_.key, batch, kv_head), value = head_of<T>(a_.value, batch, kv_head);
    for (int64_t r = 0; r < rows_; ++r) {
      top_[r] = -INFINITY;
      sum_[r] = 0;
    }
    memset(output_, 0, rows_ * round_up(a_.Dv, n) * sizeof(C));
    KeyRange range(a_, 0, a_.L);
    range.without_padding(a_, batch, kv_head * group_, group_);
    for (int64_t k = range.begin / kStrip * kStrip; k < range.end; k += block_) {
      const int64_t keys = range.end - k < block_ ? range.end - k : block_;
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t head = kv_head * group_ + r / a_.L, query = r % a_.L;
        uint32_t visible[kBlock / kStrip];
        if (!find_visible(batch, head, query, k, keys, visible)) continue;
        score(head_of<T>(a_.query, batch, head)[query], {key[k], key.stride}, keys, r == 0);
        finish(batch, head, query, k, keys, visible);
        weigh(r, (batch * a_.heads + head) * a_.L + query, k, keys);
        for (int64_t i = 0; i < keys; i += kKeys)  // sums of few terms, which are added up: shorter sums are more exact
          accumulate(r, scores_ + i, {value[k + i], value.stride}, keys - i < kKeys ? keys - i : kKeys, r == 0);
      }
    }
    for (int64_t r = 0; r < rows_; ++r) write(r, batch, kv_head * group_ + r / a_.L, r % a_.L);
  }

 private:
  // A bit for each key that the query sees; false if it sees none.
  bool find_visible(int64_t batch, int64_t head, int64_t query, int64_t k, int64_t keys, uint32_t* visible) const {
    const uint8_t* mask = (const uint8_t*)a_.mask.data;
    if (mask) mask += batch * a_.mask.batch + head * a_.mask.head + query * a_.mask.query + k * a_.mask.key;
    uint32_t seen = 0;
    for (int w = 0; w * kStrip < keys; ++w) {
      const int64_t count = keys - w * kStrip < kStrip ? keys - w * kStrip : kStrip;
      const int64_t begin = query + a_.first - k - w * kStrip, end = query + a_.last + 1 - k - w * kStrip;
      visible[w] = bits_below(count) & bits_below(end) & ~bits_below(begin);
      if (mask) visible[w] &= a_.mask.key ? nonzero_bits(mask + w * kStrip, count) : *mask ? ~0u : 0;
      seen |= visible[w];
    }
    return seen != 0;
  }

  // Fetches the row whose time is `ahead_` rows later: whole rows in their order, which memory delivers faster than parts of
  // several. It may lie past the tensor's end, where that does nothing.
  static void fetch(const T* row, int64_t size) {
    for (int64_t c = 0; c < size; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
  }

  // scores_ = query . key, a sum for each key.
  void score(const T* query, Rows<const T> key, int64_t keys, bool first) {
    for_columns<C>(a_.D, [&](int64_t c, auto lanes) { store(query_ + c, lanes.load(query + c)); });
    constexpr int kTogether = n < 8 ? n : 8;
    const int64_t ahead = ahead_ * key.stride;
    for (int64_t k = 0; k < keys; k += n) {
      Vec<C> sums[n];
#pragma GCC unroll 2
      for (int part = 0; part < n; part += kTogether) {
        const T* row[kTogether];
        Vec<C> dots[kTogether];
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          row[i] = key[k + part + i < keys ? k + part + i : k];
          dots[i] = Vec<C>{};
        }
        for (int i = 0; first && i < kTogether; ++i) fetch(row[i] + ahead, a_.D);
        for_columns<C>(a_.D, [&](int64_t c, auto lanes) {
          const Vec<C> q = load(query_ + c);
#pragma GCC unroll 8
          for (int i = 0; i < kTogether; ++i) dots[i] += q * lanes.load(row[i] + c);
        });
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) sums[part + i] = dots[i];
      }
      store(scores_ + k, lane_sums<C>(sums));
    }
  }

  // What ScoreTile::compute does to scores, here in a row.
  void finish(int64_t batch, int64_t head, int64_t query, int64_t k, int64_t keys, const uint32_t* visible) {
    const Scores& bias = a_.bias;
    const int64_t at = batch * bias.batch + head * bias.head + query * bias.query + k * bias.key;
    const bool wide = bias.dtype == DType::f32 && sizeof(C) == sizeof(float);
    const C scale = (C)a_.scale, cap = (C)a_.softcap, per_cap = (C)(a_.scale / a_.softcap);
    const auto read = [&](auto lanes, int64_t i) {
      return wide ? lanes.load((const C*)bias.data + i) : lanes.load((const T*)bias.data + i);
    };
    for_columns<C>(keys, [&](int64_t c, auto lanes) {
      Vec<C> s = load(scores_ + c);
      s = cap != 0 ? tanh(s * per_cap) * cap : s * scale;
      if (bias.data) s += bias.key ? read(lanes, at + c) : splat<C>(read(Tail{1}, at)[0]);
      store(scores_ + c, select<C>(visible[c / kStrip] >> (c % kStrip), s, splat<C>(-INFINITY)));
    });
  }

  // The row of scores to weights exp(score - top), after the running maximum was raised to the row's.
  void weigh(int64_t r, int64_t row, int64_t k, int64_t keys) {
    Vec<C> largest = splat<C>(-INFINITY), sum = {};
    for (int64_t c = 0; c < keys; c += n) largest = maximum<C>(largest, load(scores_ + c));
    C top = top_[r];
    for (int i = 0; i < n; ++i) top = largest[i] > top ? largest[i] : top;
    if (top > top_[r]) {
      const C shrink = exp2(splat<C>((top_[r] - top) * (C)kLog2E))[0];
      sum_[r] *= shrink;
      C* output = output_ + r * round_up(a_.Dv, n);
      for (int64_t c = 0; c < a_.Dv; c += n) store(output + c, load(output + c) * shrink);
      top_[r] = top;
    }
    const C offset = top == -INFINITY ? 0 : top;
    uint32_t kept[kBlock / kStrip + kKeepStride];
    if (a_.dropout.on()) draw_keep_bits(a_.dropout, row, (uint32_t)(k / 8), keep_words(keys), kept);
    for (int64_t c = 0; c < keys; c += n) {
      const Vec<C> w = exp2((load(scores_ + c) - offset) * (C)kLog2E);
      sum += w;
      store(scores_ + c, a_.dropout.on() ? select<C>(kept[c / kStrip] >> (c % kStrip), w) : w);
    }
    sum_[r] += FT_LEVEL::sum<C>(sum);
  }

  // Adds the weighted rows of value, four vectors of columns at a time.
  void accumulate(int64_t r, const C* weights, Rows<const T> value, int64_t keys, bool first) {
    C* output = output_ + r * round_up(a_.Dv, n);
    const int64_t ahead = ahead_ * value.stride;
    int64_t c = 0;
    for (; c + 4 * n <= a_.Dv; c += 4 * n) {
      Vec<C> even[4] = {}, odd[4] = {};  // two sums, so that a step need not wait for the one before it
      const T* row = value.data + c;
      int64_t k = 0;
      for (; k + 2 <= keys; k += 2, row += 2 * value.stride) {
        const T* next = row + value.stride;
        if (first && c == 0) {
          fetch(row + ahead, a_.Dv);
          fetch(next + ahead, a_.Dv);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          even[i] += weights[k] * load(row + i * n);
          odd[i] += weights[k + 1] * load(next + i * n);
        }
      }
      for (int i = 0; i < 4; ++i) {
        if (k < keys) even[i] += weights[k] * load(row + i * n);
        store(output + c + i * n, load(output + c + i * n) + (even[i] + odd[i]));
      }
    }
    for_columns<C>(a_.Dv - c, [&](int64_t rest, auto lanes) {
      Vec<C> sum = {};
      for (int64_t k = 0; k < keys; ++k) sum += weights[k] * lanes.load(value[k] + c + rest);
      store(output + c + rest, load(output + c + rest) + sum);
    });
  }

  void write(int64_t r, int64_t batch, int64_t head, int64_t query) {
    const bool blind = sum_[r] == 0;
    const C scale = blind ? 0 : (C)a_.dropout.scale / sum_[r], rest = blind ? 0 : FT_LEVEL::log(splat<C>(sum_[r]))[0];
    const int64_t at = (batch * a_.heads + head) * a_.L + query;
    if (a_.lse) ((C*)a_.lse)[at] = blind ? -INFINITY : top_[r] + rest;
    T* out = head_of<T>(a_.out, batch, head)[query];
    const C* output = output_ + r * round_up(a_.Dv, n);
    for_columns<C>(a_.Dv, [&](int64_t c, auto lanes) { lanes.store(out + c, load(output + c) * scale); });
  }
};

template <typename T>
void attention_rows(const AttentionForward& a, Tasks& tasks) {
  RowsTask<T> task(a);
  for_tasks(tasks, [&](int64_t i, bool) { task.run(i / a.kv_heads, i % a.kv_heads); });
}

}  // namespace FT_LEVEL
}  // namespace ft
