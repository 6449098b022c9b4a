// y[rows][out] = x[rows][in] W[out][in]^T in bfloat16, summed in float: weights read once, as fast as
// memory gives them.
//
// Weights lie as they are read: [out / 32][in / 2][32][2], so that a vector holds a pair of
// neighbouring inputs for each of 16 outputs. Each output is summed over the inputs in order, alone:
// what a row gives does not depend on how many rows there are.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace flashduet {

constexpr int kOutputs = 32;   // of a block of weights, two vectors
constexpr int kProductRows = 8;   // at a time: 16 sums in registers
constexpr int kAhead = 2048;   // bytes of weights asked for before they are needed

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

// `x` and `pairs` in pairs of inputs; `weights` is one block, `to` its first output of row 0.
template <int kRows>
void multiply_block(
    const std::uint32_t* x, std::int64_t pairs, const char* weights, std::uint16_t* to,
    std::int64_t out) {
  __m512 sums[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  }
  for (std::int64_t k = 0; k < pairs; ++k, weights += 128) {
    // Used once a pass, so the rest of the caches need not make room for them.
    _mm_prefetch(weights + kAhead, _MM_HINT_NTA);
    _mm_prefetch(weights + kAhead + 64, _MM_HINT_NTA);
    const auto low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights));
    const auto high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + 64));
    for (int r = 0; r < kRows; ++r) {
      const auto pair =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[r * pairs + k])));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, pair);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, pair);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(sums[r][1], sums[r][0]));
    _mm512_storeu_si512(to + r * out, both);
  }
}

inline void multiply_rows(
    const std::uint32_t* x, std::int64_t rows, std::int64_t pairs, const char* weights,
    std::uint16_t* to, std::int64_t out) {
  while (rows > 0) {
    const int some = static_cast<int>(std::min<std::int64_t>(rows, kProductRows));
    switch (some) {
      case 1: multiply_block<1>(x, pairs, weights, to, out); break;
      case 2: multiply_block<2>(x, pairs, weights, to, out); break;
      case 3: multiply_block<3>(x, pairs, weights, to, out); break;
      case 4: multiply_block<4>(x, pairs, weights, to, out); break;
      case 5: multiply_block<5>(x, pairs, weights, to, out); break;
      case 6: multiply_block<6>(x, pairs, weights, to, out); break;
      case 7: multiply_block<7>(x, pairs, weights, to, out); break;
      default: multiply_block<8>(x, pairs, weights, to, out);
    }
    x += some * pairs;
    to += some * out;
    rows -= some;
  }
}

// The blocks first..last-1 of the weights; `in` is even, `out` a multiple of kOutputs.
inline void multiply_blocks(
    const void* x, std::int64_t rows, std::int64_t in, const void* weights, void* to,
    std::int64_t out, std::int64_t first, std::int64_t last) {
  const std::int64_t pairs = in / 2;
  for (std::int64_t block = first; block < last; ++block) {
    multiply_rows(
        static_cast<const std::uint32_t*>(x), rows, pairs,
        static_cast<const char*>(weights) + block * pairs * 128,
        static_cast<std::uint16_t*>(to) + block * kOutputs, out);
  }
}

// All blocks, shared out to so many threads of OpenMP.
inline void multiply_weights(
    const void* x, std::int64_t rows, std::int64_t in, const void* weights, void* to,
    std::int64_t out, int threads) {
  const std::int64_t blocks = out / kOutputs;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    multiply_blocks(
        x, rows, in, weights, to, out, blocks * thread / threads, blocks * (thread + 1) / threads);
  }
}

#endif

}  // namespace flashduet
