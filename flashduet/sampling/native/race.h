// The race of a row's tokens, as flashduet/sampling/race.py states it: the same winner, since what
// is left out cannot win and what decides is computed by the same operations.
#pragma once

#include <cstdint>
#include <limits>

#include "filters.h"
#include "noise.h"
#include "row.h"

namespace flashduet {

// Far more than a bound is off by rounding, far less than matters for speed.
constexpr double kSlack = 1e-9;

template <class Cell>
class Race {
 public:
  // The row has the rule's temperature, above 0.
  Race(Row<Cell>& row, const Rule& rule, std::uint64_t key)
      : row_(row), rule_(rule), key_(key), noise_(row.scratch().noise) {
    const std::int64_t groups = row.columns.groups;
    noise_.resize(groups);
    for (std::int64_t group = 0; group < groups; ++group) {
      noise_[group] = -log_of(group_minimum(group_bits(key, group)));
    }
    if (cuts_top_k()) {
      cut_ = top_k_cut(row, rule);
    }
    // The most likely token is always kept, and its distance is 0.
    favourite_score_ = -log_of(token_exponential(key, row.columns.id(row.favourite())));
  }

  std::int64_t winner() {
    while (true) {
      const std::int64_t column = run();
      if (rule_.top_p >= 1 || cuts_top_k() || nucleus_holds(row_, column, rule_.top_p)) {
        return column;
      }
      // All that top-p keeps come before the loser.
      cut_ = {row_.value(column), column};
    }
  }

  bool cuts_top_k() const { return 0 < rule_.top_k && rule_.top_k < row_.columns.count; }

  // What top-k, and top-p within it, leave.
  const Cut& cut() const { return cut_; }

 private:
  bool allows(float value, double distance, std::int64_t column) const {
    return cut_.keeps(value, column) && distance >= rule_.least_distance;
  }

  bool can_win(std::int64_t group, double best) const {
    return row_.distance(group) + noise_[group] + kSlack >= best &&
           row_.maximum(group) >= cut_.value && row_.distance(group) >= rule_.least_distance;
  }

  std::int64_t run() const {
    const Columns& columns = row_.columns;
    double best = favourite_score_ - kSlack;
    for (std::int64_t group = 0; group < columns.groups; ++group) {
      if (!can_win(group, best)) {
        continue;
      }
      const std::int64_t column =
          columns.find(group, leader_of(group, group_bits(key_, group)));
      if (column < 0) {
        continue;
      }
      const float value = row_.value(column);
      const double distance = row_.distance_of(value);
      if (allows(value, distance, column)) {
        best = std::max(best, distance + noise_[group] - kSlack);
      }
    }
    std::int64_t winner = -1;
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t group = 0; group < columns.groups; ++group) {
      if (!can_win(group, best)) {
        continue;
      }
      for (std::int64_t i = columns.begin(group); i < columns.begin(group + 1); ++i) {
        const float value = row_.value(i);
        const double distance = row_.distance_of(value);
        if (distance + noise_[group] + kSlack < best || !allows(value, distance, i)) {
          continue;
        }
        const double score = distance - log_of(token_exponential(key_, columns.id(i)));
        // Columns ascend: the first of equal scores is the lowest id.
        if (score > highest) {
          highest = score;
          winner = i;
          best = std::max(best, score - kSlack);
        }
      }
    }
    return winner;
  }

  Row<Cell>& row_;
  const Rule& rule_;
  const std::uint64_t key_;
  std::vector<double>& noise_;
  Cut cut_{kLowest, std::numeric_limits<std::int64_t>::max()};
  double favourite_score_;
};

}  // namespace flashduet
