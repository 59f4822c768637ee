// The scores of one block of queries and keys, shared by all attention kernels but that for few queries.
//
// Scores are kept transposed, a row for each key, with the queries side by side in vectors: maxima and sums over keys are
// then plain vector operations, and the block is at once the B of the product with value. Everything a call may ask of the
// scores (scale, softcap, bias, mask, band of visible keys) is done here, once for forward, backward and the weights.
#pragma once

#include "attention_operands.h"
#include "philox_simd.h"
#include "simd_math.h"

namespace ft {
namespace FT_LEVEL {

// The lanes of v whose word has the bit set, else those of `other`.
template <typename C>
inline Vec<C> select_bit(Ints<C> words, Ints<C> bit, Vec<C> v, Vec<C> other) {
#if defined(FT_AVX512)
  if constexpr (sizeof(C) == 4)
    return (Vec<C>)_mm512_mask_mov_ps((__m512)other, _mm512_test_epi32_mask((__m512i)words, (__m512i)bit), (__m512)v);
  else
    return (Vec<C>)_mm512_mask_mov_pd((__m512d)other, _mm512_test_epi64_mask((__m512i)words, (__m512i)bit), (__m512d)v);
#else
  return (words & bit) != 0 ? v : other;
#endif
}

// The lowest `count` bits.
inline uint32_t bits_below(int64_t count) { return count <= 0 ? 0 : count >= 32 ? ~0u : (1u << count) - 1; }

// A bit for each of up to 32 bytes, set where the byte is not 0.
inline uint32_t nonzero_bits(const uint8_t* bytes, int64_t count) {
#if defined(FT_AVX512) || defined(FT_AVX2)
  uint8_t buffer[32] = {};
  if (count < 32) {  // a whole vector needs no copy
    memcpy(buffer, bytes, count);
    bytes = buffer;
  }
  const __m256i zero = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i*)bytes), _mm256_setzero_si256());
  return ~(uint32_t)_mm256_movemask_epi8(zero);
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= (uint32_t)(bytes[i] != 0) << i;
  return bits;
#endif
}

// body(V, first vector) for a range of vectors in groups of V = 4, 2 or 1, V known when compiling.
template <int n>
struct Count {
  static constexpr int value = n;
};
template <typename Body>
inline void for_groups(int begin, int end, Body body) {
  for (; begin + 4 <= end; begin += 4) body(Count<4>(), begin);
  if (begin + 2 <= end) {
    body(Count<2>(), begin);
    begin += 2;
  }
  if (begin < end) body(Count<1>(), begin);
}

// body(Flag<flag>): what an inner loop need not ask each time.
template <bool f>
struct Flag {
  static constexpr bool value = f;
};
template <typename Body>
inline void with_flag(bool flag, Body body) {
  if (flag) {
    body(Flag<true>());
  } else {
    body(Flag<false>());
  }
}

// A block of a tensor that broadcasts to the scores, transposed into `out`, [key][query]. T or the compute type.
template <typename T, typename Source>
inline void load_block(const Source* x, const Scores& s, int64_t queries, int64_t keys, Compute<T>* out) {
  using C = Compute<T>;
  constexpr int n = kLanes<C>;
  const int64_t padded = round_up(queries, 2 * n) < kQueries ? round_up(queries, 2 * n) : kQueries;
  if (s.query != 0 && s.key != 0) {
    transpose_rows<C>(queries, keys, out, kQueries,
                      [&](int64_t r, int64_t c, auto lanes) { return lanes.load(x + r * s.query + c); });
    for (int64_t r = round_up(queries, n); r < padded; r += n)
      for (int64_t key = 0; key < keys; ++key) store(out + key * kQueries + r, Vec<C>{});
    return;
  }
  C column[kQueries] = {};  // constant along the keys, or along the queries
  for (int64_t r = 0; r < queries; ++r) column[r] = Tail{1}.load(x + r * s.query)[0];
  for (int64_t key = 0; key < keys; ++key) {
    const Vec<C> all = splat<C>(Tail{1}.load(x + key * s.key)[0]);
    for (int64_t r = 0; r < padded; r += n) store(out + key * kQueries + r, s.query ? load(column + r) : all);
  }
}

template <typename T>
inline void load_scores(const Scores& s, int64_t batch, int64_t head, int64_t query, int64_t queries, int64_t key, int64_t keys,
                        Compute<T>* out) {
  const int64_t at = batch * s.batch + head * s.head + query * s.query + key * s.key;
  if (s.dtype == DType::f32 && sizeof(Compute<T>) == sizeof(float))
    load_block<T>((const Compute<T>*)s.data + at, s, queries, keys, out);
  else
    load_block<T>((const T*)s.data + at, s, queries, keys, out);
}

// For `count` queries what to subtract from their scores, padded to whole blocks by +inf; +inf too where a query sees nothing,
// so that its weights are 0.
template <typename C>
inline void weight_offsets(const C* lse, int64_t count, C* offsets) {
  for (int64_t i = 0; i < round_up(count, kQueries); ++i) offsets[i] = i < count && lse[i] != -INFINITY ? lse[i] : (C)INFINITY;
}

// Keys [begin, end) of a block, and the vectors of queries [first, last) that see one of them.
struct Strip {
  int begin, end, first, last;
  bool masked;  // some of them do not
  int keys() const { return end - begin; }
};

// Keys [begin, end) that the queries [query, query + count) may see by their positions.
struct KeyRange {
  int64_t begin, end;

  KeyRange(const AttentionProblem& p, int64_t query, int64_t count)
      : begin(query + p.first < 0 ? 0 : query + p.first), end(query + count + p.last > p.S ? p.S : query + count + p.last) {}

  // Without the keys at either end that the mask hides from every query of these heads, as it hides padding.
  void without_padding(const AttentionProblem& p, int64_t batch, int64_t head, int64_t heads) {
    if (!p.mask.data || p.mask.query != 0 || p.mask.key == 0 || begin >= end) return;
    int64_t first = end, last = begin;
    for (int64_t h = head; h < (p.mask.head ? head + heads : head + 1); ++h) {
      const uint8_t* row = (const uint8_t*)p.mask.data + batch * p.mask.batch + h * p.mask.head;
      int64_t i = begin, j = end;
      while (i < first && !row[i]) ++i;
      while (j > last && !row[j - 1]) --j;
      first = i < first ? i : first;
      last = j > last ? j : last;
    }
    begin = first;
    end = last;
  }
};

// A block of scores, [key][query], and what goes with it.
template <typename T>
class ScoreTile {
 public:
  using C = Compute<T>;
  using E = Element<T>;
  using Word = decltype(Ints<C>{}[0] + 0);
  static constexpr int n = kLanes<C>;

  C* scores;         // in memory of its own, or wherever the owner wants the next block
  Buffer<C> slopes;  // derivative of the softcap
  C factor = 1;      // what is left to multiply `scores` by
  Strip strips[kKeys / kStrip];
  int strip_count;
  int64_t first_query, queries, first_key, keys;
  Ahead ahead;

  ScoreTile(const AttentionProblem& problem, bool derivative)
      : slopes(derivative && problem.softcap != 0 ? kKeys * kQueries : 0),
        ahead(12 * (int)sizeof(T)),  // as measured: fewer come late, with more the product waits
        scores_(kKeys * kQueries),
        problem_(problem),
        derivative_(derivative),
        keys_(derivative ? kBackwardKeys : kKeys),
        slots_(bias_slots()),
        bias_(slots_ * keys_ * kQueries),
        bias_blocks_(slots_),
        visible_(kKeys / kStrip * kQueries),
        kept_(problem.dropout.on() ? kKeys / kStrip * kQueries : 0) {
    scores = scores_;
    for (int64_t i = 0; i < slots_; ++i) bias_blocks_[i] = {-1, 0, 0, false};
  }

  void at_head(int64_t batch, int64_t head) {
    batch_ = batch;
    head_ = head;
  }

  // Goes to a block; false if no query there sees a key.
  bool locate(int64_t query, int64_t query_count, int64_t key, int64_t key_count) {
    first_query = query;
    queries = query_count;
    first_key = key;
    keys = key_count;
    if (!find_visible()) return false;
    if (problem_.bias.data && !load_bias()) return false;
    if (problem_.dropout.on()) draw();
    return true;
  }

  // The scores, from query as a transposed operand and key from the block's first row on.
  void compute(const E* query, Matrix<E> key) {
    for (int s = 0; s < strip_count;) {
      const Strip run = merged(s);
      multiply<false, false>(Matrix<E>{key.data + run.begin * key.row, key.row, key.column}, query + run.first * n, kQueries,
                             scores + run.begin * kQueries + run.first * n, kQueries, run.keys(), (run.last - run.first) * n,
                             depth<T>(problem_.D), ahead);
    }
    factor = (C)problem_.scale;
    const bool finished = problem_.softcap != 0 || problem_.bias.data || !(factor > 0);
    for (int s = 0; s < strip_count; ++s)
      if (finished || strips[s].masked) finish(strips[s], finished);
    if (finished) factor = 1;
  }

  // Vectors of a row that hold queries.
  int vectors() const { return (int)round_up((queries + n - 1) / n, kStep); }

  // The next strips that have one range of queries, as one; s moves past them.
  Strip merged(int& s) const {
    Strip run = strips[s++];
    for (; s < strip_count && strips[s].begin == run.end && strips[s].first == run.first && strips[s].last == run.last; ++s)
      run.end = strips[s].end;
    return run;
  }

  // Whether every score of the block is worked on.
  bool whole() const {
    int64_t count = 0;
    for (int s = 0; s < strip_count; ++s)
      if (strips[s].first == 0 && strips[s].last == vectors()) count += strips[s].keys();
    return count == keys;
  }

  // Words of a strip's dropout decisions, a bit for each key.
  const Word* kept(const Strip& strip) const {
    return problem_.dropout.on() ? kept_ + strip.begin / kStrip * kQueries : nullptr;
  }

 private:
  static constexpr int kStep = kPaired<T> ? 2 : 1;  // pairs of queries come in 32
  static constexpr int kWords = kKeys / kStrip;

  Buffer<C> scores_;
  const AttentionProblem& problem_;
  bool derivative_;
  int64_t batch_, head_;
  // Blocks of the bias as they were last read: slots for all of a head's, where others share them and they are few, else one.
  static constexpr int64_t kBiasElements = 1 << 18;
  struct BiasBlock {
    int64_t at, queries, keys;
    bool shows;  // something else than -inf
  };
  const int64_t keys_, slots_;
  Buffer<C> bias_;
  Buffer<BiasBlock> bias_blocks_;
  const C* bias_here_ = nullptr;
  Buffer<Word> visible_, kept_;  // [strip][query], a bit for each key

  // Which keys each query sees, and the strips to work on: those in which a query sees one.
  bool find_visible() {
    const AttentionProblem& p = problem_;
    const bool within = first_key >= first_query + queries - 1 + p.first && first_key + keys - 1 <= first_query + p.last;
    const bool shared = p.mask.data && p.mask.query == 0;  // one row of the mask for all queries
    uint32_t row[kWords];
    bool shows = false, hides = false;
    if (shared) {
      read_mask(mask_row(), row);
      for (int w = 0; w * kStrip < keys; ++w) {
        shows |= row[w] != 0;
        hides |= row[w] != bits_below(keys - w * kStrip);
      }
      if (!shows) return false;
    }
    const bool masked = !within || hides || (p.mask.data && !shared);
    if (masked) band_words();
    for (int w = 0; hides && w * kStrip < keys; ++w)
      for (int v = 0; v < vectors(); ++v) {
        const Ints<C> bits = words(w, v) & (Word)row[w];
        memcpy(visible_ + w * kQueries + v * n, &bits, sizeof bits);
      }
    for (int64_t q = 0; p.mask.data && !shared && q < queries; ++q) {
      read_mask(mask_row() + q * p.mask.query, row);
      for (int w = 0; w * kStrip < keys; ++w) visible_[w * kQueries + q] &= (Word)row[w];
    }
    if (p.mask.data && !shared) fetch_next(p.mask, mask_row());
    strip_count = 0;
    for (int w = 0; w * kStrip < keys; ++w) {
      Strip strip = {w * kStrip, keys - w * kStrip < kStrip ? (int)keys : (w + 1) * kStrip, 0, vectors(), false};
      if (masked) {
        const int64_t first = first_key + strip.begin - p.last - first_query;  // the queries that see this far
        const int64_t last = first_key + strip.end - 1 - p.first - first_query;
        if (last < 0 || first >= queries) continue;
        if (first > 0) strip.first = (int)(first / n / kStep * kStep);
        if (last + 1 < queries) strip.last = (int)round_up(last / n + 1, kStep);
        const Word full = (Word)(uint32_t)bits_below(strip.keys());
        Ints<C> any = {}, all = Ints<C>{} + full;
        for (int v = strip.first; v < strip.last; ++v) {
          any |= words(w, v);
          all &= words(w, v) | ~inside(v);
        }
        Word seen = 0, everywhere = full;
        for (int i = 0; i < n; ++i) {
          seen |= any[i];
          everywhere &= all[i];
        }
        if (seen == 0) continue;
        strip.masked = everywhere != full;
      }
      strips[strip_count++] = strip;
    }
    return strip_count > 0;
  }

  Ints<C> words(int w, int v) const {
    Ints<C> x;
    memcpy(&x, visible_ + w * kQueries + v * n, sizeof x);
    return x;
  }

  // All bits in the lanes that hold a query.
  Ints<C> inside(int v) const {
    Ints<C> lane;
    for (int i = 0; i < n; ++i) lane[i] = v * n + i;
    return lane < (Word)queries;
  }

  // visible_ by position: in query's word w the bits of the keys `begin` to `end` - 1, counted from the word's first key.
  void band_words() {
    const AttentionProblem& p = problem_;
    Ints<C> lane;
    for (int i = 0; i < n; ++i) lane[i] = i;
    const auto below = [](Ints<C> count) {  // a word of so many bits
      count = count < 0 ? Ints<C>{} : count;
      const Ints<C> all = Ints<C>{} - 1;
      return count >= kStrip ? all : ~(all << (count & (kStrip - 1)));
    };
    for (int w = 0; w * kStrip < keys; ++w)
      for (int v = 0; v < vectors(); ++v) {
        const int64_t offset = first_query + v * n - first_key - w * kStrip;
        Ints<C> bits = below(lane + (Word)(offset + p.last + 1)) & ~below(lane + (Word)(offset + p.first));
        bits &= Ints<C>{} + (Word)bits_below(keys - w * kStrip);
        bits &= inside(v);
        memcpy(visible_ + w * kQueries + v * n, &bits, sizeof bits);
      }
  }

  // Has the products fetch what a tensor like the scores, at `here` for this block, has for the one that comes next: of the
  // same queries in forward, of the same keys in backward.
  template <typename X>
  void fetch_next(const Scores& x, const X* here) {
    const int64_t left = derivative_ ? problem_.L - first_query - kQueries : problem_.S - first_key - keys_;
    const int64_t most = derivative_ ? kQueries : keys_, next = left < most ? left : most;
    if (next <= 0) return;
    const int64_t rows = derivative_ ? next : queries, columns = derivative_ ? keys : next;
    ahead.add(here + (derivative_ ? kQueries * x.query : keys_ * x.key), x.query, x.query ? rows : 1, x.key ? columns : 1);
  }

  // The mask of the block's first query, and a row of it as bits.
  const uint8_t* mask_row() const {
    const Scores& mask = problem_.mask;
    return (const uint8_t*)mask.data + batch_ * mask.batch + head_ * mask.head + first_query * mask.query +
           first_key * mask.key;
  }
  void read_mask(const uint8_t* row, uint32_t* bits) const {
    for (int w = 0; w * kStrip < keys; ++w) {
      const int64_t count = keys - w * kStrip < kStrip ? keys - w * kStrip : kStrip;
      bits[w] = problem_.mask.key ? nonzero_bits(row + w * kStrip, count) : *row ? bits_below(count) : 0;
    }
  }

  int64_t bias_slots() const {
    const AttentionProblem& p = problem_;
    if (!p.bias.data) return 0;
    const int64_t count = (p.L + kQueries - 1) / kQueries * ((p.S + keys_ - 1) / keys_);
    const bool shared = (p.bias.batch == 0 && p.batch > 1) || (p.bias.head == 0 && p.heads > 1);
    return shared && count * keys_ * kQueries <= kBiasElements ? count : 1;
  }

  // Reads the bias of the block, unless it is at hand; false if it is -inf everywhere.
  bool load_bias() {
    const Scores& bias = problem_.bias;
    const int64_t row = first_query / kQueries * ((problem_.S + keys_ - 1) / keys_);
    const int64_t slot = (row + first_key / keys_) % slots_;
    const int64_t at = batch_ * bias.batch + head_ * bias.head + first_query * bias.query + first_key * bias.key;
    BiasBlock& block = bias_blocks_[slot];
    C* const values = bias_ + slot * keys_ * kQueries;
    bias_here_ = values;
    if (block.at == at && block.queries == queries && block.keys == keys) return block.shows;
    load_scores<T>(bias, batch_, head_, first_query, queries, first_key, keys, values);
    if (bias.dtype == DType::f32 && sizeof(C) == sizeof(float))
      fetch_next(bias, (const C*)bias.data + at);
    else
      fetch_next(bias, (const T*)bias.data + at);
    bool shows = false;
    for (int64_t key = 0; key < keys && !shows; ++key)
      for (int v = 0; v * n < queries; ++v) {
        const Ints<C> seen = load(values + key * kQueries + v * n) != -INFINITY;
        for (int i = 0; i < n; ++i) shows |= seen[i] != 0;
      }
    block = {at, queries, keys, shows};
    return shows;
  }

  void draw() {
    const AttentionProblem& p = problem_;
    uint32_t words[kWords + kKeepStride];
    for (int64_t q = 0; q < kQueries; ++q) {
      const uint64_t row = (batch_ * p.heads + head_) * p.L + first_query + q;
      if (q < queries) draw_keep_bits(p.dropout, row, (uint32_t)(first_key / 8), keep_words(keys), words);
      for (int w = 0; w < kWords; ++w) kept_[w * kQueries + q] = q < queries && w * kStrip < keys ? (Word)words[w] : 0;
    }
  }

  // Scales, caps and adds the bias, if `whole`; hides what the mask hides.
  void finish(const Strip& strip, bool whole) {
    with_flag(strip.masked, [&](auto masked) {
      if (problem_.softcap != 0) {
        cap(strip);
        finish<masked.value>(strip, 1);
      } else {
        finish<masked.value>(strip, whole ? (C)problem_.scale : 1);
      }
    });
  }

  template <bool masked>
  void finish(const Strip& strip, C scale) {
    const C* const bias = bias_here_;
    with_flag(bias, [&](auto biased) {
      for_groups(strip.first, strip.last, [&](auto group, int v) {
        constexpr int V = group.value;
        Ints<C> visible[V];
        for (int i = 0; masked && i < V; ++i) visible[i] = words(strip.begin / kStrip, v + i);
        for (int key = strip.begin; key < strip.end; ++key) {
          const Ints<C> bit = Ints<C>{} + (Word)(1u << (key - strip.begin));
          for (int i = 0; i < V; ++i) {
            const int64_t at = key * kQueries + (v + i) * n;
            Vec<C> s = load(scores + at) * scale;
            if (biased.value) s += load(bias + at);
            store(scores + at, masked ? select_bit<C>(visible[i], bit, s, splat<C>(-INFINITY)) : s);
          }
        }
      });
    });
  }

  // Scores to softcap tanh(scale / softcap scores).
  void cap(const Strip& strip) {
    const C cap = (C)problem_.softcap, per_cap = (C)(problem_.scale / problem_.softcap);
    for (int key = strip.begin; key < strip.end; ++key)
      for (int v = strip.first; v < strip.last; ++v) {
        const int64_t at = key * kQueries + v * n;
        const Vec<C> t = tanh(load(scores + at) * per_cap);
        store(scores + at, t * cap);
        if (derivative_) store(slopes + at, 1 - t * t);
      }
  }
};

}  // namespace FT_LEVEL
}  // namespace ft
