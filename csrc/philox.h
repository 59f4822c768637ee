// The one random stream of the package, shared by CPU and CUDA (and restated in reference.py and in Triton, bit for bit).
//
// Generator: Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
// seven is the fewest rounds that the authors found to pass all of TestU01's BigCrush).
// Key: the 64-bit seed, low word first.
// Counter layout: a tensor (..., N) is taken as (rows, N). Element (row, col) owns 16 bits of the block with counter
//     (col / 8, low 32 bits of row, high 32 bits of row, 0),
// namely half col % 8 of its four words, the low half of word 0 first. So a block serves eight neighbours, in memory order.
// Decision: an element is kept iff its 16 bits are below keep_threshold(p); what is kept is scaled by 65536 / threshold,
// exactly the inverse of the probability with which it is kept.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FT_HOST_DEVICE __host__ __device__
#else
#define FT_HOST_DEVICE
#endif

namespace ft {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;  // key increments

// Replaces the counter `c` by its four random words.
FT_HOST_DEVICE inline void philox4x32(uint32_t c[4], uint32_t k0, uint32_t k1, int rounds = kPhiloxRounds) {
  for (int r = 0; r < rounds; ++r) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
}

// How one call drops elements. threshold 0: it does not.
struct Dropout {
  uint64_t seed = 0;
  const int64_t* seed_on_gpu = nullptr;  // CUDA: where the seed lies, so that the host need not wait for it
  uint32_t threshold = 0;
  double scale = 1.0;

  Dropout() = default;
  Dropout(double p, uint64_t seed) : seed(seed) {
    const double keep = nearbyint((1.0 - p) * 65536.0);  // ties to even, as Python's round
    threshold = keep < 1.0 ? 1 : static_cast<uint32_t>(keep);
    scale = 65536.0 / threshold;
  }
  FT_HOST_DEVICE bool on() const { return threshold != 0; }
};

}  // namespace ft
