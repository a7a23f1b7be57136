#include "realign.h"

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../checks.h"

namespace specdec_fast {
namespace {

// bytes below which another thread costs more than it saves
constexpr int64_t kGrainBytes = 1 << 16;

void move_column(char* to, const char* from, const View& x) {
  if (x.stride[3] == x.element || x.size[3] == 1) {
    std::memmove(to, from, x.size[3] * x.element);
    return;
  }
  for (int64_t d = 0; d < x.size[3]; ++d) std::memmove(to + d * x.stride[3], from + d * x.stride[3], x.element);
}

void move_head(const View& x, const Move& move, int64_t head) {
  char* from = x.data + move.row * x.stride[0] + head * x.stride[1] + move.start * x.stride[2];
  char* to = from + move.shift * x.stride[2];
  const int64_t line = x.size[3] * x.element;
  if ((x.stride[3] == x.element || x.size[3] == 1) && x.stride[2] == line) {
    std::memmove(to, from, move.columns * line);
    return;
  }
  for (int64_t i = 0; i < move.columns; ++i) {
    const int64_t column = (move.shift > 0 ? move.columns - 1 - i : i) * x.stride[2];
    move_column(to + column, from + column, x);
  }
}

}  // namespace

void move_columns(const std::vector<View>& caches, const std::vector<Move>& moves) {
  const int64_t num_moves = static_cast<int64_t>(moves.size());
  // a unit of work is one head of one moving row of one cache; first_unit[i] is the first of cache i
  std::vector<int64_t> first_unit{0};
  int64_t columns = 0, bytes = 0;
  for (const Move& move : moves) columns += move.columns;
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
      move_head(caches[cache], moves[local / heads], local % heads);
    }
  });
}

namespace {

void realign_cpu(const Tensors& caches, const Tensor& start, const Tensor& num_columns, const Tensor& shift) {
  check_realign(caches, start, num_columns, shift);
  if (caches.empty()) return;
  const std::vector<View> xs = views(caches);
  int64_t capacity = xs[0].size[2];
  for (const View& x : xs) capacity = std::min(capacity, x.size[2]);
  const View starts(start), counts(num_columns), shifts(shift);
  std::vector<Move> moves;
  for (int64_t row = 0; row < starts.size[0]; ++row) {
    const Move move{row, starts.at<int64_t>(row), counts.at<int64_t>(row), shifts.at<int64_t>(row)};
    if (move.start < 0 || move.start > capacity)
      refuse(Name("start", row), " is ", move.start, "; need 0..", capacity);
    const int64_t room = capacity - move.start;
    if (move.columns < 0 || move.columns > room)
      refuse(Name("num_columns", row), " is ", move.columns, "; the row starts at ", move.start, " of ", capacity,
             ", need 0..", room);
    if (move.columns == 0 || move.shift == 0) continue;
    if (move.shift < -move.start || move.shift > room - move.columns)
      refuse(Name("shift", row), " is ", move.shift, "; the row holds columns ", move.start, "..",
             move.start + move.columns - 1, " of ", capacity, ", need ", -move.start, "..", room - move.columns);
    moves.push_back(move);
  }
  move_columns(xs, moves);
}

}  // namespace
}  // namespace specdec_fast

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CPU, m) { m.impl("realign_", TORCH_BOX(&specdec_fast::realign_cpu)); }
