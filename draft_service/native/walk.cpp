// DFlash 2's walk over the candidates of each slot (draft_service/selector.py says what it chooses),
// in one call: of a block's few slots each operator of PyTorch's takes longer than the arithmetic.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../flashduet/sampling/native/noise.h"

namespace {

using Cell = std::uint16_t;  // bfloat16

constexpr std::int64_t kStretch = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline float widened(Cell cell) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(cell) << 16);
}

struct Candidate {
  float logit;
  std::int64_t id;
  double noise;
  double score;  // what it is sought by

  // Better ones first; of equals the lower id.
  bool operator<(const Candidate& other) const {
    return score != other.score ? score > other.score : id < other.id;
  }
};

// What is the same for all blocks.
struct Drafter {
  const std::int64_t* ids;  // of the columns; null: a column is its token
  std::int64_t columns;
  std::int64_t rank;
  const Cell* predecessors;
  const Cell* successors;
  std::int64_t most;    // candidates of a slot
  std::int64_t sought;  // of how many they are chosen with noise

  std::int64_t token(std::int64_t column) const { return ids ? ids[column] : column; }
};

// Must be as `_BLOCK` of native_walk.py packs it.
struct Block {
  std::int64_t slots;
  std::int64_t anchor;
  std::uint64_t seed;
  std::uint64_t choice;
  std::uint64_t position;  // of the first slot
  double temperature;      // 0: greedy
};

void keep_best(std::size_t most, std::vector<Candidate>& found) {
  if (found.size() > most) {
    const auto worst = found.begin() + static_cast<std::ptrdiff_t>(most) - 1;
    std::nth_element(found.begin(), worst, found.end());
    found.resize(most);
  }
}

// The best by logit, in any order. As many again are collected before the worse half is dropped.
void seek(const Drafter& drafter, const Cell* row, std::size_t most, std::vector<Candidate>& found) {
  found.clear();
  float least = kLowest;
  for (std::int64_t first = 0; first < drafter.columns; first += kStretch) {
    const std::int64_t end = std::min(first + kStretch, drafter.columns);
    float best = kLowest;
#pragma omp simd reduction(max : best)
    for (std::int64_t column = first; column < end; ++column) {
      best = std::max(best, widened(row[column]));
    }
    if (!(best > least) && found.size() >= most) {
      continue;
    }
    for (std::int64_t column = first; column < end; ++column) {
      const float logit = widened(row[column]);
      if (!(logit > least) && found.size() >= most) {
        continue;
      }
      found.push_back({logit, drafter.token(column), 0.0, logit});
      if (found.size() == 2 * most) {
        keep_best(most, found);
        least = found.back().logit;
      }
    }
  }
  keep_best(most, found);
}

// Keeps the best `most` with noise, and among them what would be drafted without a selector.
void add_noise(
    const Drafter& drafter, const Block& block, std::uint64_t position, const Candidate& winner,
    std::vector<Candidate>& found) {
  const bool has_winner = std::any_of(
      found.begin(), found.end(), [&](const Candidate& each) { return each.id == winner.id; });
  if (!has_winner) {
    found.push_back(winner);
  }
  const std::uint64_t key = flashduet::row_key(block.seed, block.choice, position);
  for (Candidate& each : found) {
    each.noise = -flashduet::log_of(flashduet::token_exponential(key, each.id));
    each.score = each.logit / block.temperature + each.noise;
    if (each.id == winner.id) {
      each.score = std::numeric_limits<double>::infinity();
    }
  }
  const auto kept = std::min<std::size_t>(found.size(), static_cast<std::size_t>(drafter.most));
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(kept), found.end());
  found.resize(kept);
}

}  // namespace

// logits [n, columns] and projected [n, rank] of all slots, block after block; winners [n]: columns
// chosen without a selector. Writes tokens and their probabilities among their candidates.
extern "C" void flashduet_walk(
    const Drafter* drafter, const Block* blocks, std::int64_t count, const Cell* logits,
    const float* projected, const std::int64_t* winners, std::int64_t* tokens, float* confidence) {
  std::vector<Candidate> found;
  std::vector<float> query(static_cast<std::size_t>(drafter->rank));
  for (const Block* block = blocks; block != blocks + count; ++block) {
    std::int64_t previous = block->anchor;
    const bool greedy = block->temperature == 0;
    const double temperature = greedy ? 1.0 : block->temperature;
    for (std::int64_t slot = 0; slot < block->slots; ++slot) {
      const std::int64_t sought = greedy ? drafter->most : drafter->sought;
      seek(*drafter, logits, static_cast<std::size_t>(std::min(sought, drafter->columns)), found);
      if (!greedy) {
        const Candidate winner{widened(logits[*winners]), drafter->token(*winners), 0.0, 0.0};
        add_noise(*drafter, *block, block->position + static_cast<std::uint64_t>(slot), winner, found);
      }
      const Cell* before = drafter->predecessors + previous * drafter->rank;
      for (std::int64_t i = 0; i < drafter->rank; ++i) {
        query[static_cast<std::size_t>(i)] = widened(before[i]) * projected[i];
      }
      const Candidate* best = nullptr;
      double best_score = 0;
      double highest = -std::numeric_limits<double>::infinity();
      for (Candidate& each : found) {
        const Cell* after = drafter->successors + each.id * drafter->rank;
        float pair = 0;
#pragma omp simd reduction(+ : pair)
        for (std::int64_t i = 0; i < drafter->rank; ++i) {
          pair += query[static_cast<std::size_t>(i)] * widened(after[i]);
        }
        each.score = (each.logit + static_cast<double>(pair)) / temperature;
        highest = std::max(highest, each.score);
        const double noisy = each.score + each.noise;
        if (!best || noisy > best_score || (noisy == best_score && each.id < best->id)) {
          best = &each;
          best_score = noisy;
        }
      }
      double sum = 0;
      for (const Candidate& each : found) {
        sum += std::exp(each.score - highest);
      }
      *tokens++ = previous = best->id;
      *confidence++ = static_cast<float>(std::exp(best->score - highest) / sum);
      logits += drafter->columns;
      projected += drafter->rank;
      ++winners;
    }
  }
}
