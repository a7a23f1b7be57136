// Scatters the KV of packed tokens to their rows and positions. No torch here: the tests compile this file for the
// host as well.
#pragma once
#include "views.cuh"

namespace specdec_fast::gpu {

// keys and values, each with a strip of narrower vectors
constexpr int kMaxScatters = 4;

// One strip of new KV [1, H, N, D] and where it goes in a pool [W, H, C, D]; strides in bytes.
struct Scatter {
  const char* source;
  char* pool;
  int64_t source_head_stride, source_token_stride;
  int64_t pool_row_stride, pool_head_stride, pool_column_stride;
  Strip from, to;
  int32_t heads, rows, columns;
};

struct ScatterTable {
  Scatter scatters[kMaxScatters];
};

template <class V>
__device__ void copy_vector(char* to, const char* from) {
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

// `blocks` blocks for each scatter, one thread for each vector; the vectors of a head are neighbours.
__global__ void __launch_bounds__(kThreads) append_kv_kernel(
    const __grid_constant__ ScatterTable table, int tokens, int blocks, Ids row_of, Ids position_of) {
  const Scatter& scatter = table.scatters[blockIdx.x / blocks];
  const int i = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  const int vector = i % scatter.from.vectors, token = i / scatter.from.vectors % tokens;
  const int head = i / scatter.from.vectors / tokens;
  if (head >= scatter.heads) return;
  const int64_t row = row_of(token), column = position_of(token);
  if (row < 0 || row >= scatter.rows || column < 0 || column >= scatter.columns) __trap();
  const char* from = scatter.source + head * scatter.source_head_stride + token * scatter.source_token_stride +
                     scatter.from.offset + vector * scatter.from.vector_stride;
  char* to = scatter.pool + row * scatter.pool_row_stride + head * scatter.pool_head_stride +
             column * scatter.pool_column_stride + scatter.to.offset + vector * scatter.to.vector_stride;
  switch (scatter.from.vector_bytes) {
    case 16: return copy_vector<uint4>(to, from);
    case 8: return copy_vector<uint64_t>(to, from);
    case 4: return copy_vector<uint32_t>(to, from);
    case 2: return copy_vector<uint16_t>(to, from);
    default: return copy_vector<uint8_t>(to, from);
  }
}

}  // namespace specdec_fast::gpu
