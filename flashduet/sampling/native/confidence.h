// How likely a chosen token is under its row's filters, before noise: as confidence.py has it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "filters.h"
#include "race.h"
#include "row.h"

namespace flashduet {

// A nucleus seldom reaches further below the best token.
constexpr double kHead = -8.0;
// Of a token without any mass that counts.
constexpr double kNothing = -700.0;

// Mass of the first tokens, largest masses first, that reach `wanted` together; all if they don't.
inline double mass_that_reaches(std::vector<double>& masses, double wanted) {
  auto low = masses.begin(), high = masses.end();
  double before = 0;
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, std::greater<>());
    const double reached = std::accumulate(low, middle, before);
    if (reached >= wanted) {
      high = middle;
    } else {
      before = reached;
      low = middle;
    }
  }
  return low == high ? before : before + *low;
}

// Masses of the tokens at `least` distance or above, in units of the best token's, as all here.
template <class Cell>
std::vector<double>& masses_from(Row<Cell>& row, double least) {
  auto& masses = row.scratch().picked_masses;
  masses.clear();
  const Columns& columns = row.columns;
  for (std::int64_t group = 0; group < columns.groups; ++group) {
    if (row.distance(group) < least) {
      continue;
    }
    for (std::int64_t i = columns.begin(group); i < columns.begin(group + 1); ++i) {
      const double distance = row.distance_of(row.value(i));
      if (distance >= least) {
        masses.push_back(exp_of(distance));
      }
    }
  }
  return masses;
}

template <class Cell>
double nucleus_mass(Row<Cell>& row, double top_p) {
  const double wanted = top_p * row.nearly_total_mass();
  auto& head = masses_from(row, kHead);
  if (std::accumulate(head.begin(), head.end(), 0.0) >= wanted) {
    return mass_that_reaches(head, wanted);
  }
  return mass_that_reaches(masses_from(row, kNothing), wanted);
}

template <class Cell>
double cut_mass(const Row<Cell>& row, const Cut& cut, double least_distance) {
  double sum = 0;
  const Columns& columns = row.columns;
  for (std::int64_t group = 0; group < columns.groups; ++group) {
    if (row.maximum(group) < cut.value) {
      continue;
    }
    for (std::int64_t i = columns.begin(group); i < columns.begin(group + 1); ++i) {
      const float value = row.value(i);
      const double distance = row.distance_of(value);
      if (cut.keeps(value, i) && distance >= least_distance) {
        sum += exp_of(std::max(distance, kNothing));
      }
    }
  }
  return sum;
}

// Of a row that has won its race.
template <class Cell>
double confidence(Row<Cell>& row, const Rule& rule, const Race<Cell>& race, std::int64_t column) {
  double kept;
  if (race.cuts_top_k()) {
    kept = cut_mass(row, race.cut(), rule.least_distance);
  } else {
    kept = rule.top_p < 1 ? nucleus_mass(row, rule.top_p) : row.nearly_total_mass();
    if (rule.least_distance > kNothing) {
      const auto& likely = masses_from(row, rule.least_distance);
      kept = std::min(kept, std::accumulate(likely.begin(), likely.end(), 0.0));
    }
  }
  return std::min(1.0, exp_of(std::max(row.distance_of(row.value(column)), kNothing)) / kept);
}

// Of a greedy row: that of the plain softmax.
template <class Cell>
double greedy_confidence(const Row<Cell>& row) {
  return 1 / row.nearly_total_mass();
}

}  // namespace flashduet
