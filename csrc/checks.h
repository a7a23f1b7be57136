#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "common.h"

// Argument checks before any byte moves; specdec_fast/operators/checks.py makes the same.
namespace specdec_fast {

constexpr int64_t kAnySize = -1;

struct ShapeText {
  const int64_t* sizes;
  size_t dims;
};

inline std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
  out << '[';
  for (size_t i = 0; i < shape.dims; ++i) {
    out << (i ? ", " : "");
    if (shape.sizes[i] == kAnySize) out << '*';
    else out << shape.sizes[i];
  }
  return out << ']';
}

inline std::string text(const Device& device) {
  if (device.is_cpu()) return "cpu";
  const std::string type = device.is_cuda() ? "cuda" : "device type " + std::to_string(static_cast<int>(device.type()));
  return type + ':' + std::to_string(device.index());
}

inline void need(const Name& name, const Tensor& x, std::initializer_list<int64_t> shape, const Device& device,
                 ScalarType dtype = ScalarType::Long) {
  const auto sizes = x.sizes();
  const bool fits = sizes.size() == shape.size() &&
                    std::equal(shape.begin(), shape.end(), sizes.begin(),
                               [](int64_t wanted, int64_t given) { return wanted == kAnySize || wanted == given; });
  if (!fits || x.scalar_type() != dtype || x.device() != device)
    refuse(name, " is ", toString(x.scalar_type()), ' ', ShapeText{sizes.data(), sizes.size()}, " on ",
           text(x.device()), "; need ", toString(dtype), ' ', ShapeText{shape.begin(), shape.size()}, " on ", text(device));
}

inline void need_kv(const Name& name, const Tensor& x, int64_t rows, const Device& device) {
  need(name, x, {rows, kAnySize, kAnySize, kAnySize}, device, x.scalar_type());
  const size_t element = x.element_size();
  if (element != 1 && element != 2 && element != 4 && element != 8)
    refuse(name, " has elements of ", element, " bytes; need 1, 2, 4 or 8");
}

inline void need_caches(const Tensors& caches, int64_t rows, const Device& device) {
  for (size_t i = 0; i < caches.size(); ++i) need_kv({"caches", static_cast<int64_t>(i)}, caches[i], rows, device);
}

// The memory of an argument: four dimensions from large strides to small; those of size 1 count as stride 0.
struct Span {
  struct Dim {
    int64_t stride, count;
  };

  Span(const Name& name, const Tensor& x, bool written) : name(name), written(written) {
    const View view(x);
    element = view.element;
    begin = reinterpret_cast<int64_t>(view.data);
    bool empty = false;
    for (int i = 0; i < 4; ++i) {
      empty = empty || view.size[i] == 0;
      const Dim dim{view.size[i] == 1 ? 0 : view.stride[i], view.size[i]};
      int at = i;
      for (; at > 0 && dims[at - 1].stride < dim.stride; --at) dims[at] = dims[at - 1];
      dims[at] = dim;
    }
    end = empty ? begin : begin + extent(0);
  }

  // Bytes from the first to the last of the dimensions from `dim` on.
  int64_t extent(int dim) const {
    int64_t bytes = element;
    for (; dim < 4; ++dim) bytes += dims[dim].stride * (dims[dim].count - 1);
    return bytes;
  }

  bool overlaps_itself() const {
    for (int i = 0; i < 4; ++i)
      if (dims[i].count > 1 && dims[i].stride < extent(i + 1)) return true;
    return false;
  }

  Name name;
  bool written;
  int64_t element, begin, end;
  Dim dims[4];
};

inline int64_t floor_div(int64_t n, int64_t by) { return n / by - (n % by < 0); }

// True if b, `gap` bytes after a, shares a byte with it, from dimensions i and j on: exact for views of one layout,
// else cautious.
inline bool meet(int64_t gap, const Span& a, const Span& b, int i = 0, int j = 0) {
  if (gap >= a.extent(i) || -gap >= b.extent(j)) return false;
  const int64_t a_stride = i < 4 ? a.dims[i].stride : 0, b_stride = j < 4 ? b.dims[j].stride : 0;
  const int64_t stride = std::max(a_stride, b_stride);
  if (stride == 0) return true;
  // index p of a and q of b leave a gap of gap + (q - p) * stride to the smaller strides
  const int64_t a_count = a_stride == stride ? a.dims[i++].count : 1;
  const int64_t b_count = b_stride == stride ? b.dims[j++].count : 1;
  const int64_t low = std::max(-floor_div(b.extent(j) - 1 + gap, stride), 1 - a_count);
  const int64_t high = std::min(floor_div(a.extent(i) - 1 - gap, stride), b_count - 1);
  // views of one layout leave two candidates at most
  if (high - low > 1) return true;
  for (int64_t k = low; k <= high; ++k)
    if (meet(gap + k * stride, a, b, i, j)) return true;
  return false;
}

inline void need_disjoint(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<const Span*> open;
  for (const Span& span : spans) {
    if (span.begin == span.end) continue;
    if (span.written && span.overlaps_itself())
      refuse(span.name, " has elements that share memory; it is written in place, so each needs its own");
    open.erase(std::remove_if(open.begin(), open.end(), [&](const Span* other) { return other->end <= span.begin; }),
               open.end());
    for (const Span* other : open)
      if ((span.written || other->written) && meet(span.begin - other->begin, *other, span))
        refuse(other->name, " and ", span.name, " share memory; what is written in place must be apart");
    open.push_back(&span);
  }
}

inline void add_spans(std::vector<Span>& spans, const char* name, const Tensors& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i)
    spans.emplace_back(Name(name, static_cast<int64_t>(i)), tensors[i], true);
}

inline void check_realign(const Tensors& caches, const Tensor& start, const Tensor& num_columns, const Tensor& shift) {
  const Device device = start.device();
  need("start", start, {kAnySize}, device);
  const int64_t rows = start.size(0);
  need("num_columns", num_columns, {rows}, device);
  need("shift", shift, {rows}, device);
  need_caches(caches, rows, device);
  std::vector<Span> spans{{"start", start, false}, {"num_columns", num_columns, false}, {"shift", shift, false}};
  add_spans(spans, "caches", caches);
  need_disjoint(std::move(spans));
}

inline void check_append_kv(const Tensor& k_pool, const Tensor& v_pool, const Tensor& k, const Tensor& v,
                            const Tensor& row_of, const Tensor& position_of) {
  const Device device = row_of.device();
  need("row_of", row_of, {kAnySize}, device);
  const int64_t tokens = row_of.size(0);
  need("position_of", position_of, {tokens}, device);
  need_kv("k_pool", k_pool, kAnySize, device);
  need_kv("v_pool", v_pool, kAnySize, device);
  if (k_pool.size(0) != v_pool.size(0))
    refuse("v_pool has ", v_pool.size(0), " rows, k_pool ", k_pool.size(0), "; need equal");
  need("k", k, {1, k_pool.size(1), tokens, k_pool.size(3)}, device, k_pool.scalar_type());
  need("v", v, {1, v_pool.size(1), tokens, v_pool.size(3)}, device, v_pool.scalar_type());
  need_disjoint({{"k_pool", k_pool, true}, {"v_pool", v_pool, true}, {"k", k, false}, {"v", v, false},
                 {"row_of", row_of, false}, {"position_of", position_of, false}});
}

// The arguments of ragged_attention_ in the order of its schema.
struct Attention {
  const Tensor &out, &query, &k_pool, &v_pool, &table;
  double scale;
  const std::optional<int64_t>& window;
  const std::optional<double>& soft_cap;
  const std::optional<Tensor>& sinks;
};

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

inline void check_attention(const Attention& a) {
  const Device device = a.query.device();
  const ScalarType dtype = a.query.scalar_type();
  if (!is_float(dtype)) refuse("query is ", toString(dtype), "; need float16, bfloat16, float32 or float64");
  need("query", a.query, {1, kAnySize, kAnySize, kAnySize}, device, dtype);
  const int64_t query_heads = a.query.size(1), tokens = a.query.size(2);
  need("k_pool", a.k_pool, {kAnySize, kAnySize, kAnySize, a.query.size(3)}, device, dtype);
  const int64_t slots = a.k_pool.size(0), heads = a.k_pool.size(1), capacity = a.k_pool.size(2);
  need("v_pool", a.v_pool, {slots, heads, capacity, kAnySize}, device, dtype);
  if (heads == 0 || query_heads % heads)
    refuse("query has ", query_heads, " heads, k_pool ", heads, "; need a multiple");
  if (a.window && *a.window < 1) refuse("window is ", *a.window, "; need at least 1, or None for full attention");
  if (a.soft_cap && !(*a.soft_cap > 0)) refuse("soft_cap is ", *a.soft_cap, "; need more than 0, or None for no cap");
  if (a.sinks) {
    need("sinks", *a.sinks, {query_heads}, device, a.sinks->scalar_type());
    if (!is_float(a.sinks->scalar_type()))
      refuse("sinks is ", toString(a.sinks->scalar_type()), "; need float16, bfloat16, float32 or float64");
  }
  need("out", a.out, {1, tokens, query_heads, a.v_pool.size(3)}, device, dtype);
  need("table", a.table, {4, kAnySize}, device);
  std::vector<Span> spans{{"out", a.out, true}, {"query", a.query, false}, {"k_pool", a.k_pool, false},
                          {"v_pool", a.v_pool, false}, {"table", a.table, false}};
  if (a.sinks) spans.emplace_back("sinks", *a.sinks, false);
  need_disjoint(std::move(spans));
}

// The arguments of realign_step_ in the order of its schema.
struct Step {
  const Tensors& caches;
  const Tensor &tokens, &draft_ids, &target_ids, &limit, &max_length, &stop_ids;
  const std::optional<Tensor>& n_accepted;
  const Tensor &start, &length, &new_start, &new_length, &position_ids;
  const Tensors& masks;
  const std::vector<int64_t>& windows;
  const Tensor& summary;
  int64_t max_position, placement;
};

inline bool is_mask_dtype(ScalarType dtype) {
  return dtype == ScalarType::Bool || dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
         dtype == ScalarType::Float || dtype == ScalarType::Double;
}

inline void check_realign_step(const Step& a) {
  const Device device = a.start.device();
  need("start", a.start, {kAnySize}, device);
  const int64_t rows = a.start.size(0);
  if (rows == 0) refuse("start is empty; need at least one row");
  need("draft_ids", a.draft_ids, {rows, kAnySize}, device);
  const int64_t num_drafts = a.draft_ids.size(1);
  need("target_ids", a.target_ids, {rows, num_drafts + 1}, device);
  need("limit", a.limit, {rows}, device);
  need("max_length", a.max_length, {rows}, device);
  need("length", a.length, {rows}, device);
  need("new_start", a.new_start, {rows}, device);
  need("new_length", a.new_length, {rows}, device);
  if (a.n_accepted) need("n_accepted", *a.n_accepted, {rows}, device);
  need("stop_ids", a.stop_ids, {kAnySize}, device);
  need("tokens", a.tokens, {rows, kAnySize}, device);
  need("position_ids", a.position_ids, {rows, kAnySize}, device);
  need("summary", a.summary, {rows, num_drafts + 4}, device);
  need_caches(a.caches, rows, device);
  for (size_t i = 0; i < a.masks.size(); ++i) {
    const Name name("masks", static_cast<int64_t>(i));
    const ScalarType dtype = a.masks[i].scalar_type();
    if (!is_mask_dtype(dtype)) refuse(name, " is ", toString(dtype), "; need bool, float16, bfloat16, float32 or float64");
    need(name, a.masks[i], {rows, 1, a.position_ids.size(1), kAnySize}, device, dtype);
  }
  if (a.windows.size() != a.masks.size())
    refuse("windows has ", a.windows.size(), " entries, masks ", a.masks.size(), "; need one window for each mask");
  for (size_t i = 0; i < a.windows.size(); ++i)
    if (a.windows[i] < 0) refuse("windows[", i, "] is ", a.windows[i], "; need a size, or 0 for full attention");
  if (a.max_position < 0) refuse("max_position is ", a.max_position, "; need at least 0");
  if (a.placement != 0 && a.placement != 1) refuse("placement is ", a.placement, "; need 0 (minimal move) or 1 (packed)");

  std::vector<Span> spans{
      {"tokens", a.tokens, true},           {"new_start", a.new_start, true}, {"new_length", a.new_length, true},
      {"position_ids", a.position_ids, true}, {"summary", a.summary, true},   {"draft_ids", a.draft_ids, false},
      {"target_ids", a.target_ids, false},  {"limit", a.limit, false},        {"max_length", a.max_length, false},
      {"stop_ids", a.stop_ids, false},      {"start", a.start, false},        {"length", a.length, false}};
  if (a.n_accepted) spans.emplace_back("n_accepted", *a.n_accepted, false);
  add_spans(spans, "caches", a.caches);
  add_spans(spans, "masks", a.masks);
  need_disjoint(std::move(spans));
}

}  // namespace specdec_fast
