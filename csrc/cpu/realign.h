#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../common.h"

namespace specdec_fast {

// Columns [start, start + columns) of a row go `shift` columns to the right.
struct Move {
  int64_t row, start, columns, shift;
};

// Moves one head of columns from a row of `from` to a row of `to`, which may be the same; of a move, `row` is unused.
void move_head(const View& from, int64_t from_row, const View& to, int64_t to_row, const Move& move, int64_t head);

// Calls work(cache, move, head) for all of them, in parallel.
template <class Work>
void for_each_head(const std::vector<View>& caches, int64_t num_moves, int64_t columns, const Work& work) {
  // bytes below which another thread costs more than it saves
  constexpr int64_t kGrainBytes = 1 << 16;
  // a unit of work is one head of one move of one cache; first_unit[i] is the first of cache i
  std::vector<int64_t> first_unit{0};
  int64_t bytes = 0;
  for (const View& x : caches) {
    first_unit.push_back(first_unit.back() + x.size[1] * num_moves);
    bytes += x.size[1] * columns * x.size[3] * x.element;
  }
  const int64_t units = first_unit.back();
  if (bytes == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes * units / bytes);
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    size_t cache = std::upper_bound(first_unit.begin(), first_unit.end(), begin) - first_unit.begin() - 1;
    for (int64_t unit = begin; unit < end; ++unit) {
      while (unit >= first_unit[cache + 1]) ++cache;
      const int64_t local = unit - first_unit[cache], heads = caches[cache].size[1];
      work(cache, local / heads, local % heads);
    }
  });
}

// Applies every move to every view `[B, H, C, D]`, in place.
void move_columns(const std::vector<View>& caches, const std::vector<Move>& moves);

}  // namespace specdec_fast
