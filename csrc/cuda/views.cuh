// Shared by all kernels.
#pragma once
#include "strips.h"

namespace specdec_fast::gpu {

constexpr int kThreads = 128;

// int64 vector or matrix; strides in elements.
template <class T>
struct View {
  T* data;
  int64_t row_stride, column_stride;
  __device__ T& operator()(int64_t row, int64_t column = 0) const {
    return data[row * row_stride + column * column_stride];
  }
};
using Ids = View<const int64_t>;
using MutableIds = View<int64_t>;

inline Ids ids(const Strided& x) {
  return {reinterpret_cast<const int64_t*>(x.data), x.strides.empty() ? 0 : x.strides[0],
          x.strides.size() > 1 ? x.strides[1] : 0};
}

inline MutableIds mutable_ids(const Strided& x) {
  const Ids view = ids(x);
  return {const_cast<int64_t*>(view.data), view.row_stride, view.column_stride};
}

}  // namespace specdec_fast::gpu
