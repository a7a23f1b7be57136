// Turns tensors into kernel parameters. Plain C++ on the host.
#pragma once
#include <stdexcept>

#include "realign_step.cuh"

namespace specdec_fast::gpu {

// shared memory that every GPU gives a block by default
constexpr int64_t kSharedBytes = 48 << 10;

// Strips that cover all caches [B, H, C, D]. Where layers, rows and heads give fewer than `wanted_blocks` blocks, the
// head dim is split as well.
inline std::vector<CacheStrip> make_strips(const std::vector<Strided>& caches, int threads, int64_t wanted_blocks) {
  int64_t blocks = 0;
  for (const Strided& x : caches) blocks += x.sizes[0] * x.sizes[1];
  blocks = std::max<int64_t>(blocks, 1);
  // a piece may come with a narrow tail, and the table has to hold both
  const int64_t most_pieces = kMostStrips / (2 * (caches.size() + 1));
  const int64_t pieces = std::max<int64_t>(std::min((wanted_blocks + blocks - 1) / blocks, most_pieces), 1);
  std::vector<CacheStrip> strips;
  for (const Strided& x : caches) {
    if (x.is_empty()) continue;
    const int64_t element_stride = x.is_dense(3) ? x.element_bytes : x.stride_bytes(3);
    for (const Strip& strip : cut_strips(x.sizes[3], x.element_bytes, element_stride, x.alignment(), pieces, threads))
      strips.push_back({x.data, x.stride_bytes(0), x.stride_bytes(1), x.stride_bytes(2), int32_t(x.sizes[1]),
                       int32_t(x.sizes[2]), strip});
  }
  if (strips.size() > kMostStrips) throw std::runtime_error("more cache tensors than one launch can take");
  return strips;
}

inline int most_heads(const std::vector<CacheStrip>& strips) {
  int heads = 0;
  for (const CacheStrip& strip : strips) heads = std::max(heads, strip.heads);
  return heads;
}

inline StripTable make_table(const std::vector<CacheStrip>& strips) {
  StripTable table{};
  std::copy(strips.begin(), strips.end(), table.strips);
  return table;
}

// `hidden` is the mask's smallest value as bits; a bool mask is the only one of one byte.
inline Mask make_mask(const Strided& x, int64_t window, uint64_t hidden) {
  return {x.data, x.stride_bytes(0), x.stride_bytes(2), x.stride_bytes(3), window, x.element_bytes == 1 ? 1ull : 0ull,
          hidden, int32_t(x.sizes[3]), int32_t(x.element_bytes)};
}

// The arguments of realign_step_ but the caches, as raw memory.
struct StepTensors {
  Strided tokens, draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length;
  Strided new_start, new_length, position_ids, summary;
  std::vector<Strided> masks;
  std::vector<int64_t> windows;
  std::vector<uint64_t> hidden;
  int64_t max_position;
  bool packed;
};

inline Step make_step(const StepTensors& x) {
  Step step{int32_t(x.tokens.sizes[0]), int32_t(x.draft_ids.sizes[1]), int32_t(x.stop_ids.sizes[0]),
            int32_t(x.position_ids.sizes[1]), int32_t(x.masks.size()), x.packed, x.max_position,
            ids(x.draft_ids), ids(x.target_ids), ids(x.limit), ids(x.max_length), ids(x.stop_ids), ids(x.n_accepted),
            ids(x.start), ids(x.length), mutable_ids(x.tokens), mutable_ids(x.new_start), mutable_ids(x.new_length),
            mutable_ids(x.position_ids), mutable_ids(x.summary), int32_t(x.tokens.sizes[1]), {}};
  if (x.masks.size() > kMaxMasks) throw std::runtime_error("more masks than one launch can take");
  if (step.shared_bytes() > kSharedBytes) throw std::runtime_error("more rows than one launch can take");
  for (size_t i = 0; i < x.masks.size(); ++i) step.mask[i] = make_mask(x.masks[i], x.windows[i], x.hidden[i]);
  return step;
}

}  // namespace specdec_fast::gpu
