// Attention of some rows of one sequence, with all query heads of one key head, block by block of
// keys: softmax with a running maximum, everything but the packed operands in float.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "products.h"

namespace flashduet {

// What a query at a position sees: keys up to its own, within the window or chunk where not 0.
struct Rule {
  std::int64_t window = 0;
  std::int64_t chunk = 0;

  std::int64_t first(std::int64_t position) const {
    if (window) {
      return std::max<std::int64_t>(0, position - window + 1);
    }
    return chunk ? position - position % chunk : 0;
  }
};

// Neighbouring positions of one sequence: `rows` of the packed row from `row` on.
struct Span {
  std::int64_t row;
  std::int64_t rows;
  std::int64_t base;
  const std::int64_t* block_ids;
};

// One layer's operands. Strides and sizes in elements.
template <class T>
struct Layer {
  const T* query;  // [heads][n][key_size]
  std::int64_t query_head_stride;
  std::int64_t query_row_stride;
  const T* keys;  // [kv_heads][slots][key_size]
  const T* values;  // [kv_heads][slots][value_size]
  std::int64_t slots;
  std::int64_t block_tokens;
  int heads;
  int group;
  int key_size;
  int value_size;
  Rule rule;
  float scaling;
  float softcap;  // 0 for none
  const float* sinks;  // [heads], or null
  T* output;  // [n][heads][value_size]

  int width() const {
    return round_up(value_size, kLanes);
  }
};

// Rows of a span that are computed together, and the keys that they see.
struct Tile {
  const Span* span;
  int kv_head;
  std::int64_t first_row;  // within the span
  int rows;
  std::int64_t first_key;
  std::int64_t end_key;

  int blocks() const {
    return static_cast<int>((end_key - first_key + kBlockKeys - 1) / kBlockKeys);
  }
};

// Softmax over some of a tile's keys, not yet divided by its sum. Rows are row by row of the tile,
// the group's heads within.
struct State {
  float* most;    // [rows] largest score, times log2(e)
  float* sums;    // [rows][kLanes]
  float* totals;  // [rows][width]

  static std::size_t floats(int rows, int width) {
    return static_cast<std::size_t>(round_up(rows, kLanes)) + rows * (kLanes + width);
  }

  State(float* room, int rows)
      : most(room),
        sums(most + round_up(rows, kLanes)),
        totals(sums + static_cast<std::size_t>(rows) * kLanes) {}
};

constexpr float kLog2e = 1.44269504089f;
// Lower than any score and yet finite: the difference of two is no NaN.
constexpr float kNothing = -1e30f;

// Memory of one thread, kept from call to call.
class Room {
 public:
  float* take(std::size_t floats) {
    if (held_.size() * kLanes < floats) {
      held_.resize((floats + kLanes - 1) / kLanes);
    }
    return reinterpret_cast<float*>(held_.data());
  }

 private:
  std::vector<Lanes> held_;
};

template <class Unit>
class TileAttention {
  using T = typename Unit::Element;
  using Word = typename Unit::Word;
  static_assert(sizeof(Word) == sizeof(float));
  static constexpr int kVectors = kBlockKeys / kLanes;

 public:
  TileAttention(const Layer<T>& layer, const Tile& tile, Room& room)
      : layer_(layer), tile_(tile), rows_(tile.rows * layer.group), width_(layer.width()) {
    depth_ = Unit::words(layer.key_size);
    const std::size_t weights = Unit::words(kBlockKeys), rows = rows_;
    const std::size_t sizes[] = {
        static_cast<std::size_t>(depth_) * kBlockKeys,
        weights * width_,
        rows * kBlockKeys,
        rows * weights,
        static_cast<std::size_t>(round_up(rows_, kLanes)),
        rows * depth_};
    std::size_t all = 0;
    for (std::size_t size : sizes) {
      all += size;
    }
    float* at = room.take(all);
    packed_keys_ = reinterpret_cast<Word*>(at);
    packed_values_ = reinterpret_cast<Word*>(at += sizes[0]);
    scores_ = at += sizes[1];
    weights_ = reinterpret_cast<Word*>(at += sizes[2]);
    kept_ = at += sizes[3];
    queries_ = reinterpret_cast<Word*>(at += sizes[4]);
  }

  // Attend to the blocks first..last-1 of the tile's keys.
  void run(int first, int last, State& state) {
    pack_queries();
    begin(state, first == 0);
    for (int block = first; block < last; ++block) {
      const std::int64_t start = tile_.first_key + static_cast<std::int64_t>(block) * kBlockKeys;
      const int count = static_cast<int>(std::min<std::int64_t>(kBlockKeys, tile_.end_key - start));
      const T* keys[kBlockKeys];
      const T* values[kBlockKeys];
      find(start, count, keys, values);
      Unit::pack_keys(keys, count, layer_.key_size, packed_keys_);
      const int columns = round_up(count, kLanes);
      multiply<Unit>(
          queries_, depth_, rows_, packed_keys_, kBlockKeys, columns, depth_,
          nullptr, scores_, kBlockKeys);
      for (int row = 0; row < rows_; ++row) {
        weigh(row, start, columns / kLanes, state);
      }
      Unit::pack_values(values, count, layer_.value_size, width_, packed_values_);
      multiply<Unit>(
          weights_, Unit::words(kBlockKeys), rows_, packed_values_, width_, width_,
          Unit::words(count), kept_, state.totals, width_);
    }
  }

  // Take in what another run, over other blocks, has found.
  void merge(State& state, const State& other) const {
    for (int row = 0; row < rows_; ++row) {
      const float most = std::max(state.most[row], other.most[row]);
      const Lanes ours = exp2(spread(state.most[row] - most));
      const Lanes theirs = exp2(spread(other.most[row] - most));
      state.most[row] = most;
      add(state.sums + row * kLanes, ours, other.sums + row * kLanes, theirs, kLanes);
      add(state.totals + row * width_, ours, other.totals + row * width_, theirs, width_);
    }
  }

  void finish(const State& state) const {
    for (int row = 0; row < rows_; ++row) {
      const std::int64_t place = tile_.span->row + tile_.first_row + row / layer_.group;
      const int head = tile_.kv_head * layer_.group + row % layer_.group;
      T* output = layer_.output + (place * layer_.heads + head) * layer_.value_size;
      const float* totals = state.totals + row * width_;
      const float factor = 1.0f / sum(load(state.sums + row * kLanes));
      for (int d = 0; d < layer_.value_size; ++d) {
        output[d] = static_cast<T>(totals[d] * factor);
      }
    }
  }

 private:
  void pack_queries() {
    for (int row = 0; row < rows_; ++row) {
      const int head = tile_.kv_head * layer_.group + row % layer_.group;
      const std::int64_t place = tile_.span->row + tile_.first_row + row / layer_.group;
      const T* query = layer_.query + head * layer_.query_head_stride;
      Unit::pack_row(
          query + place * layer_.query_row_stride, layer_.key_size, queries_ + row * depth_);
    }
  }

  // A sink is a key that only counts in the sum; the first blocks' run has it.
  void begin(State& state, bool with_sinks) const {
    std::fill(state.sums, state.sums + rows_ * (kLanes + width_), 0.0f);
    for (int row = 0; row < rows_; ++row) {
      state.most[row] = kNothing;
      if (layer_.sinks && with_sinks) {
        state.most[row] = layer_.sinks[tile_.kv_head * layer_.group + row % layer_.group] * kLog2e;
        state.sums[row * kLanes] = 1.0f;
      }
    }
  }

  // Where the keys and values of `count` positions lie.
  void find(std::int64_t start, int count, const T** keys, const T** values) const {
    const std::int64_t size = layer_.block_tokens, head = tile_.kv_head * layer_.slots;
    std::int64_t block = start / size, offset = start % size;
    for (int k = 0; k < count; ++k) {
      const std::int64_t slot = head + tile_.span->block_ids[block] * size + offset;
      keys[k] = layer_.keys + slot * layer_.key_size;
      values[k] = layer_.values + slot * layer_.value_size;
      if (++offset == size) {
        offset = 0;
        ++block;
      }
    }
  }

  // A row's scores to weights relative to its largest so far.
  void weigh(int row, std::int64_t start, int vectors, State& state) {
    const std::int64_t position = tile_.span->base + tile_.first_row + row / layer_.group;
    const std::int64_t first = layer_.rule.first(position) - start, last = position - start;
    const Lanes hidden = spread(-std::numeric_limits<float>::infinity());
    Lanes scores[kVectors];
    Lanes most = spread(state.most[row]);
    for (int v = 0; v < kVectors; ++v) {
      scores[v] = v < vectors ? adjust(load(scores_ + row * kBlockKeys + v * kLanes)) : hidden;
    }
    if (first > 0 || last < kBlockKeys - 1) {
      const auto from = static_cast<std::int32_t>(std::min<std::int64_t>(first, kBlockKeys));
      const auto to = static_cast<std::int32_t>(std::clamp<std::int64_t>(last, -1, kBlockKeys));
      for (int v = 0; v < kVectors; ++v) {
        const IntLanes keys = count_up(v * kLanes);
        scores[v] = keys < from ? hidden : scores[v];
        scores[v] = keys > to ? hidden : scores[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      most = scores[v] > most ? scores[v] : most;
    }
    const float before = state.most[row], now = largest(most);
    state.most[row] = now;
    kept_[row] = exp2(spread(before - now))[0];
    Lanes sums = load(state.sums + row * kLanes) * kept_[row];
    for (int v = 0; v < kVectors; ++v) {
      scores[v] = exp2(scores[v] - now);
      sums += scores[v];
    }
    store(state.sums + row * kLanes, sums);
    Unit::pack_weights(scores, weights_ + row * Unit::words(kBlockKeys));
  }

  Lanes adjust(Lanes scores) const {
    if (layer_.softcap == 0.0f) {
      return scores * (layer_.scaling * kLog2e);
    }
    return tanh(scores * (layer_.scaling / layer_.softcap)) * (layer_.softcap * kLog2e);
  }

  static void add(float* ours, Lanes factor, const float* theirs, Lanes other, int count) {
    for (int i = 0; i < count; i += kLanes) {
      store(ours + i, load(ours + i) * factor + load(theirs + i) * other);
    }
  }

  const Layer<T>& layer_;
  const Tile& tile_;
  const int rows_;  // with the group's heads
  const int width_;
  int depth_;
  Word* packed_keys_;    // [depth][kBlockKeys]
  Word* packed_values_;  // [words(kBlockKeys)][width]
  float* scores_;        // [rows][kBlockKeys]
  Word* weights_;        // [rows][words(kBlockKeys)]
  float* kept_;          // [rows] what the new largest score leaves of the sums so far
  Word* queries_;        // [rows][depth]
};

}  // namespace flashduet
