// Vectors of floats as the compiler knows them for any processor, and the functions of attention.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace flashduet {

// A block of a product is kTileRows rows by kTileVectors vectors: what the registers hold.
constexpr int kTileRows = 4;
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileVectors = 4;
#else
constexpr int kLanes = 8;
constexpr int kTileVectors = 2;
#endif

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(float))));
using BitLanes = std::uint32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline int round_up(int number, int unit) {
  return (number + unit - 1) / unit * unit;
}

inline Lanes spread(float number) {
  return number - Lanes{};
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, Lanes lanes) {
  std::memcpy(to, &lanes, sizeof lanes);
}

inline IntLanes count_up(int first) {
  IntLanes lanes;
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = first + i;
  }
  return lanes;
}

inline float largest(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(lanes));
#else
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) {
    most = lanes[i] > most ? lanes[i] : most;
  }
  return most;
#endif
}

inline float sum(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(lanes));
#else
  float all = lanes[0];
  for (int i = 1; i < kLanes; ++i) {
    all += lanes[i];
  }
  return all;
#endif
}

// 2 to the power of x <= 126, to some 1e-7; exactly 0 from -126 down, and NaN of NaN.
inline Lanes exp2(Lanes x) {
  // Adding it leaves the nearest whole number in the lowest bits.
  const float shift = 12582912.0f;
  const Lanes shifted = x + shift;
  const Lanes part = x - (shifted - shift);
  // Taylor's series of exp(part * ln 2), |part| <= 1/2.
  Lanes power = part * 1.5403530e-4f + 1.3333558e-3f;
  power = power * part + 9.6181291e-3f;
  power = power * part + 5.5504109e-2f;
  power = power * part + 2.4022651e-1f;
  power = power * part + 6.9314718e-1f;
  power = power * part + 1.0f;
  const BitLanes exponent = (reinterpret_cast<BitLanes>(shifted) << 23) + (127u << 23);
  const Lanes result = power * reinterpret_cast<Lanes>(exponent);
  return x < -126.0f ? Lanes{} : result;
}

inline Lanes tanh(Lanes x) {
  // 1 to the last bit from 30 on.
  x = x > 30.0f ? spread(30.0f) : x;
  x = x < -30.0f ? spread(-30.0f) : x;
  return 1.0f - 2.0f / (exp2(x * 2.8853900818f) + 1.0f);
}

}  // namespace flashduet
