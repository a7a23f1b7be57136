#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace specdec_fast {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Raises RuntimeError; STD_TORCH_CHECK would put build paths into the message.
template <class... Args>
[[noreturn]] void refuse(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::runtime_error(message.str());
}

// An argument as messages call it: "start", or "caches[3]".
struct Name {
  Name(const char* text, int64_t index = -1) : text(text), index(index) {}
  const char* text;
  int64_t index;
};

inline std::ostream& operator<<(std::ostream& out, const Name& name) {
  out << name.text;
  return name.index < 0 ? out : out << '[' << name.index << ']';
}

// A tensor of up to four dimensions; strides and element size in bytes.
struct View {
  explicit View(const Tensor& x)
      : data(static_cast<char*>(x.data_ptr())), element(static_cast<int64_t>(x.element_size())), dims(x.dim()) {
    const auto sizes = x.sizes(), strides = x.strides();
    for (int64_t i = 0; i < dims; ++i) {
      size[i] = sizes[i];
      stride[i] = strides[i] * element;
    }
  }

  template <class T>
  T& at(int64_t i, int64_t j = 0) const {
    return *reinterpret_cast<T*>(data + i * stride[0] + j * stride[1]);
  }

  char* data;
  int64_t element;
  int64_t dims;
  int64_t size[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};
};

inline std::vector<View> views(const Tensors& tensors) { return std::vector<View>(tensors.begin(), tensors.end()); }

}  // namespace specdec_fast
