#pragma once

#include "../common.h"

namespace specdec_fast {

// Columns [start, start + columns) of a row go `shift` columns to the right.
struct Move {
  int64_t row, start, columns, shift;
};

// Applies every move to every view `[B, H, C, D]`, in place.
void move_columns(const std::vector<View>& caches, const std::vector<Move>& moves);

}  // namespace specdec_fast
