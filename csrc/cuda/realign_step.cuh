// The whole commit of a padded round in one launch. Every block works the plan out for itself, so that no block waits
// for another; no block reads what another one writes.
#pragma once
#include "realign.cuh"

#ifdef __CUDACC__
__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(16) char bytes[];
  return bytes;
}
#endif

namespace specdec_fast::gpu {

constexpr int kMaxMasks = 8;

// A row's part of the plan, before the new right edge is known.
struct alignas(16) Row {
  int32_t start, length, n_accepted, finished;
};

// [B, 1, Q, C] of elements of 1, 2, 4 or 8 bytes; strides in bytes.
struct Mask {
  char* base;
  int64_t row_stride, query_stride, column_stride;
  int64_t window;  // 0: full attention
  uint64_t visible, hidden;
  int32_t columns, element_bytes;
};

struct Step {
  int32_t rows, drafts, stops, queries, masks, packed;
  int64_t max_position;
  Ids draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length;
  MutableIds tokens, new_start, new_length, position_ids, summary;
  int32_t token_columns;
  Mask mask[kMaxMasks];

  // those that write tokens and masks; they come before those that move KV
  __host__ __device__ int small_blocks() const { return rows * (1 + masks * queries); }
  int64_t shared_bytes() const { return rows * sizeof(Row) + (drafts + 1) * sizeof(int64_t); }
};

struct Plan {
  const Row* rows;
  int64_t end, new_end;

  __device__ int64_t shift(int row) const {
    return rows[row].finished ? 0 : new_end - (end + rows[row].n_accepted + 1);
  }
  __device__ int64_t new_start(int row) const { return rows[row].start + shift(row); }
};

// Accepted drafts, then the bonus token.
__device__ inline int64_t committed_token(const Step& step, int row, int n_accepted, int i) {
  return i < n_accepted ? step.draft_ids(row, i) : step.target_ids(row, n_accepted);
}

__device__ inline int count_accepted(const Step& step, int row) {
  if (step.n_accepted.data) return step.n_accepted(row);
  const int64_t limit = step.limit(row);
  int matches = 1, count = 0;
#pragma unroll 4
  for (int i = 0; i < step.drafts; ++i) {
    matches &= i < limit && step.draft_ids(row, i) == step.target_ids(row, i);
    count += matches;
  }
  return count;
}

__device__ inline Row read_row(const Step& step, int row) {
  const int n_accepted = count_accepted(step, row);
  const int64_t length = step.length(row);
  bool finished = length + n_accepted + 1 >= step.max_length(row);
  for (int i = 0; i <= n_accepted; ++i)
    for (int s = 0; s < step.stops; ++s)
      finished |= committed_token(step, row, n_accepted, i) == step.stop_ids(s);
  return {int32_t(step.start(row)), int32_t(length), n_accepted, finished};
}

// KV columns that stay in place if the rows that accepted `candidate` drafts do; -1 if some row would leave its
// padding.
__device__ inline int64_t columns_kept(const Row* rows, int count, int candidate) {
  int64_t kept = 0;
  bool fits = true;
  for (int i = 0; i < count; ++i) {
    const Row row = rows[i];
    if (row.finished) continue;
    fits &= row.n_accepted - row.start <= candidate;
    if (row.n_accepted == candidate) kept += row.length + row.n_accepted;
  }
  return fits ? kept : -1;
}

// Right edge that moves the fewest columns; the smallest of equals.
__device__ inline int64_t minimal_move(const Step& step, const Row* rows, int64_t* kept, int64_t end) {
  for (int i = threadIdx.x; i <= step.drafts; i += blockDim.x) kept[i] = columns_kept(rows, step.rows, i);
  __syncthreads();
  int best = 0;
  for (int i = 1; i <= step.drafts; ++i)
    if (kept[i] > kept[best]) best = i;
  return end + best + 1;
}

// Right edge that leaves the longest unfinished row no padding.
__device__ inline int64_t minimal_padding(const Step& step, const Row* rows, int64_t end) {
  int longest = 0;
  for (int i = 0; i < step.rows; ++i)
    if (!rows[i].finished) longest = max(longest, rows[i].length + rows[i].n_accepted + 1);
  return longest ? longest : end + 1;
}

__device__ inline Plan plan_round(const Step& step) {
  Row* rows = reinterpret_cast<Row*>(dynamic_shared());
  for (int i = threadIdx.x; i < step.rows; i += blockDim.x) rows[i] = read_row(step, i);
  __syncthreads();
  const int64_t end = rows[0].start + rows[0].length;
  int64_t* kept = reinterpret_cast<int64_t*>(rows + step.rows);
  return {rows, end, step.packed ? minimal_padding(step, rows, end) : minimal_move(step, rows, kept, end)};
}

// Tokens, bookkeeping and summary of one row.
__device__ inline void commit_row(const Step& step, const Plan& plan, int row) {
  const int n_accepted = plan.rows[row].n_accepted, new_length = plan.rows[row].length + n_accepted + 1;
  const int64_t new_start = plan.new_start(row);
  for (int i = threadIdx.x; i <= step.drafts; i += blockDim.x) {
    const bool committed = i <= n_accepted;
    const int64_t token = committed ? committed_token(step, row, n_accepted, i) : 0;
    if (committed) step.tokens(row, plan.end + i) = token;
    step.summary(row, 3 + i) = token;
  }
  for (int i = threadIdx.x; i < step.queries; i += blockDim.x)
    step.position_ids(row, i) = min(max(plan.new_end - 2 + i - new_start, int64_t(0)), step.max_position);
  if (threadIdx.x == 0) {
    step.new_start(row) = new_start;
    step.new_length(row) = new_length;
    step.summary(row, 0) = n_accepted;
    step.summary(row, 1) = plan.rows[row].finished;
    step.summary(row, 2) = plan.new_end;
  }
  // the new tokens move with their row
  __syncthreads();
  const int64_t word = sizeof(int64_t);
  const CacheStrip tokens = {reinterpret_cast<char*>(step.tokens.data), step.tokens.row_stride * word, 0,
                       step.tokens.column_stride * word, 1, step.token_columns, {0, 0, 1, int32_t(word)}};
  move_row(tokens, row, 0, plan.rows[row].start, new_length, plan.shift(row));
}

// One query's row of a mask: it sees columns [low, query], and in the padding itself alone.
template <class E>
__device__ void write_mask_row(const Mask& mask, char* base, int64_t low, int64_t query) {
  const E visible = E(mask.visible), hidden = E(mask.hidden);
  constexpr int kPerVector = kWidestVector / sizeof(E);
  const bool dense = mask.column_stride == sizeof(E) && reinterpret_cast<uintptr_t>(base) % kWidestVector == 0;
  const int vectors = dense ? mask.columns / kPerVector : 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    union { uint4 vector; E element[kPerVector]; } part;
#pragma unroll
    for (int e = 0; e < kPerVector; ++e) {
      const int column = i * kPerVector + e;
      part.element[e] = low <= column && column <= query ? visible : hidden;
    }
    reinterpret_cast<uint4*>(base)[i] = part.vector;
  }
  for (int column = vectors * kPerVector + threadIdx.x; column < mask.columns; column += blockDim.x)
    *reinterpret_cast<E*>(base + column * mask.column_stride) = low <= column && column <= query ? visible : hidden;
}

__device__ inline void write_mask(const Mask& mask, const Plan& plan, int row, int query_index) {
  const int64_t query = plan.new_end - 2 + query_index;
  int64_t low = plan.new_start(row);
  if (mask.window) low = max(low, query - mask.window + 1);
  low = min(low, query);
  char* base = mask.base + row * mask.row_stride + query_index * mask.query_stride;
  switch (mask.element_bytes) {
    case 8: return write_mask_row<uint64_t>(mask, base, low, query);
    case 4: return write_mask_row<uint32_t>(mask, base, low, query);
    case 2: return write_mask_row<uint16_t>(mask, base, low, query);
    default: return write_mask_row<uint8_t>(mask, base, low, query);
  }
}

// Blocks: one for each row, one for each row, query and mask, then one for each strip, row and head.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) realign_step_kernel(
    const __grid_constant__ StripTable table, const __grid_constant__ Step step, int heads) {
  const Plan plan = plan_round(step);
  const int block = blockIdx.x;
  if (block < step.rows) return commit_row(step, plan, block);
  if (block < step.small_blocks()) {
    const int i = block - step.rows, row = i % step.rows, query = i / step.rows % step.queries;
    return write_mask(step.mask[i / step.rows / step.queries], plan, row, query);
  }
  const Place place(block - step.small_blocks(), step.rows, heads);
  const Row& row = plan.rows[place.row];
  // the bonus token has no KV yet
  const int columns = row.length + row.n_accepted;
  move_row(table.strips[place.strip], place.row, place.head, row.start, columns, plan.shift(place.row));
}

}  // namespace specdec_fast::gpu
