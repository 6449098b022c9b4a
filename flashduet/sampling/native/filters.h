// Top-k, top-p and min-p as prefixes of the order of logits: flashduet/sampling/nucleus.py's rule.
//
// Sums of masses are sums of integers, so they are exact whatever they are added up in.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "row.h"

namespace flashduet {

// As flashduet/sampling/machine.py packs them: all of 8 bytes.
struct Rule {
  std::int64_t rows;
  std::uint64_t first_position;
  std::uint64_t seed;
  std::uint64_t choice;
  double temperature;     // 0: greedy
  double top_p;           // 1: all
  std::int64_t top_k;     // 0: all
  double least_distance;  // ln min_p
};

// The end of a prefix: kept are logits above `value`, and those equal to it in columns before `end`.
struct Cut {
  float value;
  std::int64_t end;

  bool keeps(float other, std::int64_t column) const {
    return other > value || (other == value && column < end);
  }
};

// Least integer not below top_p * total, exactly, for top_p in (0, 1).
inline std::int64_t mass_limit(double top_p, std::int64_t total) {
  const std::int64_t bits = std::bit_cast<std::int64_t>(top_p);
  const std::int64_t exponent = bits >> 52;
  const std::int64_t fraction = bits & kMantissa;
  const std::int64_t significand = exponent ? fraction | (kMantissa + 1) : fraction;
  // top_p = significand / 2^shift
  const std::int64_t shift = 1075 - (exponent ? exponent : 1);
  const auto product = static_cast<unsigned __int128>(significand) * static_cast<std::uint64_t>(total);
  if (shift >= 127) {
    return product > 0;
  }
  const auto unit = static_cast<unsigned __int128>(1) << shift;
  return static_cast<std::int64_t>((product + unit - 1) >> shift);
}

// Whether top-p keeps a token. Groups that hold a token before it are summed, of the others bounds
// are known; where those leave it open, everything is summed.
template <class Cell>
bool nucleus_holds(Row<Cell>& row, std::int64_t column, double top_p) {
  const float value = row.value(column);
  const std::int64_t groups = row.columns.groups;
  Sums sums;
  std::int64_t least = 0, most = 0;
  for (std::int64_t group = 0; group < groups; ++group) {
    if (row.maximum(group) >= value) {
      const Sums some = row.masses(group, value, column);
      sums.before += some.before;
      sums.total += some.total;
    } else {
      const std::int64_t largest = row.largest_mass(group);
      least += largest;
      most += largest * (row.columns.begin(group + 1) - row.columns.begin(group));
    }
  }
  if (sums.before < mass_limit(top_p, sums.total + least)) {
    return true;
  }
  if (sums.before >= mass_limit(top_p, sums.total + most)) {
    return false;
  }
  return sums.before < mass_limit(top_p, row.total_mass());
}

// Where top-k, and top-p within it, end; 0 < top_k < columns.
template <class Cell>
Cut top_k_cut(Row<Cell>& row, const Rule& rule) {
  const Columns& columns = row.columns;
  float least = kLowest;
  if (rule.top_k < columns.groups) {
    // So many best groups hold a token each at or above the least of their maxima.
    std::vector<float> maxima = row.scratch().maxima;
    const auto place = maxima.begin() + (rule.top_k - 1);
    std::nth_element(maxima.begin(), place, maxima.end(), std::greater<>());
    least = *place;
  }
  auto& picked = row.scratch().picked_columns;
  picked.clear();
  for (std::int64_t group = 0; group < columns.groups; ++group) {
    if (row.maximum(group) < least || row.maximum(group) == kLowest) {
      continue;
    }
    for (std::int64_t i = columns.begin(group); i < columns.begin(group + 1); ++i) {
      if (row.value(i) >= least && row.value(i) > kLowest) {
        picked.push_back(i);
      }
    }
  }
  const auto first = [&row](std::int64_t a, std::int64_t b) {
    const float one = row.value(a), other = row.value(b);
    return one > other || (one == other && a < b);
  };
  const auto count = std::min<std::int64_t>(rule.top_k, std::ssize(picked));
  std::int64_t last = count - 1;
  if (rule.top_p < 1) {
    std::partial_sort(picked.begin(), picked.begin() + count, picked.end(), first);
    std::int64_t total = 0, before = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      total += mass_of(row.distance_of(row.value(picked[i])));
    }
    const std::int64_t limit = mass_limit(rule.top_p, total);
    last = -1;
    while (last + 1 < count && before < limit) {
      before += mass_of(row.distance_of(row.value(picked[++last])));
    }
  } else {
    std::nth_element(picked.begin(), picked.begin() + last, picked.end(), first);
  }
  return {row.value(picked[last]), picked[last] + 1};
}

}  // namespace flashduet
