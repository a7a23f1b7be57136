#include <torch/csrc/stable/ops.h>

#include <limits>

#include "../checks.h"
#include "realign.h"

namespace specdec_fast {
namespace {

// A row of the round: what it accepted, whether it is done, where it goes.
struct Row {
  int64_t start, length, n_accepted, shift;
  bool finished;
};

int64_t count_accepted(const View& draft_ids, const View& target_ids, int64_t row, int64_t limit) {
  const int64_t most = std::min(limit, draft_ids.size[1]);
  int64_t n = 0;
  while (n < most && draft_ids.at<int64_t>(row, n) == target_ids.at<int64_t>(row, n)) ++n;
  return n;
}

void check_values(const Step& a, const std::vector<View>& caches) {
  const View start(a.start), length(a.length);
  const int64_t num_drafts = a.draft_ids.size(1);
  // the verify has written K columns beyond the end; the bonus needs one more, in the tokens only
  int64_t last_end = a.tokens.size(1) - 1;
  for (const View& x : caches) last_end = std::min(last_end, x.size[2]);
  last_end -= num_drafts;
  for (int64_t row = 0; row < start.size[0]; ++row) {
    const int64_t first = start.at<int64_t>(row), count = length.at<int64_t>(row);
    if (first < 0) refuse(Name("start", row), " is ", first, "; need at least 0");
    if (count < 1 || count > last_end - first)
      refuse(Name("length", row), " is ", count, "; the row starts at ", first, " and K is ", num_drafts, ", need 1..",
             last_end - first);
  }
  const int64_t end = start.at<int64_t>(0) + length.at<int64_t>(0);
  for (int64_t row = 0; row < start.size[0]; ++row)
    if (start.at<int64_t>(row) + length.at<int64_t>(row) != end)
      refuse(Name("start", row), " + ", Name("length", row), " is ",
             start.at<int64_t>(row) + length.at<int64_t>(row), ", row 0 ends at ", end, "; need one end");
  if (!a.n_accepted) return;
  const View n_accepted(*a.n_accepted);
  for (int64_t row = 0; row < start.size[0]; ++row)
    if (n_accepted.at<int64_t>(row) < 0 || n_accepted.at<int64_t>(row) > num_drafts)
      refuse(Name("n_accepted", row), " is ", n_accepted.at<int64_t>(row), "; need 0..", num_drafts);
}

// The right edge that leaves the most columns in place; ties take the smallest.
int64_t plan_minimal(const std::vector<Row>& rows, int64_t end, int64_t num_drafts) {
  std::vector<int64_t> kept(num_drafts + 1, 0);
  int64_t smallest = 0;
  for (const Row& row : rows) {
    if (row.finished) continue;
    kept[row.n_accepted] += row.length + row.n_accepted;
    smallest = std::max(smallest, row.n_accepted - row.start);
  }
  return end + 1 + (std::max_element(kept.begin() + smallest, kept.end()) - kept.begin());
}

// The right edge that puts the longest row at column 0.
int64_t plan_packed(const std::vector<Row>& rows, int64_t end) {
  int64_t longest = 0;
  for (const Row& row : rows)
    if (!row.finished) longest = std::max(longest, row.length + row.n_accepted + 1);
  return longest ? longest : end + 1;
}

// Writes n_accepted and the committed tokens of every row into the summary.
std::vector<Row> accept(const Step& a) {
  const View draft_ids(a.draft_ids), target_ids(a.target_ids), start(a.start), length(a.length), summary(a.summary),
      limit(a.limit), max_length(a.max_length), stop_ids(a.stop_ids);
  const int64_t num_drafts = draft_ids.size[1];
  std::vector<Row> rows;
  for (int64_t b = 0; b < start.size[0]; ++b) {
    const int64_t n = a.n_accepted ? View(*a.n_accepted).at<int64_t>(b)
                                   : count_accepted(draft_ids, target_ids, b, limit.at<int64_t>(b));
    const int64_t new_length = length.at<int64_t>(b) + n + 1;
    bool finished = new_length >= max_length.at<int64_t>(b);
    summary.at<int64_t>(b, 0) = n;
    for (int64_t i = 0; i <= num_drafts; ++i) {
      const int64_t token = i < n ? draft_ids.at<int64_t>(b, i) : i == n ? target_ids.at<int64_t>(b, n) : 0;
      summary.at<int64_t>(b, 3 + i) = token;
      for (int64_t s = 0; i <= n && s < stop_ids.size[0]; ++s) finished |= stop_ids.at<int64_t>(s) == token;
    }
    rows.push_back({start.at<int64_t>(b), length.at<int64_t>(b), n, 0, finished});
  }
  return rows;
}

void append_and_move(const Step& a, const std::vector<View>& caches, const std::vector<Row>& rows, int64_t end) {
  const View tokens(a.tokens), summary(a.summary);
  // one head of one-element columns
  View token_columns = tokens;
  token_columns.size[2] = tokens.size[1];
  token_columns.stride[2] = tokens.stride[1];
  token_columns.size[1] = 1;
  std::vector<Move> moves, token_moves;
  for (size_t b = 0; b < rows.size(); ++b) {
    const Row& row = rows[b];
    const int64_t index = static_cast<int64_t>(b), columns = row.length + row.n_accepted;
    for (int64_t i = 0; i <= row.n_accepted; ++i) tokens.at<int64_t>(index, end + i) = summary.at<int64_t>(index, 3 + i);
    if (row.shift == 0) continue;
    moves.push_back({index, row.start, columns, row.shift});
    // the bonus token has no KV yet
    token_moves.push_back({index, row.start, columns + 1, row.shift});
  }
  move_columns(caches, moves);
  move_columns({token_columns}, token_moves);
}

template <class T>
void fill(char* line, int64_t stride, int64_t from, int64_t to, T value) {
  if (stride == sizeof(T)) {
    T* items = reinterpret_cast<T*>(line);
    if (from < to) std::fill(items + from, items + to, value);
    return;
  }
  for (int64_t j = from; j < to; ++j) *reinterpret_cast<T*>(line + j * stride) = value;
}

template <class T>
void write_mask(const View& mask, const std::vector<Row>& rows, int64_t first_query, int64_t window, T visible,
                T hidden) {
  const int64_t queries = mask.size[2], capacity = mask.size[3];
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, capacity));
  torch::stable::parallel_for(0, mask.size[0] * queries, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / queries, i = unit % queries, query = first_query + i;
      char* line = mask.data + b * mask.stride[0] + i * mask.stride[2];
      int64_t first = rows[b].start + rows[b].shift;
      if (window) first = std::max(first, query - window + 1);
      const int64_t last = std::min(query + 1, capacity);
      first = std::min(first, last);
      fill<T>(line, mask.stride[3], 0, first, hidden);
      fill<T>(line, mask.stride[3], first, last, visible);
      fill<T>(line, mask.stride[3], last, capacity, hidden);
      // a query in the padding sees itself, so that no softmax runs over nothing
      if (query < capacity) fill<T>(line, mask.stride[3], query, query + 1, visible);
    }
  });
}

void write_masks(const Step& a, const std::vector<Row>& rows, int64_t first_query) {
  for (size_t i = 0; i < a.masks.size(); ++i) {
    const View mask(a.masks[i]);
    const int64_t window = a.windows[i];
    // bits of the dtype's minimum
    switch (a.masks[i].scalar_type()) {
      case ScalarType::Bool: write_mask<uint8_t>(mask, rows, first_query, window, 1, 0); break;
      case ScalarType::Half: write_mask<uint16_t>(mask, rows, first_query, window, 0, 0xFBFF); break;
      case ScalarType::BFloat16: write_mask<uint16_t>(mask, rows, first_query, window, 0, 0xFF7F); break;
      case ScalarType::Float:
        write_mask<float>(mask, rows, first_query, window, 0, std::numeric_limits<float>::lowest());
        break;
      default: write_mask<double>(mask, rows, first_query, window, 0, std::numeric_limits<double>::lowest());
    }
  }
}

void write_metadata(const Step& a, const std::vector<Row>& rows, int64_t new_end) {
  const View new_start(a.new_start), new_length(a.new_length), position_ids(a.position_ids), summary(a.summary);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const int64_t b = static_cast<int64_t>(i), start = row.start + row.shift;
    new_start.at<int64_t>(b) = start;
    new_length.at<int64_t>(b) = row.length + row.n_accepted + 1;
    summary.at<int64_t>(b, 1) = row.finished;
    summary.at<int64_t>(b, 2) = new_end;
    for (int64_t q = 0; q < position_ids.size[1]; ++q)
      position_ids.at<int64_t>(b, q) = std::clamp<int64_t>(new_end - 2 + q - start, 0, a.max_position);
  }
}

void realign_step_cpu(const Tensors& caches, const Tensor& tokens, const Tensor& draft_ids, const Tensor& target_ids,
                      const Tensor& limit, const Tensor& max_length, const Tensor& stop_ids,
                      const std::optional<Tensor>& n_accepted, const Tensor& start, const Tensor& length,
                      const Tensor& new_start, const Tensor& new_length, const Tensor& position_ids,
                      const Tensors& masks, const std::vector<int64_t>& windows, const Tensor& summary,
                      int64_t max_position, int64_t placement) {
  const Step a{caches, tokens,    draft_ids,  target_ids,   limit, max_length, stop_ids, n_accepted,   start,
               length, new_start, new_length, position_ids, masks, windows,    summary,  max_position, placement};
  check_realign_step(a);
  const std::vector<View> xs = views(caches);
  check_values(a, xs);
  std::vector<Row> rows = accept(a);
  const int64_t end = rows[0].start + rows[0].length;
  const int64_t new_end = placement == 0 ? plan_minimal(rows, end, draft_ids.size(1)) : plan_packed(rows, end);
  for (Row& row : rows)
    if (!row.finished) row.shift = new_end - (end + row.n_accepted + 1);
  append_and_move(a, xs, rows, end);
  write_metadata(a, rows, new_end);
  write_masks(a, rows, new_end - 2);
}

}  // namespace
}  // namespace specdec_fast

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CPU, m) { m.impl("realign_step_", TORCH_BOX(&specdec_fast::realign_step_cpu)); }
