// log and exp with the bits of flashduet/sampling/elementary.py, which says why and whence: basic
// operations only, in the same order. To be compiled without contraction (-ffp-contract=off).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace flashduet {

// ln 2 in two parts, and 1 / ln 2.
constexpr double kLn2High = 0x1.62e42fee00000p-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kLog2E = 0x1.71547652b82fep+0;

constexpr std::int64_t kBitsSqrtHalf = 0x3FE6A09E00000000;
constexpr std::int64_t kBitsOne = 0x3FF0000000000000;
constexpr std::int64_t kMantissa = 0x000FFFFFFFFFFFFF;

// Of a positive normal number.
inline double log_of(double x) {
  const std::int64_t shifted = std::bit_cast<std::int64_t>(x) + (kBitsOne - kBitsSqrtHalf);
  const auto exponent = static_cast<double>((shifted >> 52) - 1023);
  const auto mantissa = std::bit_cast<double>((shifted & kMantissa) + kBitsSqrtHalf);
  const double f = mantissa - 1.0;
  const double s = f / (f + 2.0);
  const double z = s * s;
  double series = 1.0 / 21;
  series = series * z + 1.0 / 19;
  series = series * z + 1.0 / 17;
  series = series * z + 1.0 / 15;
  series = series * z + 1.0 / 13;
  series = series * z + 1.0 / 11;
  series = series * z + 1.0 / 9;
  series = series * z + 1.0 / 7;
  series = series * z + 1.0 / 5;
  series = series * z + 1.0 / 3;
  series = series * z;
  const double twice = s + s;
  return exponent * kLn2High + (twice + (twice * series + exponent * kLn2Low));
}

// Of x in [-700, 700].
inline double exp_of(double x) {
  const double k = std::rint(x * kLog2E);
  const double r = (x - k * kLn2High) - k * kLn2Low;
  double series = 1.0 / 6227020800.0;
  series = series * r + 1.0 / 479001600.0;
  series = series * r + 1.0 / 39916800.0;
  series = series * r + 1.0 / 3628800.0;
  series = series * r + 1.0 / 362880.0;
  series = series * r + 1.0 / 40320.0;
  series = series * r + 1.0 / 5040.0;
  series = series * r + 1.0 / 720.0;
  series = series * r + 1.0 / 120.0;
  series = series * r + 1.0 / 24.0;
  series = series * r + 1.0 / 6.0;
  series = series * r + 0.5;
  series = series * r + 1.0;
  series = series * r + 1.0;
  return series * std::bit_cast<double>((static_cast<std::int64_t>(k) + 1023) << 52);
}

}  // namespace flashduet
