// Choosing tokens, for Python: flashduet/sampling/machine.py. Needs nothing of PyTorch.
#include <cstdint>
#include <cstring>
#include <vector>

#include "confidence.h"
#include "filters.h"
#include "noise.h"
#include "race.h"
#include "row.h"

namespace flashduet {
namespace {

// The token of a row, or -1 where its logits are bad; `confidence_to` may be null.
template <class Cell>
std::int64_t choose_row(
    const Cell* cells, const Columns& columns, const Rule& rule, std::uint64_t position,
    Scratch& scratch, double* confidence_to) {
  Row<Cell> row(cells, columns, scratch);
  if (!row.sound()) {
    return -1;
  }
  if (rule.temperature == 0) {
    const std::int64_t column = row.favourite();
    if (confidence_to) {
      *confidence_to = greedy_confidence(row);
    }
    return columns.id(column);
  }
  row.set_temperature(rule.temperature);
  Race<Cell> race(row, rule, row_key(rule.seed, rule.choice, position));
  const std::int64_t column = race.winner();
  if (confidence_to) {
    *confidence_to = confidence(row, rule, race, column);
  }
  return columns.id(column);
}

template <class Cell>
std::int64_t choose(
    const Cell* cells, const Columns& columns, const std::vector<Rule>& rules,
    std::int64_t* tokens, double* confidences) {
  Scratch scratch;
  std::int64_t bad = 0, row = 0;
  for (const Rule& rule : rules) {
    for (std::int64_t i = 0; i < rule.rows; ++i, ++row) {
      tokens[row] = choose_row(
          cells + row * columns.count, columns, rule, rule.first_position + i, scratch,
          confidences ? confidences + row : nullptr);
      bad += tokens[row] < 0;
    }
  }
  return bad;
}

}  // namespace
}  // namespace flashduet

// Cells [rows, columns], bfloat16 or float32, of the blocks' rows one after the other. Columns are
// tokens 0 .. columns - 1, or those of `ids`, ascending below `vocabulary`, whose groups begin at
// `starts`. Writes each row's token, and its confidence if there is room for it. Returns how many
// rows got -1, being bad.
extern "C" std::int64_t flashduet_choose(
    const void* cells, int is_bfloat16, std::int64_t columns, const std::int64_t* ids,
    const std::int64_t* starts, std::int64_t vocabulary, const char* rules, std::int64_t blocks,
    std::int64_t* tokens, double* confidences) {
  using namespace flashduet;
  const Columns of{columns, (vocabulary + kGroup - 1) / kGroup, ids, starts};
  std::vector<Rule> each(blocks);
  std::memcpy(each.data(), rules, blocks * sizeof(Rule));
  if (is_bfloat16) {
    return choose(static_cast<const std::uint16_t*>(cells), of, each, tokens, confidences);
  }
  return choose(static_cast<const float*>(cells), of, each, tokens, confidences);
}

// Noise of some tokens at a position, for a comparison bit by bit.
extern "C" void flashduet_gumbels(
    std::uint64_t seed, std::uint64_t choice, std::uint64_t position, const std::int64_t* ids,
    std::int64_t count, double* to) {
  const std::uint64_t key = flashduet::row_key(seed, choice, position);
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = -flashduet::log_of(flashduet::token_exponential(key, ids[i]));
  }
}
