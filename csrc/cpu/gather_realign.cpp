#include "../checks.h"
#include "realign.h"

namespace specdec_fast {
namespace {

int64_t least_capacity(const std::vector<View>& xs) {
  int64_t capacity = xs.empty() ? 0 : xs[0].size[2];
  for (const View& x : xs) capacity = std::min(capacity, x.size[2]);
  return capacity;
}

void check_rows(const View& row, const View& source, int64_t rows, int64_t pooled) {
  const int64_t moves = row.size[0];
  for (int64_t m = 0; m < moves; ++m)
    if (row.at<int64_t>(m) < 0 || row.at<int64_t>(m) >= rows)
      refuse(Name("row", m), " is ", row.at<int64_t>(m), "; need 0..", rows - 1);
  for (int64_t m = 0; m < moves; ++m)
    if (source.at<int64_t>(m) < -pooled || source.at<int64_t>(m) >= rows)
      refuse(Name("source", m), " is ", source.at<int64_t>(m), "; need ", -pooled, "..", rows - 1);
  std::vector<int64_t> goes_to(rows, -1);
  for (int64_t m = 0; m < moves; ++m) {
    int64_t& other = goes_to[row.at<int64_t>(m)];
    if (other >= 0) refuse(Name("row", other), " is ", row.at<int64_t>(m), ", as is another; need distinct");
    other = m;
  }
  for (int64_t m = 0; m < moves; ++m) {
    if (source.at<int64_t>(m) < 0) continue;
    const int64_t other = goes_to[source.at<int64_t>(m)];
    if (other >= 0 && other != m)
      refuse(Name("row", other), " is ", row.at<int64_t>(other),
             ", the source of another move; need rows that no other move reads");
  }
}

void check_columns(int64_t m, const Move& move, int64_t source_capacity, int64_t capacity) {
  if (move.start < 0 || move.start > source_capacity || move.columns < 0 || move.columns > source_capacity - move.start)
    refuse("move ", m, " takes ", move.columns, " columns from ", move.start, " on; its source has ", source_capacity);
  if (move.columns > 0 && (move.shift < -move.start || move.shift > capacity - move.columns - move.start))
    refuse(Name("shift", m), " is ", move.shift, "; it moves columns ", move.start, "..", move.start + move.columns - 1,
           " into ", capacity);
}

void gather_realign_cpu(const Tensors& caches, const Tensors& pools, const Tensor& row, const Tensor& source,
                        const Tensor& start, const Tensor& num_columns, const Tensor& shift) {
  check_gather_realign(caches, pools, row, source, start, num_columns, shift);
  if (caches.empty()) return;
  const std::vector<View> to = views(caches), pooled = views(pools);
  const View rows(row), sources(source), starts(start), counts(num_columns), shifts(shift);
  check_rows(rows, sources, to[0].size[0], pooled.empty() ? 0 : pooled[0].size[0]);
  const int64_t capacity = least_capacity(to), pool_capacity = least_capacity(pooled);
  std::vector<Move> moves;
  std::vector<int64_t> from;
  int64_t columns = 0;
  for (int64_t m = 0; m < rows.size[0]; ++m) {
    const Move move{rows.at<int64_t>(m), starts.at<int64_t>(m), counts.at<int64_t>(m), shifts.at<int64_t>(m)};
    check_columns(m, move, sources.at<int64_t>(m) < 0 ? pool_capacity : capacity, capacity);
    moves.push_back(move);
    from.push_back(sources.at<int64_t>(m));
    columns += move.columns;
  }
  for_each_head(to, static_cast<int64_t>(moves.size()), columns, [&](size_t cache, int64_t m, int64_t head) {
    const bool is_pooled = from[m] < 0;
    move_head(is_pooled ? pooled[cache] : to[cache], is_pooled ? -1 - from[m] : from[m], to[cache], moves[m].row,
              moves[m], head);
  });
}

}  // namespace
}  // namespace specdec_fast

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CPU, m) {
  m.impl("gather_realign_", TORCH_BOX(&specdec_fast::gather_realign_cpu));
}
