// Torch's part of every launch.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../checks.h"
#include "strips.h"

namespace specdec_fast::gpu {

inline Strided strided(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  return {static_cast<char*>(x.data_ptr()), {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()},
          static_cast<int64_t>(x.element_size())};
}

inline Strided strided(const std::optional<Tensor>& x) {
  if (!x) return {};
  return strided(*x);
}

inline std::vector<Strided> strided(const Tensors& tensors) {
  std::vector<Strided> all;
  for (const Tensor& x : tensors) all.push_back(strided(x));
  return all;
}

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int processors(const Tensor& x) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, x.get_device_index()));
  return count;
}

}  // namespace specdec_fast::gpu
