#include "device.h"
#include "realign_launch.h"

namespace specdec_fast::gpu {
namespace {

static_assert(sizeof(LaneTable<kManyLanes>) + sizeof(Step) + sizeof(int) <= 32764, "kernel parameters are limited");

// enough blocks for every processor, so that a few rows and heads still use the whole chip
int64_t wanted_blocks(const Tensor& x) { return int64_t{kBlocksPerProcessor} * processors(x); }

// The table travels in the kernel's parameters: nothing to allocate or to keep alive, and a CUDA graph holds a copy.
template <class Launch>
void with_table(const std::vector<Lane>& lanes, Launch launch) {
  if (lanes.size() <= kFewLanes) launch(make_table<kFewLanes>(lanes));
  else launch(make_table<kManyLanes>(lanes));
}

template <int kCapacity>
void launch_realign(const LaneTable<kCapacity>& table, int64_t lanes, int rows, int heads, const Tensor& start,
                    const Tensor& num_columns, const Tensor& shift) {
  realign_kernel<kCapacity><<<lanes * rows * heads, kThreads, 0, current_stream(start)>>>(
      table, rows, heads, ids(strided(start)), ids(strided(num_columns)), ids(strided(shift)));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void realign_cuda(const Tensors& caches, const Tensor& start, const Tensor& num_columns, const Tensor& shift) {
  check_realign(caches, start, num_columns, shift);
  const torch::stable::accelerator::DeviceGuard guard(start.get_device_index());
  const std::vector<Lane> lanes = make_lanes(strided(caches), kThreads, wanted_blocks(start));
  if (lanes.empty()) return;
  with_table(lanes, [&](const auto& table) {
    launch_realign(table, lanes.size(), start.size(0), most_heads(lanes), start, num_columns, shift);
  });
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

template <int kCapacity>
void launch_step(const LaneTable<kCapacity>& table, int64_t lanes, int heads, const Step& step, cudaStream_t stream) {
  const int64_t blocks = step.small_blocks() + lanes * step.rows * heads;
  realign_step_kernel<kCapacity><<<blocks, kThreads, step.shared_bytes(), stream>>>(table, step, heads);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void realign_step_cuda(const Tensors& caches, const Tensor& tokens, const Tensor& draft_ids, const Tensor& target_ids,
                       const Tensor& limit, const Tensor& max_length, const Tensor& stop_ids,
                       const std::optional<Tensor>& n_accepted, const Tensor& start, const Tensor& length,
                       const Tensor& new_start, const Tensor& new_length, const Tensor& position_ids,
                       const Tensors& masks, const std::vector<int64_t>& windows, const Tensor& summary,
                       int64_t max_position, int64_t layout) {
  check_realign_step({caches, tokens, draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length,
                      new_start, new_length, position_ids, masks, windows, summary, max_position, layout});
  const torch::stable::accelerator::DeviceGuard guard(start.get_device_index());
  std::vector<uint64_t> hidden;
  for (const Tensor& mask : masks) hidden.push_back(hidden_bits(mask.scalar_type()));
  const Step step = make_step(
      {strided(tokens), strided(draft_ids), strided(target_ids), strided(limit), strided(max_length),
       strided(stop_ids), strided(n_accepted), strided(start), strided(length),
       strided(new_start), strided(new_length), strided(position_ids), strided(summary), strided(masks), windows,
       hidden, max_position, layout == 1});
  const std::vector<Lane> lanes = make_lanes(strided(caches), kThreads, wanted_blocks(start));
  with_table(lanes, [&](const auto& table) {
    launch_step(table, lanes.size(), most_heads(lanes), step, current_stream(start));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CUDA, m) {
  m.impl("realign_", TORCH_BOX(&realign_cuda));
  m.impl("realign_step_", TORCH_BOX(&realign_step_cuda));
}

}  // namespace specdec_fast::gpu
