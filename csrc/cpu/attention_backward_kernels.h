// Attention backward: weights again from the saved log-sum-exp, block by block (Dao et al. 2022, algorithm 4).
//
// With scores s, weights p = exp(s - lse), dropped weights w and, for each query, delta = sum over the keys of p dp:
//     dp = drop(grad_out value'),   ds = p (dp - delta),
//     grad_value = w' grad_out,   grad_key = scale ds' query,   grad_query = scale ds key,   grad_bias = ds.
// A task owns blocks of keys: it walks over the queries for each, keeps the gradients of key and value in float32 until the
// end, and sums the gradient of query over its keys. Everything is transposed, [key][query], as in attention_tile.h.
#pragma once

#include "attention_tile.h"

namespace ft {
namespace FT_LEVEL {

// A key head and every chunks-th block of its keys from `chunk` on.
struct BackwardStep {
  int64_t batch, kv_head, chunk;
};

template <typename T>
class BackwardTask {
  using C = Compute<T>;
  using E = Element<T>;
  static constexpr int n = kLanes<C>, kPer = ElementOf<T>::per, kBlock = kBackwardKeys;
  using OperandB = RowsOperand<T>;

  const AttentionBackward& a_;
  const int64_t padded_;  // queries, in whole blocks
  TileRegisters registers_;
  ScoreTile<T> tile_;
  // Of one head's queries: operands over the head's size, [block](D, kQueries), and over queries, (L, D).
  Buffer<E> query_t_, grad_out_t_, query_rows_, grad_out_rows_;
  Buffer<C> offset_, delta_;
  Buffer<C> grad_query_;             // [block](D, kQueries)
  Buffer<C> grad_key_, grad_value_;  // (keys of the task, D)
  Buffer<E> key_, value_;            // of one block of keys
  Buffer<C> grad_weights_;           // blocks of scores from here on: dp, later ds
  Buffer<C> grad_scores_;
  Buffer<T> weight_rows_, score_rows_;  // with pairs: w and ds as operands over queries, [key][query]
  Buffer<E> score_pairs_;               // ... and ds over keys
  // Sums of ds before the softcap's derivative, blocks [key][query]. If dense, for a block of keys and all queries, or, where
  // the task adds up several heads, for all its keys.
  const bool several_;
  Buffer<C> grad_bias_;

  struct Head {
    int64_t batch, head;
    Rows<const T> key, value;
    OperandB query, grad_out;
  };

  int64_t block_count() const { return (a_.S + kBlock - 1) / kBlock; }
  int64_t task_keys() const { return (block_count() + a_.chunks - 1) / a_.chunks * kBlock; }
  int64_t local(int64_t k) const { return k / kBlock / a_.chunks * kBlock; }  // where the task keeps what it has of a block
  static int64_t rows_padded(int64_t d) { return round_up(d, 16); }

 public:
  explicit BackwardTask(const AttentionBackward& a)
      : a_(a),
        padded_(round_up(a.L, kQueries)),
        tile_(a, true),
        query_t_(padded_ * depth<T>(a.D)),
        grad_out_t_(padded_ * depth<T>(a.Dv)),
        query_rows_(OperandB::scratch(a.L, a.D)),
        grad_out_rows_(OperandB::scratch(a.L, a.Dv)),
        offset_(padded_),
        delta_(padded_),
        grad_query_(padded_ * rows_padded(a.D)),
        grad_key_(task_keys() * OperandB::columns(a.D)),
        grad_value_(task_keys() * OperandB::columns(a.Dv)),
        key_(Operand<T>::scratch(kBlock, a.D)),
        value_(Operand<T>::scratch(kBlock, a.Dv)),
        grad_weights_(a.grad_weights.data ? kBlock * kQueries : 0),
        grad_scores_(kBlock * kQueries),
        weight_rows_(kPaired<T> ? kBlock * kQueries : 0),
        score_rows_(kPaired<T> ? kBlock * kQueries : 0),
        score_pairs_(kPaired<T> ? kBlock / 2 * kQueries : 0),
        several_(a.batch > a.batch_tasks || (a.grad_bias.over_heads && a.heads > a.head_tasks)),
        grad_bias_(!a.grad_bias.data      ? 0
                   : !a.grad_bias.dense() ? kBlock * kQueries
                   : several_             ? (a.grad_bias.over_heads ? 1 : a.heads / a.kv_heads) * task_keys() * padded_
                                          : kBlock * padded_) {}

  // `next` is the step to come, or null.
  void run(const BackwardStep& step, const BackwardStep* next) {
    const auto [batch, kv_head, chunk] = step;
    memset(grad_key_, 0, task_keys() * OperandB::columns(a_.D) * sizeof(C));
    memset(grad_value_, 0, task_keys() * OperandB::columns(a_.Dv) * sizeof(C));
    const int64_t group = a_.heads / a_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      run_head(step, head, next);
      write_grad_query(batch, head, chunk);
    }
    for (int64_t block = chunk; block < block_count(); block += a_.chunks) {
      const int64_t k = block * kBlock, keys = a_.S - k < kBlock ? a_.S - k : kBlock;
      const Rows<T> grad_key = head_of<T>(a_.grad_key, batch, kv_head), grad_value = head_of<T>(a_.grad_value, batch, kv_head);
      write_rows(grad_key_ + local(k) * OperandB::columns(a_.D), {grad_key[k], grad_key.stride}, keys, a_.D, (C)a_.scale);
      write_rows(grad_value_ + local(k) * OperandB::columns(a_.Dv), {grad_value[k], grad_value.stride}, keys, a_.Dv,
                 (C)a_.dropout.scale);
    }
  }

 private:
  // Has the products fetch rows from `first` on.
  template <typename X>
  void fetch(Rows<X> x, int64_t first, int64_t count, int64_t size) {
    tile_.ahead.add(x[first], x.stride, count, size);
  }
  void fetch_queries(int64_t batch, int64_t head) {
    fetch(head_of<T>(a_.query, batch, head), 0, a_.L, a_.D);
    fetch(head_of<T>(a_.grad_out, batch, head), 0, a_.L, a_.Dv);
    fetch(head_of<T>(a_.out, batch, head), 0, a_.L, a_.Dv);
  }
  // The step's keys in key and value, or in their gradients; of several chunks the first block.
  template <typename X>
  void fetch_keys(const X& key, const X& value, const BackwardStep& step) {
    const int64_t k = step.chunk * kBlock, keys = a_.chunks == 1 || a_.S - k < kBlock ? a_.S - k : kBlock;
    fetch(head_of<T>(key, step.batch, step.kv_head), k, keys, a_.D);
    fetch(head_of<T>(value, step.batch, step.kv_head), k, keys, a_.Dv);
  }

  // ... and what comes after the products of a head: the results, then the next head's operands.
  void fetch_next(const BackwardStep& step, int64_t head, const BackwardStep* next) {
    const int64_t group = a_.heads / a_.kv_heads;
    tile_.ahead.clear();
    if (!a_.grad_query_parts) fetch(head_of<T>(a_.grad_query, step.batch, head), 0, a_.L, a_.D);
    if ((head + 1) % group != 0) {
      fetch_queries(step.batch, head + 1);
      return;
    }
    fetch_keys(a_.grad_key, a_.grad_value, step);
    if (!next) return;
    fetch_queries(next->batch, next->kv_head * group);
    fetch_keys(a_.key, a_.value, *next);
  }

  // delta is grad_out . out but for what the gradients of the weights and of the log-sum-exp add.
  void find_delta(Rows<const T> out, Rows<const T> grad_out, int64_t row) {
    for (int64_t q = 0; q < padded_; q += n) {
      Vec<C> dots[n] = {};
      for (int i = 0; i < n && q + i < a_.L; ++i) {
        Vec<C> dot = {};
        for_columns<C>(a_.Dv,
                       [&](int64_t c, auto lanes) { dot += lanes.load(out[q + i] + c) * lanes.load(grad_out[q + i] + c); });
        dots[i] = dot;
      }
      store(delta_ + q, lane_sums<C>(dots));
    }
    for (int64_t q = 0; q < a_.L; ++q) {
      if (a_.weight_sums) delta_[q] += ((const C*)a_.weight_sums)[row + q];
      if (a_.grad_lse) delta_[q] -= ((const C*)a_.grad_lse)[row + q];
    }
  }

  void run_head(const BackwardStep& step, int64_t head, const BackwardStep* next) {
    const auto [batch, kv_head, chunk] = step;
    const Rows<const T> query = head_of<T>(a_.query, batch, head), grad_out = head_of<T>(a_.grad_out, batch, head);
    for (int64_t q = 0; q < a_.L; q += kQueries) {
      const int64_t queries = a_.L - q < kQueries ? a_.L - q : kQueries;
      transposed_operand<T>({query[q], query.stride}, queries, a_.D, query_t_ + q * depth<T>(a_.D));
      transposed_operand<T>({grad_out[q], grad_out.stride}, queries, a_.Dv, grad_out_t_ + q * depth<T>(a_.Dv));
    }
    const int64_t row = (batch * a_.heads + head) * a_.L;
    weight_offsets<C>((const C*)a_.lse + row, a_.L, offset_);
    find_delta(head_of<T>(a_.out, batch, head), grad_out, row);
    memset(grad_query_, 0, padded_ * rows_padded(a_.D) * sizeof(C));
    tile_.at_head(batch, head);
    KeyRange range(a_, 0, a_.L);
    range.without_padding(a_, batch, head, 1);
    const Head operands = {batch,
                           head,
                           head_of<T>(a_.key, batch, kv_head),
                           head_of<T>(a_.value, batch, kv_head),
                           {query, a_.L, a_.D, query_rows_},
                           {grad_out, a_.L, a_.Dv, grad_out_rows_}};
    for (int64_t block = chunk; block < block_count(); block += a_.chunks) {
      const int64_t k = block * kBlock, keys = a_.S - k < kBlock ? a_.S - k : kBlock;
      if (block + a_.chunks >= block_count()) fetch_next(step, head, next);
      if (a_.grad_bias.dense() && is_first(batch, head)) memset(grad_bias_of(head, k), 0, kBlock * padded_ * sizeof(C));
      if (k < range.end && k + keys > range.begin) run_block(operands, k, keys);
      if (a_.grad_bias.dense() && is_last(batch, head)) write_grad_bias(batch, head, k, keys);
    }
  }

  void run_block(const Head& head, int64_t k, int64_t keys) {
    const Operand<T> key_a({head.key[k], head.key.stride}, keys, a_.D, key_, true, true);
    const Operand<T> value_a({head.value[k], head.value.stride}, keys, a_.Dv, value_, true, false);
    C* const grad_key = grad_key_ + local(k) * OperandB::columns(a_.D);
    C* const grad_value = grad_value_ + local(k) * OperandB::columns(a_.Dv);
    // Queries that may see one of these keys: key - last <= query <= key - first.
    const int64_t begin = k - a_.last < 0 ? 0 : (k - a_.last) / kQueries * kQueries;
    const int64_t end = k + keys - a_.first < a_.L ? k + keys - a_.first : a_.L;
    for (int64_t q = begin; q < end; q += kQueries) {
      if (!tile_.locate(q, a_.L - q < kQueries ? a_.L - q : kQueries, k, keys)) continue;
      tile_.compute(query_t_ + q * depth<T>(a_.D), key_a.rows);
      if (a_.grad_weights.data)
        load_scores<T>(a_.grad_weights, head.batch, head.head, q, tile_.queries, k, keys, grad_weights_);
      for (int s = 0; s < tile_.strip_count;) {
        const Strip run = tile_.merged(s);
        multiply<false, false>(from_row(value_a.rows, run.begin), grad_out_t_ + q * depth<T>(a_.Dv) + run.first * n, kQueries,
                               grad_scores_ + run.begin * kQueries + run.first * n, kQueries, run.keys(),
                               (run.last - run.first) * n, depth<T>(a_.Dv), tile_.ahead);
      }
      C* const grad_bias = grad_bias_of(head.head, k) + (a_.grad_bias.dense() ? q * kBlock : 0);
      if (a_.grad_bias.data && !a_.grad_bias.dense()) memset(grad_bias, 0, kBlock * kQueries * sizeof(C));
      for (int s = 0; s < tile_.strip_count; ++s) differentiate(tile_.strips[s], grad_bias);
      if (a_.grad_bias.data && !a_.grad_bias.dense()) reduce_grad_bias(head, k);
      for (int s = 0; s < tile_.strip_count;) {
        const Strip run = tile_.merged(s);
        const int64_t first = run.first * n, visible = run.last * n < tile_.queries ? run.last * n : tile_.queries;
        const int64_t count = kPaired<T> ? (run.last - run.first) * n / 2 : visible - first;
        multiply<false, true>(over_queries(weights(), run.begin, first), head.grad_out[q + first], head.grad_out.stride,
                              grad_value + run.begin * OperandB::columns(a_.Dv), OperandB::columns(a_.Dv), run.keys(),
                              OperandB::columns(a_.Dv), count, tile_.ahead);
        multiply<false, true>(over_queries(score_grads(), run.begin, first), head.query[q + first], head.query.stride,
                              grad_key + run.begin * OperandB::columns(a_.D), OperandB::columns(a_.D), run.keys(),
                              OperandB::columns(a_.D), count, tile_.ahead);
        multiply<!kPaired<T>, true>(
            Matrix<E>{key_a.columns.data + run.begin / kPer * key_a.columns.column, key_a.columns.row, key_a.columns.column},
            over_keys() + run.begin / kPer * kQueries + first, kQueries, grad_query_ + q * rows_padded(a_.D) + first, kQueries,
            a_.D, (run.last - run.first) * n, (run.keys() + kPer - 1) / kPer, tile_.ahead);
      }
    }
  }

  static Matrix<E> from_row(Matrix<E> x, int64_t row) { return {x.data + row * x.row, x.row, x.column}; }

  // A block [key][query] as an A whose k are the queries from `first` on.
  template <typename X>
  static Matrix<E> over_queries(const X* block, int64_t key, int64_t first) {
    return {(const E*)(block + key * kQueries + first), kQueries / kPer, 1};
  }

  // w and ds after `differentiate`: in place, or with pairs as rows of T and, over the keys, as pairs.
  auto weights() const {
    if constexpr (kPaired<T>)
      return (const T*)weight_rows_;
    else
      return (const C*)tile_.scores;
  }
  auto score_grads() const {
    if constexpr (kPaired<T>)
      return (const T*)score_rows_;
    else
      return (const C*)grad_scores_;
  }
  const E* over_keys() const {
    if constexpr (kPaired<T>)
      return score_pairs_;
    else
      return grad_scores_;
  }

  // Scores and dp of a strip to w and ds.
  void differentiate(const Strip& strip, C* grad_bias) {
    with_flag(a_.dropout.on(), [&](auto drops) {
      with_flag(a_.softcap != 0 || a_.grad_weights.data || a_.grad_bias.data,
                [&](auto more) { differentiate<drops.value, more.value>(strip, grad_bias); });
    });
  }
  // `more`: there is a softcap or a gradient of the weights or of the bias.
  template <bool drops, bool more>
  void differentiate(const Strip& strip, C* grad_bias) {
    for_groups(strip.first, strip.last, [&](auto group, int v) {
      constexpr int V = group.value;
      const C factor = tile_.factor, scale = (C)a_.dropout.scale, weights_scale = (C)a_.grad_weights_scale;
      const bool capped = more && a_.softcap != 0, weights_grad = more && a_.grad_weights.data;
      const bool bias_grad = more && a_.grad_bias.data;
      Vec<C> offset[V], delta[V];
      Ints<C> kept[V];
      for (int i = 0; i < V; ++i) {
        offset[i] = load(offset_ + tile_.first_query + (v + i) * n);
        delta[i] = load(delta_ + tile_.first_query + (v + i) * n);
        if (drops) memcpy(&kept[i], tile_.kept(strip) + (v + i) * n, sizeof kept[i]);
      }
      C *const scores = tile_.scores, *const grads = grad_scores_;
      const auto one = [&](int key, int i, Vec<C>& w, Vec<C>& ds) {
        const int64_t at = key * kQueries + (v + i) * n;
        const Vec<C> p = exp2((load(scores + at) * factor - offset[i]) * (C)kLog2E);
        Vec<C> dp = load(grads + at);
        w = p;
        if (weights_grad) dp += load(grad_weights_ + at) * weights_scale;
        if (drops) {
          const Ints<C> bit = Ints<C>{} + (int)(1u << (key - strip.begin));
          w = select_bit<C>(kept[i], bit, w, Vec<C>{});
          dp = select_bit<C>(kept[i], bit, dp * scale, Vec<C>{});
        }
        ds = p * (dp - delta[i]);
        if (bias_grad) store(grad_bias + at, load(grad_bias + at) + ds);
        if (capped) ds *= load(tile_.slopes + at);
      };
      if constexpr (kPaired<T>) {
#if defined(FT_AVX512_BF16)
        for (int key = strip.begin; key < strip.begin + kStrip; key += 2)
          for (int i = 0; i < V; ++i) {
            const int64_t at = key * kQueries + (v + i) * n;
            Vec<C> w[2] = {}, ds[2] = {};
            for (int k = 0; k < 2 && key + k < strip.end; ++k) {
              one(key + k, i, w[k], ds[k]);
              store(weight_rows_ + at + k * kQueries, w[k]);
              store(score_rows_ + at + k * kQueries, ds[k]);
            }
            store((float*)(Pair*)score_pairs_ + key / 2 * kQueries + (v + i) * n, pairs_of(ds[0], ds[1]));
          }
#endif
      } else {
        for (int key = strip.begin; key < strip.end; ++key)
          for (int i = 0; i < V; ++i) {
            const int64_t at = key * kQueries + (v + i) * n;
            Vec<C> w, ds;
            one(key, i, w, ds);
            store(scores + at, w);
            store(grads + at, ds);
          }
      }
    });
  }

  // Batches and heads of one task, of which one sum is made.
  int64_t shared_batches() const { return a_.batch / a_.batch_tasks; }
  int64_t shared_heads() const { return a_.grad_bias.over_heads ? a_.heads / a_.head_tasks : 1; }
  bool is_first(int64_t batch, int64_t head) const { return batch % shared_batches() == 0 && head % shared_heads() == 0; }
  bool is_last(int64_t batch, int64_t head) const { return is_first(batch + 1, a_.grad_bias.over_heads ? head + 1 : head); }

  C* grad_bias_of(int64_t head, int64_t k) const {
    if (!several_) return grad_bias_;
    return grad_bias_ + ((a_.grad_bias.over_heads ? 0 : head % (a_.heads / a_.kv_heads)) * task_keys() + local(k)) * padded_;
  }

  void write_grad_bias(int64_t batch, int64_t head, int64_t k, int64_t keys) const {
    const BiasGrad& g = a_.grad_bias;
    const int64_t at = batch / shared_batches() * g.batch + head / shared_heads() * g.head + k;
    if (g.dtype == DType::f32 && sizeof(C) == sizeof(float))
      write_blocks(grad_bias_of(head, k), (C*)g.data + at, keys);
    else
      write_blocks(grad_bias_of(head, k), (T*)g.data + at, keys);
  }

  template <typename X>
  void write_blocks(const C* blocks, X* out, int64_t keys) const {
    for (int64_t q = 0; q < a_.L; q += kQueries) {
      const C* block = blocks + q * kBlock;
      transpose_back<C, X>(a_.L - q < kQueries ? a_.L - q : kQueries, keys, {out + q * a_.grad_bias.query, a_.grad_bias.query},
                           [=](int64_t key, int64_t row) { return load(block + key * kQueries + row); });
    }
  }

  // Adds the block's ds to the sums over keys or queries.
  void reduce_grad_bias(const Head& head, int64_t k) {
    const BiasGrad& g = a_.grad_bias;
    double* const sums = (double*)g.data + head.batch * g.batch + head.head * g.head + k / kBlock % a_.chunks * g.chunk +
                         tile_.first_key * g.key + tile_.first_query * g.query;
    for (int s = 0; s < tile_.strip_count; ++s) add_sums(tile_.strips[s], sums);
  }

  void add_sums(const Strip& strip, double* sums) {
    const BiasGrad& g = a_.grad_bias;
    for (int key = strip.begin; key < strip.end; ++key)
      for (int v = strip.first; v < strip.last; ++v) {
        const Vec<C> ds = load(grad_bias_ + key * kQueries + v * n);
        double* row = sums + key * g.key + v * n * g.query;
        if (g.query == 0) {
          *row += sum<C>(ds);
        } else {
          for (int i = 0; i < n && v * n + i < tile_.queries; ++i) row[i] += ds[i];
        }
      }
  }

  void write_grad_query(int64_t batch, int64_t head, int64_t chunk) {
    for (int64_t q = 0; q < a_.L; q += kQueries) {
      const int64_t queries = a_.L - q < kQueries ? a_.L - q : kQueries;
      const C* sums = grad_query_ + q * rows_padded(a_.D);
      const C scale = (C)a_.scale;
      const auto column = [=](int64_t d, int64_t row) { return load(sums + d * kQueries + row) * scale; };
      if (a_.grad_query_parts) {
        C* part = (C*)a_.grad_query_parts + (((chunk * a_.batch + batch) * a_.heads + head) * a_.L + q) * a_.D;
        transpose_back<C, C>(queries, a_.D, {part, a_.D}, column);
      } else {
        const Rows<T> out = head_of<T>(a_.grad_query, batch, head);
        transpose_back<C, T>(queries, a_.D, {out[q], out.stride}, column);
      }
    }
  }

  static void write_rows(const C* sums, Rows<T> out, int64_t rows, int64_t d, C scale) {
    for (int64_t r = 0; r < rows; ++r)
      for_columns<C>(
          d, [&](int64_t c, auto lanes) { lanes.store(out[r] + c, load(sums + r * OperandB::columns(d) + c) * scale); });
  }
};

template <typename T>
void attention_backward(const AttentionBackward& a, Tasks& tasks) {
  BackwardTask<T> task(a);
  const int64_t batches = a.batch / a.batch_tasks, heads = a.kv_heads / a.head_tasks, steps = batches * heads;
  const auto step_at = [&](int64_t i) -> BackwardStep {
    const int64_t index = i / steps, chunk = index % a.chunks, task_head = index / a.chunks % a.head_tasks;
    const int64_t task_batch = index / a.chunks / a.head_tasks;
    return {task_batch * batches + i % steps / heads, task_head * heads + i % heads, chunk};
  };
  for_tasks(tasks, [&](int64_t i, bool another) {
    for (int64_t step = i * steps; step < (i + 1) * steps; ++step) {
      const BackwardStep next = step_at(step + 1);
      task.run(step_at(step), another || step + 1 < (i + 1) * steps ? &next : nullptr);
    }
  });
}

}  // namespace FT_LEVEL
}  // namespace ft
