// The kernels alone, without torch, for the emulator.
#include "append_kv.cuh"
#include "realign_step.cuh"
