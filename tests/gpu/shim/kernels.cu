// The kernels alone, without torch, for the emulator.
#include "append_kv_launch.h"
#include "realign_launch.h"

namespace specdec_fast::gpu {
template __global__ void realign_kernel<kFewLanes>(
    const __grid_constant__ LaneTable<kFewLanes>, int, int, Ids, Ids, Ids);
template __global__ void realign_step_kernel<kFewLanes>(
    const __grid_constant__ LaneTable<kFewLanes>, const __grid_constant__ Step, int);
}  // namespace specdec_fast::gpu
