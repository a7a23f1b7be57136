#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../checks.h"

namespace specdec_fast {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;

void need_in_range(const char* name, const View& index, int64_t size) {
  for (int64_t i = 0; i < index.size[0]; ++i)
    if (index.at<int64_t>(i) < 0 || index.at<int64_t>(i) >= size)
      refuse(Name(name, i), " is ", index.at<int64_t>(i), "; need 0..", size - 1);
}

void copy_line(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t count, int64_t element) {
  if ((to_stride == element && from_stride == element) || count == 1) {
    std::memcpy(to, from, count * element);
    return;
  }
  for (int64_t d = 0; d < count; ++d) std::memcpy(to + d * to_stride, from + d * from_stride, element);
}

void scatter(const View& pool, const View& x, const View& row_of, const View& position_of) {
  const int64_t heads = pool.size[1], line = pool.size[3] * pool.element;
  if (heads * line == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / (heads * line));
  torch::stable::parallel_for(0, row_of.size[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* to = pool.data + row_of.at<int64_t>(i) * pool.stride[0] + position_of.at<int64_t>(i) * pool.stride[2];
      const char* from = x.data + i * x.stride[2];
      for (int64_t head = 0; head < heads; ++head)
        copy_line(to + head * pool.stride[1], pool.stride[3], from + head * x.stride[1], x.stride[3], pool.size[3],
                  pool.element);
    }
  });
}

void append_kv_cpu(const Tensor& k_pool, const Tensor& v_pool, const Tensor& k, const Tensor& v, const Tensor& row_of,
                   const Tensor& position_of) {
  check_append_kv(k_pool, v_pool, k, v, row_of, position_of);
  const View rows(row_of), positions(position_of);
  need_in_range("row_of", rows, k_pool.size(0));
  need_in_range("position_of", positions, std::min(k_pool.size(2), v_pool.size(2)));
  scatter(View(k_pool), View(k), rows, positions);
  scatter(View(v_pool), View(v), rows, positions);
}

}  // namespace
}  // namespace specdec_fast

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CPU, m) { m.impl("append_kv_", TORCH_BOX(&specdec_fast::append_kv_cpu)); }
