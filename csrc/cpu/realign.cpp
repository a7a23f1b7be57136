#include "realign.h"

#include <cstring>

#include "../checks.h"

namespace specdec_fast {
namespace {

bool has_whole_lines(const View& x) { return x.stride[3] == x.element || x.size[3] == 1; }

void move_column(char* to, const View& to_view, const char* from, const View& from_view) {
  if (has_whole_lines(to_view) && has_whole_lines(from_view)) {
    std::memmove(to, from, to_view.size[3] * to_view.element);
    return;
  }
  for (int64_t d = 0; d < to_view.size[3]; ++d)
    std::memmove(to + d * to_view.stride[3], from + d * from_view.stride[3], to_view.element);
}

}  // namespace

void move_head(const View& from, int64_t from_row, const View& to, int64_t to_row, const Move& move, int64_t head) {
  const char* source = from.data + from_row * from.stride[0] + head * from.stride[1] + move.start * from.stride[2];
  char* target = to.data + to_row * to.stride[0] + head * to.stride[1] + (move.start + move.shift) * to.stride[2];
  const int64_t line = to.size[3] * to.element;
  if (has_whole_lines(to) && has_whole_lines(from) && to.stride[2] == line && from.stride[2] == line) {
    std::memmove(target, source, move.columns * line);
    return;
  }
  for (int64_t i = 0; i < move.columns; ++i) {
    const int64_t column = move.shift > 0 ? move.columns - 1 - i : i;
    move_column(target + column * to.stride[2], to, source + column * from.stride[2], from);
  }
}

void move_columns(const std::vector<View>& caches, const std::vector<Move>& moves) {
  int64_t columns = 0;
  for (const Move& move : moves) columns += move.columns;
  for_each_head(caches, static_cast<int64_t>(moves.size()), columns, [&](size_t cache, int64_t move, int64_t head) {
    move_head(caches[cache], moves[move].row, caches[cache], moves[move].row, moves[move], head);
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
