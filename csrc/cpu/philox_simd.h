// The decisions of philox.h for a run of columns of one row, as bits.
//
// A vector register holds whole blocks side by side (four words each), so that one 32x32->64 multiplication of the even
// words does both products of every block, the rest of a round is a shuffle, a shift and an exclusive or, and the 16-bit
// decisions come out in column order. Several registers go round together to hide the latency of the multiplication.
#pragma once

#include "../philox.h"
#include "simd.h"

namespace ft {
namespace FT_LEVEL {

constexpr int kBitsPerWord = 32;

inline int64_t keep_words(int64_t n) { return (n + kBitsPerWord - 1) / kBitsPerWord; }

#if defined(FT_AVX512)
constexpr int kKeepStride = 2;  // words drawn together

inline void draw_keep_bits(const Dropout& d, uint64_t row, uint32_t block, int64_t count, uint32_t* words) {
  const int lo = (int)row, hi = (int)(row >> 32), b = (int)block;
  const __m512i multipliers = _mm512_set4_epi32(0, kPhiloxM1, 0, kPhiloxM0);
  const __m512i first_key = _mm512_set4_epi32(0, (int)(d.seed >> 32), 0, (int)d.seed);
  const __m512i key_step = _mm512_set4_epi32(0, kPhiloxW1, 0, kPhiloxW0), next = _mm512_set4_epi32(0, 0, 0, 4);
  const __m512i last_kept = _mm512_set1_epi16((short)(d.threshold - 1));
  __m512i counter = _mm512_setr_epi32(b, lo, hi, 0, b + 1, lo, hi, 0, b + 2, lo, hi, 0, b + 3, lo, hi, 0);
  for (int64_t word = 0; word < count; word += kKeepStride) {
    __m512i c[kKeepStride], key = first_key;
    for (__m512i& blocks : c) {
      blocks = counter;
      counter = _mm512_add_epi32(counter, next);
    }
    for (int r = 0; r < kPhiloxRounds; ++r) {
      for (__m512i& blocks : c) {
        const __m512i product = _mm512_shuffle_epi32(_mm512_mul_epu32(blocks, multipliers), (_MM_PERM_ENUM)0x1B);
        blocks = _mm512_ternarylogic_epi64(product, _mm512_srli_epi64(blocks, 32), key, 0x96);  // a ^ b ^ c
      }
      key = _mm512_add_epi32(key, key_step);
    }
    for (int i = 0; i < kKeepStride; ++i) words[word + i] = _mm512_cmple_epu16_mask(c[i], last_kept);
  }
}
#elif defined(FT_AVX2)
constexpr int kKeepStride = 2;

inline void draw_keep_bits(const Dropout& d, uint64_t row, uint32_t block, int64_t count, uint32_t* words) {
  const int lo = (int)row, hi = (int)(row >> 32), b = (int)block, s0 = (int)d.seed, s1 = (int)(d.seed >> 32);
  const __m256i multipliers = _mm256_setr_epi32(kPhiloxM0, 0, kPhiloxM1, 0, kPhiloxM0, 0, kPhiloxM1, 0);
  const __m256i first_key = _mm256_setr_epi32(s0, 0, s1, 0, s0, 0, s1, 0), next = _mm256_setr_epi32(2, 0, 0, 0, 2, 0, 0, 0);
  const __m256i key_step = _mm256_setr_epi32(kPhiloxW0, 0, kPhiloxW1, 0, kPhiloxW0, 0, kPhiloxW1, 0);
  const __m256i last_kept = _mm256_set1_epi16((short)(d.threshold - 1));
  __m256i counter = _mm256_setr_epi32(b, lo, hi, 0, b + 1, lo, hi, 0);
  for (int64_t word = 0; word < count; word += kKeepStride) {
    __m256i c[2 * kKeepStride], key = first_key;
    for (__m256i& blocks : c) {
      blocks = counter;
      counter = _mm256_add_epi32(counter, next);
    }
    for (int r = 0; r < kPhiloxRounds; ++r) {
      for (__m256i& blocks : c) {
        const __m256i product = _mm256_shuffle_epi32(_mm256_mul_epu32(blocks, multipliers), 0x1B);
        blocks = _mm256_xor_si256(product, _mm256_xor_si256(_mm256_srli_epi64(blocks, 32), key));
      }
      key = _mm256_add_epi32(key, key_step);
    }
    for (int i = 0; i < kKeepStride; ++i) {
      const __m256i even = _mm256_cmpeq_epi16(_mm256_max_epu16(c[2 * i], last_kept), last_kept);
      const __m256i odd = _mm256_cmpeq_epi16(_mm256_max_epu16(c[2 * i + 1], last_kept), last_kept);
      words[word + i] = _mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(even, odd), 0xD8));
    }
  }
}
#else
constexpr int kKeepStride = 1;

inline void draw_keep_bits(const Dropout& d, uint64_t row, uint32_t block, int64_t count, uint32_t* words) {
  for (int64_t word = 0; word < count; ++word) {
    words[word] = 0;
    for (int b = 0; b < 4; ++b) {
      uint32_t c[4] = {block++, (uint32_t)row, (uint32_t)(row >> 32), 0};
      philox4x32(c, (uint32_t)d.seed, (uint32_t)(d.seed >> 32));
      for (int i = 0; i < 8; ++i) words[word] |= (uint32_t)(((c[i / 2] >> (i % 2 * 16)) & 0xFFFF) < d.threshold) << (8 * b + i);
    }
  }
}
#endif

// The keep bits of a run of one row's columns, drawn once and then read a vector at a time.
struct KeepBits {
  Buffer<uint32_t> words;

  explicit KeepBits(int64_t max_columns) : words(keep_words(max_columns) + kKeepStride) {}

  // Columns [begin, begin + n) of `row`; begin is a multiple of 8, so that the run starts on a block. Null without dropout.
  const uint32_t* draw(const Dropout& d, uint64_t row, int64_t begin, int64_t n) {
    if (!d.on()) return nullptr;
    draw_keep_bits(d, row, (uint32_t)(begin / 8), keep_words(n), words);
    return words;
  }
};

// v scaled where its element is kept, else 0; v starts at column `col` of the run, a multiple of its lanes. Null keeps all.
template <typename C>
inline Vec<C> drop(const uint32_t* keep, int64_t col, C scale, Vec<C> v) {
  if (!keep) return v;
  return select<C>(keep[col / kBitsPerWord] >> (col % kBitsPerWord) & ((1u << kLanes<C>)-1), v * scale);
}

}  // namespace FT_LEVEL
}  // namespace ft
