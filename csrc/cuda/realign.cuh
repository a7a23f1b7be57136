// Moves the KV columns of a padded batch in place. No torch here: the tests compile this file for the host as well.
#pragma once
#include "views.cuh"

namespace specdec_fast::gpu {

// holds 80 KiB in flight and leaves a thread 96 registers
constexpr int kBlocksPerProcessor = 5;
// vectors a thread holds while the ones after them are on their way
constexpr int kHeld = 4;

// One strip of one cache tensor [B, H, C, D]; strides in bytes.
struct CacheStrip {
  char* base;
  int64_t row_stride, head_stride, column_stride;
  int32_t heads, columns;
  Strip cut;
};

// kernel parameters hold 32,764 bytes
constexpr int kMostStrips = 448;

struct StripTable {
  CacheStrip strips[kMostStrips];
};

template <class V>
__device__ void load_chunk(V (&held)[kHeld], const char* first, int64_t step, int left, int per_pass) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (i * per_pass < left) held[i] = *reinterpret_cast<const V*>(first + i * per_pass * step);
}

template <class V>
__device__ void store_chunk(const V (&held)[kHeld], char* first, int64_t step, int left, int per_pass) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (i * per_pass < left) *reinterpret_cast<V*>(first + i * per_pass * step) = held[i];
}

// memmove of `count` columns by `shift` columns, by all threads of the block. The walk starts at the edge that the
// shift points to, so that a chunk lands only on columns that are already held.
template <class V>
__device__ void move_columns(char* first_column, int64_t column_stride, const Strip& strip, int count, int64_t shift) {
  const int per_pass = blockDim.x / strip.vectors, chunk = per_pass * kHeld;
  const int column = threadIdx.x / strip.vectors, vector = threadIdx.x % strip.vectors;
  const int64_t step = shift > 0 ? -column_stride : column_stride;
  char* from = first_column + strip.offset + vector * strip.vector_stride + column * step;
  if (shift > 0) from += (count - 1) * column_stride;
  // threads without a column still meet the barriers
  int left = column < per_pass ? count - column : 0;
  V held[kHeld], next[kHeld];
  load_chunk(held, from, step, left, per_pass);
  for (int done = 0; done < count; done += chunk) {
    load_chunk(next, from + chunk * step, step, left - chunk, per_pass);
    // no column is overwritten before every thread has loaded it
    __syncthreads();
    store_chunk(held, from + shift * column_stride, step, left, per_pass);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = next[i];
    from += chunk * step;
    left -= chunk;
  }
}

// Columns [start, start + count) of one row and head move by `shift`.
__device__ inline void move_row(const CacheStrip& strip, int row, int head, int64_t start, int64_t count, int64_t shift) {
  if (head >= strip.heads || shift == 0 || count == 0) return;
  const int64_t low = start + (shift < 0 ? shift : 0), high = start + count + (shift > 0 ? shift : 0);
  if (count < 0 || low < 0 || high > strip.columns) __trap();
  char* first = strip.base + row * strip.row_stride + head * strip.head_stride + start * strip.column_stride;
  switch (strip.cut.vector_bytes) {
    case 16: return move_columns<uint4>(first, strip.column_stride, strip.cut, count, shift);
    case 8: return move_columns<uint64_t>(first, strip.column_stride, strip.cut, count, shift);
    case 4: return move_columns<uint32_t>(first, strip.column_stride, strip.cut, count, shift);
    case 2: return move_columns<uint16_t>(first, strip.column_stride, strip.cut, count, shift);
    default: return move_columns<uint8_t>(first, strip.column_stride, strip.cut, count, shift);
  }
}

// Strip, row and head that a block works on; blocks of one strip are neighbours.
struct Place {
  int strip, row, head;
  __device__ Place(int block, int rows, int heads)
      : strip(block / (rows * heads)), row(block / heads % rows), head(block % heads) {}
};

// One block for each strip, row and head.
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) realign_kernel(
    const __grid_constant__ StripTable table, int rows, int heads, Ids start, Ids num_columns, Ids shift) {
  const Place place(blockIdx.x, rows, heads);
  move_row(table.strips[place.strip], place.row, place.head, start(place.row), num_columns(place.row), shift(place.row));
}

}  // namespace specdec_fast::gpu
