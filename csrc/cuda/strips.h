// Cuts the head dim of a strided tensor into strips that threads move as vectors. Plain C++.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace specdec_fast::gpu {

// Head dim bytes [offset, offset + ...) as `vectors` accesses of `vector_bytes`, `vector_stride` bytes apart.
struct Strip {
  int64_t offset;
  int64_t vector_stride;
  int32_t vectors;
  int32_t vector_bytes;
};

// Narrower strips waste the 32-byte sectors of DRAM.
constexpr int64_t kSector = 32;
constexpr int64_t kWidestVector = 16;

inline int64_t largest_power_of_two_in(int64_t bits) { return bits & -bits; }

// A strided tensor, dimensions outermost first; strides in elements.
struct Strided {
  char* data;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t element_bytes;

  int64_t stride_bytes(int dim) const { return strides[dim] * element_bytes; }
  bool is_dense(int dim) const { return sizes[dim] == 1 || strides[dim] == 1; }
  bool is_empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }

  // Largest vector that every row of the last dim starts on a multiple of.
  int64_t alignment() const {
    int64_t bits = kWidestVector | reinterpret_cast<int64_t>(data);
    for (size_t dim = 0; dim + 1 < sizes.size(); ++dim)
      if (sizes[dim] > 1) bits |= stride_bytes(dim);
    return largest_power_of_two_in(bits);
  }
};

// Cut `width` elements into about `pieces` strips of at most `max_vectors` vectors each. What does not fill a vector
// of `alignment` bytes becomes a strip of narrower vectors.
inline std::vector<Strip> cut_strips(int64_t width, int64_t element_bytes, int64_t element_stride, int64_t alignment,
                                     int64_t pieces, int64_t max_vectors) {
  std::vector<Strip> strips;
  auto cut = [&](int64_t begin, int64_t end, int64_t vector_bytes, int64_t vector_stride) {
    const int64_t per_piece = (end - begin + pieces - 1) / pieces;
    const int64_t step = std::min((per_piece + kSector - 1) / kSector * kSector, max_vectors * vector_bytes);
    for (int64_t at = begin; at < end; at += step) {
      const int64_t vectors = std::min(step, end - at) / vector_bytes;
      strips.push_back({at / vector_bytes * vector_stride, vector_stride, int32_t(vectors), int32_t(vector_bytes)});
    }
  };
  const int64_t bytes = width * element_bytes;
  if (element_stride != element_bytes) {
    cut(0, bytes, element_bytes, element_stride);
    return strips;
  }
  const int64_t body = bytes - bytes % alignment;
  cut(0, body, alignment, alignment);
  const int64_t narrow = largest_power_of_two_in((bytes - body) | kWidestVector);
  cut(body, bytes, narrow, narrow);
  return strips;
}

}  // namespace specdec_fast::gpu
