// A row of logits in groups of token ids, float32 or bfloat16, and the masses of its tokens.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "elementary.h"
#include "noise.h"

namespace flashduet {

constexpr double kMassUnits = 0x1p40;
// Below it a division could leave float's range, and the best token has all the mass anyway.
constexpr double kLeastTemperature = 1e-6;
// Cells whose masses are summed in float before they are added to others.
constexpr std::int64_t kSpan = 1024;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Which token ids the columns of a row are, ascending, and where each group's begin.
struct Columns {
  std::int64_t count;
  std::int64_t groups;
  const std::int64_t* ids;     // [count]; null: column i is token i
  const std::int64_t* starts;  // [groups + 1], with `ids`

  std::int64_t id(std::int64_t column) const { return ids ? ids[column] : column; }

  std::int64_t begin(std::int64_t group) const {
    return ids ? starts[group] : std::min(group * kGroup, count);
  }

  // The column of a token id of the group, or -1.
  std::int64_t find(std::int64_t group, std::int64_t token_id) const {
    if (!ids) {
      return token_id < count ? token_id : -1;
    }
    const std::int64_t* end = ids + starts[group + 1];
    const std::int64_t* found = std::lower_bound(ids + starts[group], end, token_id);
    return found != end && *found == token_id ? found - ids : -1;
  }
};

inline std::int32_t bits_of(float cell) {
  return std::bit_cast<std::int32_t>(cell);
}

// bfloat16 is the upper half of a float32.
inline std::int32_t bits_of(std::uint16_t cell) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(cell) << 16);
}

// Numbers as integers of the same order, both zeros as 0; and back. Its own inverse.
inline std::int32_t ordered(std::int32_t bits) {
  return bits < 0 ? static_cast<std::int32_t>(0x80000000u - static_cast<std::uint32_t>(bits))
                  : bits;
}

// Probability mass relative to the row's best token, in units of 2^-40, as nucleus.py has it.
inline std::int64_t mass_of(double distance) {
  const double held = distance > -64.0 ? distance : -64.0;
  return static_cast<std::int64_t>(std::rint(exp_of(held) * kMassUnits));
}

// What distances of a row are taken from, and in units of.
struct Scale {
  double largest;
  double temperature;

  double distance(float value) const {
    return (static_cast<double>(value) - largest) / temperature;
  }
};

struct Sums {
  std::int64_t before = 0;
  std::int64_t total = 0;
};

// Masses of some cells: all, and of those above `value`, or equal to it too.
template <bool kOrEqual, class Cell>
Sums sum_masses(const Cell* cells, std::int64_t count, Scale scale, float value) {
  Sums sums;
  for (std::int64_t i = 0; i < count; ++i) {
    const float own = std::bit_cast<float>(bits_of(cells[i]));
    const std::int64_t mass = mass_of(scale.distance(own));
    sums.total += mass;
    sums.before += (kOrEqual ? own >= value : own > value) ? mass : 0;
  }
  return sums;
}

template <class Cell>
std::int64_t sum_masses(const Cell* cells, std::int64_t count, Scale scale) {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += mass_of(scale.distance(std::bit_cast<float>(bits_of(cells[i]))));
  }
  return sum;
}

// 2 to the power of x <= 0 to some 1e-7, or next to nothing.
inline float nearly_exp2(float x) {
  const float held = x > -126.0f ? x : -126.0f;
  // Adding it leaves the nearest whole number in the lowest bits.
  const float shift = 12582912.0f;
  const float shifted = held + shift;
  const float part = (held - (shifted - shift)) * 0.69314718f;
  // Taylor's series of exp, |part| <= 0.35.
  float power = part * (1.0f / 720) + 1.0f / 120;
  power = power * part + 1.0f / 24;
  power = power * part + 1.0f / 6;
  power = power * part + 0.5f;
  power = power * part + 1.0f;
  power = power * part + 1.0f;
  const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(shifted) << 23) + (127u << 23);
  return power * std::bit_cast<float>(exponent);
}

// Sum of masses in units of the best token's, within 1e-5: for what decides nothing.
template <class Cell>
double nearly_sum_masses(const Cell* cells, std::int64_t count, Scale scale) {
  const auto largest = static_cast<float>(scale.largest);
  const auto factor = static_cast<float>(kLog2E / std::max(scale.temperature, kLeastTemperature));
  double sum = 0;
  for (std::int64_t begin = 0; begin < count; begin += kSpan) {
    const Cell* from = cells + begin;
    const std::int64_t span = std::min(kSpan, count - begin);
    float some = 0;
#pragma omp simd reduction(+ : some)
    for (std::int64_t i = 0; i < span; ++i) {
      some += nearly_exp2((std::bit_cast<float>(bits_of(from[i])) - largest) * factor);
    }
    sum += some;
  }
  return sum;
}

// Least and largest of some cells as `ordered` integers.
struct Range {
  std::int32_t least;
  std::int32_t most;
};

template <class Cell>
Range range_of(const Cell* cells, std::int64_t count) {
  Range range{std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t value = ordered(bits_of(cells[i]));
    range.most = value > range.most ? value : range.most;
    range.least = value < range.least ? value : range.least;
  }
  return range;
}

// What rows are worked on in; one is enough, row after row.
struct Scratch {
  std::vector<float> maxima;       // [groups]
  std::vector<double> distances;   // [groups], of the maxima
  std::vector<double> noise;       // [groups], the largest in each
  std::vector<std::int64_t> masses;
  std::vector<double> picked_masses;
  std::vector<std::int64_t> picked_columns;
};

template <class Cell>
class Row {
 public:
  Row(const Cell* cells, const Columns& columns, Scratch& scratch)
      : columns(columns), cells_(cells), scratch_(scratch) {
    scratch.maxima.resize(columns.groups);
    const std::int32_t lowest = ordered(bits_of(kLowest));
    Range row{lowest, lowest};
    for (std::int64_t group = 0; group < columns.groups; ++group) {
      const std::int64_t begin = columns.begin(group), count = columns.begin(group + 1) - begin;
      const Range some = range_of(cells + begin, count);
      // A group without columns has the least of numbers.
      const std::int32_t most = std::max(some.most, lowest);
      scratch.maxima[group] = std::bit_cast<float>(ordered(most));
      row.least = std::min(row.least, some.least);
      row.most = std::max(row.most, most);
    }
    scale_ = {std::bit_cast<float>(ordered(row.most)), 1.0};
    // NaN is beyond an infinity, whichever its sign.
    sound_ = std::isfinite(scale_.largest) && row.least >= lowest;
  }

  const Columns& columns;

  // Whether a token can be chosen: no NaN, no +inf, and not -inf everywhere.
  bool sound() const { return sound_; }

  // First column of the largest logit.
  std::int64_t favourite() const {
    std::int64_t group = 0;
    while (maximum(group) != scale_.largest) {
      ++group;
    }
    std::int64_t column = columns.begin(group);
    while (value(column) != scale_.largest) {
      ++column;
    }
    return column;
  }

  float value(std::int64_t column) const { return std::bit_cast<float>(bits_of(cells_[column])); }

  float maximum(std::int64_t group) const { return scratch_.maxima[group]; }

  // From here on distances are in units of it; above 0.
  void set_temperature(double temperature) {
    scale_.temperature = temperature;
    scratch_.distances.resize(columns.groups);
    scratch_.masses.clear();
    for (std::int64_t group = 0; group < columns.groups; ++group) {
      scratch_.distances[group] = distance_of(scratch_.maxima[group]);
    }
  }

  double distance_of(float value) const { return scale_.distance(value); }

  // Of a group's largest logit.
  double distance(std::int64_t group) const { return scratch_.distances[group]; }

  // That of a group's likeliest token; all of them once the first is asked for.
  std::int64_t largest_mass(std::int64_t group) {
    auto& masses = scratch_.masses;
    if (masses.empty()) {
      masses.resize(columns.groups);
      for (std::int64_t i = 0; i < columns.groups; ++i) {
        masses[i] = mass_of(scratch_.distances[i]);
      }
    }
    return masses[group];
  }

  // Masses of a group: all, and of logits above `value` or equal to it in columns before `column`.
  Sums masses(std::int64_t group, float value, std::int64_t column) const {
    const std::int64_t begin = columns.begin(group), end = columns.begin(group + 1);
    const std::int64_t tied = std::clamp(column, begin, end);
    const Sums first = sum_masses<true>(cells_ + begin, tied - begin, scale_, value);
    const Sums second = sum_masses<false>(cells_ + tied, end - tied, scale_, value);
    return {first.before + second.before, first.total + second.total};
  }

  // Of the whole row, exactly.
  std::int64_t total_mass() const { return sum_masses(cells_, columns.count, scale_); }

  // Of the whole row in units of the best token's, for what decides nothing.
  double nearly_total_mass() const { return nearly_sum_masses(cells_, columns.count, scale_); }

  Scratch& scratch() const { return scratch_; }

 private:
  const Cell* cells_;
  Scratch& scratch_;
  Scale scale_;
  bool sound_;
};

}  // namespace flashduet
