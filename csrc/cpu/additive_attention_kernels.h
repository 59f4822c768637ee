// The scores of additive attention, sum over d of weight[d] tanh(query[l, d] + key[s, d]), and their gradients.
//
// The tangents are the work: of the B x L x S x D none is written anywhere, and backward computes them again. Forward goes
// along d and sums the lanes of a vector for as many keys at once. Backward holds a few columns of all keys and of their
// gradient in the cache, a vector each, and passes over them with four queries at a time: with g the gradient of a score and
// t = tanh(query[l, d] + key[s, d]),
//     d weight[d] = sum over l, s of g t,   d query[l, d] = weight[d] sum over s of g (1 - t^2),   d key[s, d] likewise over l.
// As columns are independent, only the gradient of weight is summed over tasks.
#pragma once

#include "simd_math.h"

namespace ft {
namespace FT_LEVEL {

// Row `row` of one batch of x (batch, 1, rows, columns).
template <typename T>
inline const T* row_of(const ConstHeads& x, int64_t batch, int64_t row) {
  return (const T*)x.data + batch * x.batch + row * x.row;
}

// n numbers in the compute type, and zeros up to a whole vector.
template <typename T>
inline void widen(const T* from, int64_t n, Compute<T>* to) {
  for_columns<Compute<T>>(n, [=](int64_t col, auto lanes) { store(to + col, lanes.load(from + col)); });
}

// The lanes of the result add up to a score; width is a multiple of the lanes.
template <typename C>
inline Vec<C> lanes_of_score(const C* query, const C* key, const C* weight, int64_t width) {
  Vec<C> score = {};
  for (int64_t col = 0; col < width; col += kLanes<C>) score += load(weight + col) * tanh(load(query + col) + load(key + col));
  return score;
}

template <typename T>
void additive_forward(const AdditiveForward& a, Tasks& tasks) {
  using C = Compute<T>;
  constexpr int64_t group = kLanes<C>;  // keys whose scores make a vector
  const int64_t width = (a.D + kLanes<C> - 1) / kLanes<C> * kLanes<C>;
  Buffer<C> weight(width), query(kAdditiveQueries * width), key(group * width);
  widen((const T*)a.weight, a.D, weight);
  const int64_t key_blocks = (a.S + kAdditiveKeys - 1) / kAdditiveKeys;
  const int64_t query_blocks = (a.L + kAdditiveQueries - 1) / kAdditiveQueries;
  for_tasks(tasks, [&](int64_t task, bool) {
    const int64_t batch = task / key_blocks / query_blocks;
    const int64_t first_query = task / key_blocks % query_blocks * kAdditiveQueries,
                  first_key = task % key_blocks * kAdditiveKeys;
    const int64_t queries = a.L - first_query < kAdditiveQueries ? a.L - first_query : kAdditiveQueries;
    const int64_t keys = a.S - first_key < kAdditiveKeys ? a.S - first_key : kAdditiveKeys;
    C* scores = (C*)a.scores + (batch * a.L + first_query) * a.S + first_key;
    for (int64_t l = 0; l < queries; ++l) widen(row_of<T>(a.query, batch, first_query + l), a.D, query + l * width);
    for_columns<C>(keys, [&](int64_t s, auto lanes) {
      const int64_t count = keys - s < group ? keys - s : group;
      for (int64_t i = 0; i < count; ++i) widen(row_of<T>(a.key, batch, first_key + s + i), a.D, key + i * width);
      for (int64_t l = 0; l < queries; ++l) {
        Vec<C> sums[group] = {};
        for (int64_t i = 0; i < count; ++i) sums[i] = lanes_of_score<C>(query + l * width, key + i * width, weight, width);
        lanes.store(scores + l * a.S + s, lane_sums<C>(sums));
      }
    });
  });
}

// A vector of columns of all keys and of the sums that make their gradient.
template <typename C>
struct KeyColumns {
  const C* key;  // (S, lanes)
  C* sums;       // (S, lanes)
  int64_t S;
};

// For `rows` queries of a vector of columns each: adds to the sums of the keys and of weight, and returns those of the queries.
// grad: (rows, S). Sums are taken over runs of keys first, so that long ones lose nothing.
template <int rows, typename C>
inline void backward_rows(const KeyColumns<C>& keys, const C* grad, const Vec<C> (&query)[rows], Vec<C> (&query_sums)[rows],
                          Vec<C>& weight_sums) {
  constexpr int64_t kRun = 64;
  for (int64_t begin = 0; begin < keys.S; begin += kRun) {
    const int64_t end = keys.S - begin < kRun ? keys.S : begin + kRun;
    Vec<C> query_run[rows] = {}, weight_run = {};
    for (int64_t s = begin; s < end; ++s) {
      const Vec<C> key = load(keys.key + s * kLanes<C>);
      Vec<C> key_sum = load(keys.sums + s * kLanes<C>), weight_sum = {};
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const Vec<C> t = tanh(query[r] + key), g = splat<C>(grad[r * keys.S + s]), gt = g * t, slope = g - gt * t;
        query_run[r] += slope;
        key_sum += slope;
        weight_sum += gt;
      }
      store(keys.sums + s * kLanes<C>, key_sum);
      weight_run += weight_sum;
    }
    for (int r = 0; r < rows; ++r) query_sums[r] += query_run[r];
    weight_sums += weight_run;
  }
}

template <typename T>
void additive_backward(const AdditiveBackward& a, Tasks& tasks) {
  using C = Compute<T>;
  constexpr int kRows = 4;
  Buffer<C> key(a.S * kLanes<C>), key_sums(a.S * kLanes<C>);
  const KeyColumns<C> keys = {key, key_sums, a.S};
  const int64_t tasks_per_batch = (a.D + kAdditiveColumns - 1) / kAdditiveColumns;
  for_tasks(tasks, [&](int64_t task, bool) {
    const int64_t batch = task / tasks_per_batch, first = task % tasks_per_batch * kAdditiveColumns;
    const C* grad = (const C*)a.grad + batch * a.L * a.S;
    T *grad_query = (T*)a.grad_query + batch * a.L * a.D, *grad_key = (T*)a.grad_key + batch * a.S * a.D;
    for_columns<C>(a.D - first < kAdditiveColumns ? a.D - first : kAdditiveColumns, [&](int64_t column, auto lanes) {
      const int64_t col = first + column;
      const Vec<C> weight = lanes.load((const T*)a.weight + col);
      for (int64_t s = 0; s < a.S; ++s) store(key + s * kLanes<C>, lanes.load(row_of<T>(a.key, batch, s) + col));
      memset(key_sums, 0, a.S * kLanes<C> * sizeof(C));
      Vec<C> weight_sums = {};
      const auto some_rows = [&](int64_t l, auto& query) {
        constexpr int rows = sizeof(query) / sizeof(query[0]);
        Vec<C> sums[rows] = {};
        for (int r = 0; r < rows; ++r) query[r] = lanes.load(row_of<T>(a.query, batch, l + r) + col);
        backward_rows(keys, grad + l * a.S, query, sums, weight_sums);
        for (int r = 0; r < rows; ++r) lanes.store(grad_query + (l + r) * a.D + col, weight * sums[r]);
      };
      int64_t l = 0;
      for (Vec<C> query[kRows]; l + kRows <= a.L; l += kRows) some_rows(l, query);
      for (Vec<C> query[1]; l < a.L; ++l) some_rows(l, query);
      for (int64_t s = 0; s < a.S; ++s) lanes.store(grad_key + s * a.D + col, weight * load(key_sums + s * kLanes<C>));
      lanes.store((C*)a.weight_partials + batch * a.D + col, weight_sums);
    });
  });
}

}  // namespace FT_LEVEL
}  // namespace ft
