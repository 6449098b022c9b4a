// All rows' attention in one parallel loop, whatever they are: one long stretch or many sequences.
//
// Tiles lie one after the other, as long as they cost, and each thread takes an equal piece of that
// line, cut between blocks of keys. What a cut parts is merged afterwards.
#pragma once

#include <vector>

#include <ATen/Parallel.h>

#include "tile.h"

namespace flashduet {

// Rows of a tile, the group's heads among them: many share what packing keys and values costs, and
// their scores and totals stay in a core's cache.
constexpr int kMostRows = 96;
// Packing a block of keys and values, in rows that are computed for the same.
constexpr std::int64_t kPackingRows = 8;
// Rows times blocks below which a thread more costs more than it takes over.
constexpr std::int64_t kLeastShare = 24;

struct PlacedTile {
  Tile tile;
  std::int64_t begin;  // where it lies on the line
  std::int64_t cost;   // of each block
};

class Shares {
 public:
  Shares(const std::vector<Span>& spans, int kv_heads, int group, const Rule& rule) {
    const int most = std::max(1, kMostRows / group);
    for (const Span& span : spans) {
      // The head outermost: its keys and values stay in the cache from tile to tile.
      for (int head = 0; head < kv_heads; ++head) {
        for (std::int64_t row = 0; row < span.rows; row += most) {
          const int rows = static_cast<int>(std::min<std::int64_t>(most, span.rows - row));
          const std::int64_t position = span.base + row;
          const Tile tile{&span, head, row, rows, rule.first(position), position + rows};
          const std::int64_t cost = rows * group + kPackingRows;
          tiles_.push_back({tile, all_, cost});
          all_ += cost * tile.blocks();
          largest_ = std::max(largest_, rows * group);
        }
      }
    }
    const std::int64_t worth = 1 + all_ / kLeastShare;
    count_ = static_cast<int>(std::min<std::int64_t>(at::get_num_threads(), worth));
  }

  template <class Unit>
  void run(const Layer<typename Unit::Element>& layer) const {
    const std::size_t floats = round_up(State::floats(largest_, layer.width()), kLanes);
    thread_local Room cut_room;
    // For each share what it has of the tile that it goes on with, and of the one that it leaves.
    float* const cut = count_ > 1 ? cut_room.take(2 * count_ * floats) : nullptr;
    at::parallel_for(0, count_, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t share = from; share < to; ++share) {
        run_share<Unit>(layer, static_cast<int>(share), cut + 2 * share * floats, floats);
      }
    });
    for (const PlacedTile& placed : tiles_) {
      join<Unit>(layer, placed, cut, floats);
    }
  }

 private:
  static int round_up(std::size_t number, int unit) {
    return static_cast<int>((number + unit - 1) / unit * unit);
  }

  // The tile's first block that begins at or after a share's begin.
  int first_block(int share, const PlacedTile& placed) const {
    const std::int64_t begin = all_ * share / count_ - placed.begin;
    const std::int64_t block = begin <= 0 ? 0 : (begin + placed.cost - 1) / placed.cost;
    return static_cast<int>(std::min<std::int64_t>(block, placed.tile.blocks()));
  }

  template <class Unit>
  void run_share(
      const Layer<typename Unit::Element>& layer, int share, float* cut, std::size_t floats) const {
    thread_local Room work_room, state_room;
    for (const PlacedTile& placed : tiles_) {
      const int first = first_block(share, placed), last = first_block(share + 1, placed);
      if (first == last) {
        continue;
      }
      const int rows = placed.tile.rows * layer.group;
      const bool whole = first == 0 && last == placed.tile.blocks();
      State state(whole ? state_room.take(floats) : cut + (first ? 0 : floats), rows);
      TileAttention<Unit> attention(layer, placed.tile, work_room);
      attention.run(first, last, state);
      if (whole) {
        attention.finish(state);
      }
    }
  }

  // Merge what shares have of a tile that is in no single one.
  template <class Unit>
  void join(
      const Layer<typename Unit::Element>& layer, const PlacedTile& placed, float* cut,
      std::size_t floats) const {
    int share = 0;
    while (first_block(share + 1, placed) == 0) {
      ++share;
    }
    const int blocks = placed.tile.blocks();
    if (first_block(share + 1, placed) == blocks) {
      return;
    }
    thread_local Room work_room;
    const int rows = placed.tile.rows * layer.group;
    TileAttention<Unit> attention(layer, placed.tile, work_room);
    State state(cut + (2 * share + 1) * floats, rows);
    while (first_block(share + 1, placed) < blocks) {
      ++share;
      if (first_block(share, placed) < first_block(share + 1, placed)) {
        attention.merge(state, State(cut + 2 * share * floats, rows));
      }
    }
    attention.finish(state);
  }

  std::vector<PlacedTile> tiles_;
  std::int64_t all_ = 0;
  int largest_ = 0;
  int count_ = 1;
};

}  // namespace flashduet
