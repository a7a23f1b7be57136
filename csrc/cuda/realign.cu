#include "device.h"
#include "realign_launch.h"

namespace specdec_fast::gpu {
namespace {

static_assert(sizeof(StripTable) + sizeof(Step) + sizeof(int) <= 32764, "kernel parameters are limited");

// Enough for every processor, so that a few rows and heads still use the whole chip.
int64_t wanted_blocks(const Tensor& x) { return int64_t{kBlocksPerProcessor} * processors(x); }

void realign_cuda(const Tensors& caches, const Tensor& start, const Tensor& num_columns, const Tensor& shift) {
  check_realign(caches, start, num_columns, shift);
  const torch::stable::accelerator::DeviceGuard guard(start.get_device_index());
  const std::vector<CacheStrip> strips = make_strips(strided(caches), kThreads, wanted_blocks(start));
  if (strips.empty()) return;
  const int rows = start.size(0), heads = most_heads(strips);
  realign_kernel<<<strips.size() * rows * heads, kThreads, 0, current_stream(start)>>>(
      make_table(strips), rows, heads, ids(strided(start)), ids(strided(num_columns)), ids(strided(shift)));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// The smallest value of a mask's dtype.
uint64_t hidden_bits(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return 0xFBFF;
    case ScalarType::BFloat16: return 0xFF7F;
    case ScalarType::Float: return 0xFF7FFFFF;
    case ScalarType::Double: return 0xFFEFFFFFFFFFFFFF;
    default: return 0;
  }
}

void realign_step_cuda(const Tensors& caches, const Tensor& tokens, const Tensor& draft_ids, const Tensor& target_ids,
                       const Tensor& limit, const Tensor& max_length, const Tensor& stop_ids,
                       const std::optional<Tensor>& n_accepted, const Tensor& start, const Tensor& length,
                       const Tensor& new_start, const Tensor& new_length, const Tensor& position_ids,
                       const Tensors& masks, const std::vector<int64_t>& windows, const Tensor& summary,
                       int64_t max_position, int64_t placement) {
  check_realign_step({caches, tokens, draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length,
                      new_start, new_length, position_ids, masks, windows, summary, max_position, placement});
  const torch::stable::accelerator::DeviceGuard guard(start.get_device_index());
  std::vector<uint64_t> hidden;
  for (const Tensor& mask : masks) hidden.push_back(hidden_bits(mask.scalar_type()));
  const Step step = make_step(
      {strided(tokens), strided(draft_ids), strided(target_ids), strided(limit), strided(max_length),
       strided(stop_ids), strided(n_accepted), strided(start), strided(length),
       strided(new_start), strided(new_length), strided(position_ids), strided(summary), strided(masks), windows,
       hidden, max_position, placement == 1});
  const std::vector<CacheStrip> strips = make_strips(strided(caches), kThreads, wanted_blocks(start));
  const int heads = most_heads(strips);
  const int64_t blocks = step.small_blocks() + int64_t(strips.size()) * step.rows * heads;
  realign_step_kernel<<<blocks, kThreads, step.shared_bytes(), current_stream(start)>>>(make_table(strips), step, heads);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CUDA, m) {
  m.impl("realign_", TORCH_BOX(&realign_cuda));
  m.impl("realign_step_", TORCH_BOX(&realign_step_cuda));
}

}  // namespace specdec_fast::gpu
