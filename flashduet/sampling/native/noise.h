// The noise of a position, bit for bit that of flashduet/sampling/noise.py, which explains it.
#pragma once

#include <cstdint>

#include "elementary.h"

namespace flashduet {

constexpr std::int64_t kGroup = 128;

inline std::uint64_t mixed(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15u;

inline std::uint64_t row_key(std::uint64_t seed, std::uint64_t choice, std::uint64_t position) {
  std::uint64_t state = 0x6664206E6F697365u;
  for (const std::uint64_t word : {seed, choice, position}) {
    state = mixed(mixed(state ^ word) + kGamma);
  }
  return state;
}

inline std::uint64_t hashed(std::uint64_t key, std::uint64_t counter) {
  return mixed(mixed(counter * kGamma + key) ^ key);
}

inline std::uint64_t group_bits(std::uint64_t key, std::int64_t group) {
  return hashed(key, static_cast<std::uint64_t>(group) << 1 | 1);
}

inline double exponential(std::uint64_t bits) {
  // Below 2^53, so it is converted exactly, as a signed number too.
  const auto odd = static_cast<std::int64_t>(bits >> 11 | 1);
  return -log_of(static_cast<double>(odd) * 0x1p-53);
}

// Least exponential of a group, from its bits.
inline double group_minimum(std::uint64_t bits) {
  return exponential(bits) * (1.0 / kGroup);
}

inline std::int64_t leader_of(std::int64_t group, std::uint64_t bits) {
  return group * kGroup + static_cast<std::int64_t>(bits % kGroup);
}

// Standard exponential of a token.
inline double token_exponential(std::uint64_t key, std::int64_t token_id) {
  const std::int64_t group = token_id / kGroup;
  const std::uint64_t bits = group_bits(key, group);
  const double minimum = group_minimum(bits);
  if (leader_of(group, bits) == token_id) {
    return minimum;
  }
  return minimum + exponential(hashed(key, static_cast<std::uint64_t>(token_id) << 1));
}

}  // namespace flashduet
