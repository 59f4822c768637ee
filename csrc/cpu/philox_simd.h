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
constexpr int kKeepStride = 4;  // words done together

inline void keep_step(const Dropout& d, uint64_t row, uint32_t block, uint32_t* words) {
  const __m512i multipliers = _mm512_set4_epi32(0, kPhiloxM1, 0, kPhiloxM0);
  __m512i key = _mm512_set4_epi32(0, (int)(d.seed >> 32), 0, (int)d.seed);
  const __m512i key_step = _mm512_set4_epi32(0, kPhiloxW1, 0, kPhiloxW0);
  __m512i c[kKeepStride];
  for (int i = 0; i < kKeepStride; ++i) {
    const int b = block + 4 * i, lo = (int)row, hi = (int)(row >> 32);
    c[i] = _mm512_setr_epi32(b, lo, hi, 0, b + 1, lo, hi, 0, b + 2, lo, hi, 0, b + 3, lo, hi, 0);
  }
  for (int r = 0; r < kPhiloxRounds; ++r) {
    for (int i = 0; i < kKeepStride; ++i) {
      const __m512i product = _mm512_mul_epu32(c[i], multipliers);
      c[i] =
          _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(product, (_MM_PERM_ENUM)0x1B), _mm512_srli_epi64(c[i], 32), key, 0x96);
    }
    key = _mm512_add_epi32(key, key_step);
  }
  const __m512i last = _mm512_set1_epi16((short)(d.threshold - 1));
  for (int i = 0; i < kKeepStride; ++i) words[i] = _mm512_cmple_epu16_mask(c[i], last);
}
#elif defined(FT_AVX2)
constexpr int kKeepStride = 2;

inline void keep_step(const Dropout& d, uint64_t row, uint32_t block, uint32_t* words) {
  const __m256i multipliers = _mm256_setr_epi32(kPhiloxM0, 0, kPhiloxM1, 0, kPhiloxM0, 0, kPhiloxM1, 0);
  const int s0 = (int)d.seed, s1 = (int)(d.seed >> 32);
  __m256i key = _mm256_setr_epi32(s0, 0, s1, 0, s0, 0, s1, 0);
  const __m256i key_step = _mm256_setr_epi32(kPhiloxW0, 0, kPhiloxW1, 0, kPhiloxW0, 0, kPhiloxW1, 0);
  __m256i c[2 * kKeepStride];
  for (int i = 0; i < 2 * kKeepStride; ++i) {
    const int b = block + 2 * i, lo = (int)row, hi = (int)(row >> 32);
    c[i] = _mm256_setr_epi32(b, lo, hi, 0, b + 1, lo, hi, 0);
  }
  for (int r = 0; r < kPhiloxRounds; ++r) {
    for (int i = 0; i < 2 * kKeepStride; ++i) {
      const __m256i product = _mm256_mul_epu32(c[i], multipliers);
      c[i] = _mm256_xor_si256(_mm256_shuffle_epi32(product, 0x1B), _mm256_xor_si256(_mm256_srli_epi64(c[i], 32), key));
    }
    key = _mm256_add_epi32(key, key_step);
  }
  const __m256i last = _mm256_set1_epi16((short)(d.threshold - 1));
  for (int i = 0; i < kKeepStride; ++i) {
    const __m256i a = _mm256_cmpeq_epi16(_mm256_max_epu16(c[2 * i], last), last);
    const __m256i b = _mm256_cmpeq_epi16(_mm256_max_epu16(c[2 * i + 1], last), last);
    words[i] = _mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8));
  }
}
#else
constexpr int kKeepStride = 1;

inline void keep_step(const Dropout& d, uint64_t row, uint32_t block, uint32_t* words) {
  uint32_t bits = 0;
  for (int b = 0; b < 4; ++b) {
    uint32_t c[4] = {block + b, (uint32_t)row, (uint32_t)(row >> 32), 0};
    philox4x32(c, (uint32_t)d.seed, (uint32_t)(d.seed >> 32));
    for (int i = 0; i < 8; ++i) bits |= (uint32_t)(((c[i / 2] >> (i % 2 * 16)) & 0xFFFF) < d.threshold) << (8 * b + i);
  }
  words[0] = bits;
}
#endif

// The keep bits of a run of one row's columns, drawn once and then read a vector at a time.
struct KeepBits {
  Buffer<uint32_t> words;

  explicit KeepBits(int64_t max_columns) : words(keep_words(max_columns) + kKeepStride) {}

  // Columns [begin, begin + n) of `row`; begin is a multiple of 8, so that the run starts on a block.
  void draw(const Dropout& d, uint64_t row, int64_t begin, int64_t n) {
    for (int64_t w = 0; w < keep_words(n); w += kKeepStride)
      keep_step(d, row, (uint32_t)(begin / 8 + w * (kBitsPerWord / 8)), words + w);
  }
  // Those of the vector of C that starts at column `col` of the run, a multiple of its lanes.
  template <typename C>
  uint32_t at(int64_t col) const {
    return words.data[col / kBitsPerWord] >> (col % kBitsPerWord) & ((1u << kLanes<C>)-1);
  }
};

}  // namespace FT_LEVEL
}  // namespace ft
