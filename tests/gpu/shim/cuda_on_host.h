// Compiles CUDA kernels for the host: one thread for each CUDA thread, a barrier for __syncthreads.
//
// SHIM_CONC blocks run side by side, with nothing that orders one against another, so that ThreadSanitizer sees races
// between blocks too.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  unsigned x;
};

namespace shim {

// Not std::barrier: libstdc++ waits in a pool that all barriers share, from which ThreadSanitizer concludes that
// unrelated blocks are ordered.
class Barrier {
 public:
  explicit Barrier(unsigned threads) : threads_(threads) {}

  void wait() {
    std::unique_lock lock(mutex_);
    const uint64_t round = round_;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned threads_, arrived_ = 0;
  uint64_t round_ = 0;
};

struct alignas(16) Chunk {
  char bytes[16];
};

struct Block {
  Block(unsigned threads, size_t shared_bytes) : barrier(threads), end(threads), shared((shared_bytes + 15) / 16) {}
  Barrier barrier, end;
  std::vector<Chunk> shared;
};

inline thread_local Block* block = nullptr;
inline thread_local Index thread_index, block_index;
inline Index block_extent;

inline unsigned concurrent_blocks() {
  const char* value = std::getenv("SHIM_CONC");
  return value ? std::atoi(value) : 1;
}

template <class Kernel>
void launch(unsigned blocks, unsigned threads, size_t shared_bytes, Kernel&& kernel) {
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  // a kernel may not rely on the order of its blocks
  std::shuffle(order.begin(), order.end(), std::mt19937());
  block_extent = {threads};
  const unsigned groups = std::min(blocks, concurrent_blocks());
  std::vector<std::unique_ptr<Block>> places;
  std::vector<std::thread> running;
  for (unsigned group = 0; group < groups; ++group) {
    places.push_back(std::make_unique<Block>(threads, shared_bytes));
    for (unsigned thread = 0; thread < threads; ++thread)
      running.emplace_back([&, group, thread, place = places.back().get()] {
        block = place;
        thread_index = {thread};
        for (unsigned i = group; i < blocks; i += groups) {
          block_index = {order[i]};
          kernel();
          // a thread that returned early still waits for the others here
          place->end.wait();
        }
      });
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace shim

#define threadIdx (::shim::thread_index)
#define blockIdx (::shim::block_index)
#define blockDim (::shim::block_extent)

inline void __syncthreads() { ::shim::block->barrier.wait(); }
inline void __trap() { std::abort(); }
inline char* dynamic_shared() { return ::shim::block->shared.data()->bytes; }
