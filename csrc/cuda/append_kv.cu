#include "append_kv_launch.h"
#include "device.h"

namespace specdec_fast::gpu {
namespace {

void append_kv_cuda(const Tensor& k_pool, const Tensor& v_pool, const Tensor& k, const Tensor& v, const Tensor& row_of,
                    const Tensor& position_of) {
  check_append_kv(k_pool, v_pool, k, v, row_of, position_of);
  const torch::stable::accelerator::DeviceGuard guard(row_of.get_device_index());
  std::vector<Scatter> scatters;
  add_scatters(strided(k_pool), strided(k), scatters);
  add_scatters(strided(v_pool), strided(v), scatters);
  if (scatters.empty()) return;
  const int tokens = row_of.size(0);
  const int64_t blocks = blocks_per_scatter(scatters, tokens, kThreads);
  append_kv_kernel<<<blocks * scatters.size(), kThreads, 0, current_stream(row_of)>>>(
      make_scatter_table(scatters), tokens, blocks, ids(strided(row_of)), ids(strided(position_of)));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CUDA, m) { m.impl("append_kv_", TORCH_BOX(&append_kv_cuda)); }

}  // namespace specdec_fast::gpu
