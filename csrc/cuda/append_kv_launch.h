// Turns tensors into parameters of the append kernel. Plain C++ on the host.
#pragma once
#include "append_kv.cuh"

namespace specdec_fast::gpu {

// New KV [1, H, N, D] into a pool [W, H, C, D].
inline void add_scatters(const Strided& pool, const Strided& source, std::vector<Scatter>& scatters) {
  if (pool.is_empty() || source.is_empty()) return;
  const bool dense = pool.is_dense(3) && source.is_dense(3);
  const int64_t alignment = dense ? std::min(pool.alignment(), source.alignment()) : pool.element_bytes;
  const auto strips = [&](const Strided& x) {
    const int64_t element_stride = x.is_dense(3) ? x.element_bytes : x.stride_bytes(3);
    return cut_strips(x.sizes[3], x.element_bytes, element_stride, alignment, 1, x.sizes[3] * x.element_bytes);
  };
  const std::vector<Strip> from = strips(source), to = strips(pool);
  for (size_t i = 0; i < from.size(); ++i)
    scatters.push_back({source.data, pool.data, source.stride_bytes(1), source.stride_bytes(2), pool.stride_bytes(0),
                        pool.stride_bytes(1), pool.stride_bytes(2), from[i], to[i], int32_t(pool.sizes[1]),
                        int32_t(pool.sizes[0]), int32_t(pool.sizes[2])});
}

inline ScatterTable make_scatter_table(const std::vector<Scatter>& scatters) {
  ScatterTable table{};
  std::copy(scatters.begin(), scatters.end(), table.scatters);
  return table;
}

// Blocks that each scatter needs.
inline int64_t blocks_per_scatter(const std::vector<Scatter>& scatters, int64_t tokens, int threads) {
  int64_t most = 0;
  for (const Scatter& scatter : scatters) most = std::max<int64_t>(most, tokens * scatter.heads * scatter.from.vectors);
  return (most + threads - 1) / threads;
}

}  // namespace specdec_fast::gpu
