#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "../checks.h"

#define SPECDEC_FAST_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define SPECDEC_FAST_SHUFFLE(a, b, Index, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPECDEC_FAST_SHUFFLE(a, b, Index, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

namespace specdec_fast {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// Columns that are scored together.
constexpr int64_t kTile = 64;
// Vectors for each query that registers hold.
constexpr int64_t kGroup = 4;
// Tokens of a piece of a long segment: pieces run in parallel, and the queries of one fit into a cache.
constexpr int64_t kPiece = 64;
// Multiply-adds below which another thread costs more than it saves.
constexpr int64_t kGrain = 1 << 17;

// Sums are of type W, in vectors of kBytes, for kQueries queries at a time.
template <class W, int kBytes, int kQueries>
struct Shape {
  using Wide = W;
  static constexpr int64_t lanes = kBytes / sizeof(Wide);
  static constexpr int queries = kQueries;
  typedef Wide Vector __attribute__((vector_size(kBytes)));
  // as it lies in an array of Wide
  typedef Wide Stored __attribute__((vector_size(kBytes), aligned(alignof(Wide)), may_alias));
  using Integer = std::conditional_t<sizeof(Wide) == 4, int32_t, int64_t>;
  typedef Integer Index __attribute__((vector_size(kBytes)));
};

// Tokens [start, end) of the row in `slot`; the first of them is packed token `first`.
struct Segment {
  int64_t slot, start, end, first;
};

struct Problem {
  View out, query, k_pool, v_pool;
  double scale, soft_cap;
  int64_t window, groups;
  // of each query head, or empty
  std::vector<double> sinks;
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

SPECDEC_FAST_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
SPECDEC_FAST_INLINE float widen(Half x) { return x; }
SPECDEC_FAST_INLINE float widen(float x) { return x; }
SPECDEC_FAST_INLINE double widen(double x) { return x; }

// e^x of x <= 0 within 2 units in the last place, and 0 where that is below all normal numbers, in a form that compilers
// vectorize (Cephes).
SPECDEC_FAST_INLINE float exponential(float x) {
  const float least = -87.0f, magic = 12582912.0f;
  const float z = x < least ? least : x;
  const float n = (z * 1.44269504f + magic) - magic;
  const float r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < least ? 0.0f : y * power;
}
SPECDEC_FAST_INLINE double exponential(double x) { return std::exp(x); }

// Lane of two rows, those of the second counted after those of the first, that goes to `lane` of the first or second
// when bit kStep of row and lane change places.
template <int kStep, bool kSecond>
constexpr int exchanged(int lane, int size) {
  if (kSecond) return lane & kStep ? size + lane : lane + kStep;
  return lane & kStep ? size + lane - kStep : lane;
}

// Transposes the bits from kStep on of a square of rows.
template <int kStep, class S, size_t... kLane>
SPECDEC_FAST_INLINE void transpose(typename S::Vector* rows, std::index_sequence<kLane...> lanes) {
  if constexpr (kStep < S::lanes) {
    for (int i = 0; i < S::lanes; ++i) {
      if (i & kStep) continue;
      const auto a = rows[i], b = rows[i + kStep];
      rows[i] = SPECDEC_FAST_SHUFFLE(a, b, typename S::Index, exchanged<kStep, false>(kLane, S::lanes)...);
      rows[i + kStep] = SPECDEC_FAST_SHUFFLE(a, b, typename S::Index, exchanged<kStep, true>(kLane, S::lanes)...);
    }
    transpose<2 * kStep, S>(rows, lanes);
  }
}

// The queries of a segment and KV head: token by token, the query heads of that KV head.
template <class Wide>
struct Queries {
  Queries(int64_t count, int64_t dim, int64_t value_lanes)
      : count(count), dim(dim), value_lanes(value_lanes), lines(count * dim), sums(count * value_lanes),
        peaks(count), totals(count), scores(count * kTile), keys(dim * kTile), values(kTile * value_lanes) {}

  int64_t count, dim, value_lanes;
  std::vector<Wide> lines, sums, peaks, totals, scores;
  // of the tile: keys [dim, kTile], values [kTile, value_lanes]
  std::vector<Wide> keys, values;
};

// Writes `count` values `stride` bytes apart, and zeros, to as many lanes as a vector has.
template <class T, class S>
SPECDEC_FAST_INLINE void load(const char* from, int64_t stride, int64_t count, typename S::Wide* to) {
  typename S::Wide lanes[S::lanes] = {};
  if (count >= S::lanes && stride == sizeof(T)) {
    T whole[S::lanes];
    std::memcpy(whole, from, sizeof whole);
    for (int64_t n = 0; n < S::lanes; ++n) lanes[n] = widen(whole[n]);
  } else {
    for (int64_t n = 0; n < std::min(count, S::lanes); ++n)
      lanes[n] = widen(*reinterpret_cast<const T*>(from + n * stride));
  }
  std::memcpy(to, lanes, sizeof lanes);
}

// Columns [column, column + columns) of a row's head; scores of what is beyond them in the tile count for nothing.
template <class T, class S>
SPECDEC_FAST_INLINE void load_tile(Queries<typename S::Wide>& q, const Problem& p, int64_t slot, int64_t head,
                                   int64_t column, int64_t columns) {
  const View &k = p.k_pool, &v = p.v_pool;
  const char* keys = k.data + slot * k.stride[0] + head * k.stride[1] + column * k.stride[2];
  const char* values = v.data + slot * v.stride[0] + head * v.stride[1] + column * v.stride[2];
  for (int64_t j = 0; j < columns; j += S::lanes)
    for (int64_t d = 0; d < q.dim; d += S::lanes) {
      typename S::Vector square[S::lanes] = {};
      for (int64_t i = 0; i < std::min(S::lanes, columns - j); ++i)
        load<T, S>(keys + (j + i) * k.stride[2] + d * k.stride[3], k.stride[3], q.dim - d,
                   reinterpret_cast<typename S::Wide*>(&square[i]));
      transpose<1, S>(square, std::make_index_sequence<S::lanes>());
      for (int64_t i = 0; i < std::min(S::lanes, q.dim - d); ++i)
        std::memcpy(&q.keys[(d + i) * kTile + j], &square[i], sizeof square[i]);
    }
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t d = 0; d < q.value_lanes; d += S::lanes)
      load<T, S>(values + j * v.stride[2] + d * v.stride[3], v.stride[3], v.size[3] - d,
                 &q.values[j * q.value_lanes + d]);
}

// scores[i, j] = lines[i] . keys[:, j] for `kCount` queries from `i` on.
template <int kCount, class S>
SPECDEC_FAST_INLINE void score(Queries<typename S::Wide>& q, int64_t i) {
  const typename S::Wide* line = &q.lines[i * q.dim];
  for (int64_t lane = 0; lane < kTile; lane += kGroup * S::lanes) {
    typename S::Vector sums[kCount][kGroup] = {};
    for (int64_t d = 0; d < q.dim; ++d) {
      const auto* keys = reinterpret_cast<const typename S::Stored*>(&q.keys[d * kTile + lane]);
      for (int64_t n = 0; n < kGroup; ++n) {
        const typename S::Vector key = keys[n];
        for (int c = 0; c < kCount; ++c) sums[c][n] += line[c * q.dim + d] * key;
      }
    }
    for (int c = 0; c < kCount; ++c) std::memcpy(&q.scores[(i + c) * kTile + lane], sums[c], sizeof sums[c]);
  }
}

// sums[i] += scores[i, first:last] . values for `kCount` queries from `i` on.
template <int kCount, class S>
SPECDEC_FAST_INLINE void add_values(Queries<typename S::Wide>& q, int64_t i, int64_t first, int64_t last) {
  const typename S::Wide* weights = &q.scores[i * kTile];
  for (int64_t lane = 0; lane < q.value_lanes; lane += kGroup * S::lanes) {
    typename S::Vector sums[kCount][kGroup];
    for (int c = 0; c < kCount; ++c) std::memcpy(sums[c], &q.sums[(i + c) * q.value_lanes + lane], sizeof sums[c]);
    for (int64_t j = first; j < last; ++j) {
      const auto* values = reinterpret_cast<const typename S::Stored*>(&q.values[j * q.value_lanes + lane]);
      for (int64_t n = 0; n < kGroup; ++n) {
        const typename S::Vector value = values[n];
        for (int c = 0; c < kCount; ++c) sums[c][n] += weights[c * kTile + j] * value;
      }
    }
    for (int c = 0; c < kCount; ++c) std::memcpy(&q.sums[(i + c) * q.value_lanes + lane], sums[c], sizeof sums[c]);
  }
}

// Turns the scores of query `i` in columns [first, last) of the tile into weights; those elsewhere become 0.
template <class Wide>
SPECDEC_FAST_INLINE void weigh(Queries<Wide>& q, int64_t i, int64_t first, int64_t last, Wide soft_cap) {
  Wide* s = &q.scores[i * kTile];
  if (soft_cap > 0)
    for (int64_t j = first; j < last; ++j) s[j] = soft_cap * std::tanh(s[j] / soft_cap);
  Wide peak = q.peaks[i];
  for (int64_t j = first; j < last; ++j) peak = s[j] > peak ? s[j] : peak;
  // where nothing but -inf was seen yet, every weight is 0
  const Wide base = peak == -std::numeric_limits<Wide>::infinity() ? Wide(0) : peak;
  Wide total = 0;
  for (int64_t j = 0; j < first; ++j) s[j] = 0;
  for (int64_t j = last; j < kTile; ++j) s[j] = 0;
  for (int64_t j = first; j < last; ++j) s[j] = exponential(s[j] - base);
  for (int64_t j = first; j < last; ++j) total += s[j];
  const Wide decay = exponential(q.peaks[i] - base);
  q.totals[i] = q.totals[i] * decay + total;
  q.peaks[i] = peak;
  if (decay != 1)
    for (int64_t lane = 0; lane < q.value_lanes; ++lane) q.sums[i * q.value_lanes + lane] *= decay;
}

template <class T, class S>
SPECDEC_FAST_INLINE void attend_segment(const Problem& p, const Segment& segment, int64_t head) {
  using Wide = typename S::Wide;
  const int64_t tokens = segment.end - segment.start, value_dim = p.v_pool.size[3];
  Queries<Wide> q(tokens * p.groups, p.query.size[3], round_up(value_dim, kGroup * S::lanes));
  for (int64_t i = 0; i < q.count; ++i) {
    const int64_t query_head = head * p.groups + i % p.groups;
    const char* line = p.query.data + query_head * p.query.stride[1] + (segment.first + i / p.groups) * p.query.stride[2];
    for (int64_t d = 0; d < q.dim; ++d)
      q.lines[i * q.dim + d] = widen(*reinterpret_cast<const T*>(line + d * p.query.stride[3])) * Wide(p.scale);
    q.peaks[i] = p.sinks.empty() ? -std::numeric_limits<Wide>::infinity() : Wide(p.sinks[query_head]);
    q.totals[i] = p.sinks.empty() ? 0 : 1;
  }
  const int64_t low = std::max<int64_t>(0, segment.start + 1 - p.window);
  for (int64_t column = low; column < segment.end; column += kTile) {
    const int64_t columns = std::min(kTile, segment.end - column);
    load_tile<T, S>(q, p, segment.slot, head, column, columns);
    // queries whose tokens see any of the tile
    const int64_t begin = std::max<int64_t>(0, column - segment.start) * p.groups;
    const int64_t end = std::min(tokens, column + columns - 1 + p.window - segment.start) * p.groups;
    const auto first_seen = [&](int64_t i) __attribute__((always_inline)) {
      return std::max<int64_t>(0, segment.start + i / p.groups + 1 - p.window - column);
    };
    const auto last_seen = [&](int64_t i) __attribute__((always_inline)) {
      return std::min(columns, segment.start + i / p.groups + 1 - column);
    };
    const auto attend_from = [&](int64_t i, auto count) __attribute__((always_inline)) {
      score<count, S>(q, i);
      for (int c = 0; c < count; ++c) weigh(q, i + c, first_seen(i + c), last_seen(i + c), Wide(p.soft_cap));
      add_values<count, S>(q, i, first_seen(i), last_seen(i + count - 1));
    };
    int64_t i = begin;
    for (; i + S::queries <= end; i += S::queries) attend_from(i, std::integral_constant<int, S::queries>());
    for (; i < end; ++i) attend_from(i, std::integral_constant<int, 1>());
  }
  for (int64_t i = 0; i < q.count; ++i) {
    char* line = p.out.data + (segment.first + i / p.groups) * p.out.stride[1] +
                 (head * p.groups + i % p.groups) * p.out.stride[2];
    for (int64_t d = 0; d < value_dim; ++d)
      *reinterpret_cast<T*>(line + d * p.out.stride[3]) = static_cast<T>(q.sums[i * q.value_lanes + d] / q.totals[i]);
  }
}

template <int kBytes, int kQueries>
SPECDEC_FAST_INLINE void attend_any(const Problem& p, const Segment& segment, int64_t head, ScalarType dtype) {
  using Single = Shape<float, kBytes, kQueries>;
  switch (dtype) {
    case ScalarType::BFloat16: return attend_segment<BFloat16, Single>(p, segment, head);
    case ScalarType::Half: return attend_segment<Half, Single>(p, segment, head);
    case ScalarType::Float: return attend_segment<float, Single>(p, segment, head);
    default: return attend_segment<double, Shape<double, kBytes, kQueries>>(p, segment, head);
  }
}

using Attend = void (*)(const Problem&, const Segment&, int64_t, ScalarType);

void attend(const Problem& p, const Segment& s, int64_t head, ScalarType dtype) { attend_any<16, 2>(p, s, head, dtype); }

#ifdef __x86_64__
__attribute__((target("avx2,fma"))) void attend_avx2(const Problem& p, const Segment& s, int64_t head,
                                                     ScalarType dtype) {
  attend_any<32, 2>(p, s, head, dtype);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void attend_avx512(const Problem& p, const Segment& s,
                                                                                     int64_t head, ScalarType dtype) {
  attend_any<64, 4>(p, s, head, dtype);
}

// The widest vectors that the processor has and, as in torch itself, the environment allows.
Attend widest() {
  const char* allowed = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string most = allowed ? allowed : "";
  if (most == "default") return attend;
  const bool has_avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && most != "avx2") return attend_avx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? attend_avx2 : attend;
}
#else
Attend widest() { return attend; }
#endif

double value_of(const Tensor& x, int64_t i) {
  const View view(x);
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: return widen(view.at<BFloat16>(i));
    case ScalarType::Half: return widen(view.at<Half>(i));
    case ScalarType::Float: return view.at<float>(i);
    default: return view.at<double>(i);
  }
}

// The segments that exist, long ones in pieces.
std::vector<Segment> segments_of(const Tensor& table, int64_t slots, int64_t capacity, int64_t tokens) {
  const View rows(table);
  std::vector<Segment> segments;
  int64_t taken = 0;
  for (int64_t s = 0; s < rows.size[1]; ++s) {
    const int64_t slot = rows.at<int64_t>(0, s), end = rows.at<int64_t>(1, s), size = rows.at<int64_t>(2, s),
                  first = rows.at<int64_t>(3, s);
    if (size == 0) continue;
    if (slot < 0 || slot >= slots || end > capacity || size < 0 || size > end || first < 0 || first > tokens - size)
      refuse("table[:, ", s, "] is [", slot, ", ", end, ", ", size, ", ", first, "]; need a slot in 0..", slots - 1,
             ", an end in 0..", capacity, ", a size up to the end, and a first token that leaves room in ", tokens);
    if (first < taken)
      refuse("table[3, ", s, "] is ", first, "; the segments before it take tokens up to ", taken - 1);
    for (int64_t n = 0; n < size; n += kPiece)
      segments.push_back({slot, end - size + n, end - size + std::min(size, n + kPiece), first + n});
    taken = first + size;
  }
  return segments;
}

void ragged_attention_cpu(const Tensor& out, const Tensor& query, const Tensor& k_pool, const Tensor& v_pool,
                          const Tensor& table, double scale, std::optional<int64_t> window,
                          std::optional<double> soft_cap, std::optional<Tensor> sinks) {
  check_attention({out, query, k_pool, v_pool, table, scale, window, soft_cap, sinks});
  const int64_t heads = k_pool.size(1), capacity = k_pool.size(2);
  const std::vector<Segment> segments = segments_of(table, k_pool.size(0), capacity, query.size(2));
  Problem p{View(out), View(query), View(k_pool), View(v_pool), scale, soft_cap.value_or(0),
            std::min(window.value_or(capacity), capacity), query.size(1) / heads, {}};
  if (sinks)
    for (int64_t i = 0; i < query.size(1); ++i) p.sinks.push_back(value_of(*sinks, i));
  int64_t work = 0;
  for (const Segment& s : segments) work += (s.end - s.start) * s.end * p.groups * (query.size(3) + v_pool.size(3));
  const int64_t units = static_cast<int64_t>(segments.size()) * heads;
  if (units == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrain * units / std::max<int64_t>(1, work * heads));
  static const Attend attend_widest = widest();
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit)
      attend_widest(p, segments[unit / heads], unit % heads, query.scalar_type());
  });
}

}  // namespace
}  // namespace specdec_fast

STABLE_TORCH_LIBRARY_IMPL(specdec_fast, CPU, m) {
  m.impl("ragged_attention_", TORCH_BOX(&specdec_fast::ragged_attention_cpu));
}
