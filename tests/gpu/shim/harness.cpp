// Runs the CUDA kernels on the host, on cases that tests/gpu/harness.py writes; as a library, packs kernel parameters.
#include "cuda_on_host.h"
// after the shim, which stands in for CUDA
#include <cstdio>
#include <cstring>
#include <fstream>

#include "append_kv_launch.h"
#include "realign_launch.h"

using namespace specdec_fast::gpu;

namespace {

// Of its own size, so that AddressSanitizer sees an access beyond it.
struct Storage {
  std::unique_ptr<char[]> bytes;
  std::vector<char> expected;
};

// A case as words. A tensor is: base, offset, element bytes, dimensions, sizes, strides. The base is an address, or in
// a file the number of a storage; -1 stands for no tensor.
class Words {
 public:
  Words(const int64_t* at, const std::vector<Storage>* storages = nullptr) : at_(at), storages_(storages) {}

  int64_t next() { return *at_++; }

  Strided tensor() {
    Strided x{};
    const int64_t base = next(), offset = next();
    if (base >= 0) x.data = (storages_ ? storages_->at(base).bytes.get() : reinterpret_cast<char*>(base)) + offset;
    x.element_bytes = next();
    const int64_t dims = next();
    for (int64_t i = 0; i < dims; ++i) x.sizes.push_back(next());
    for (int64_t i = 0; i < dims; ++i) x.strides.push_back(next());
    return x;
  }

  std::vector<Strided> tensors() {
    std::vector<Strided> all(next());
    for (Strided& x : all) x = tensor();
    return all;
  }

  std::vector<int64_t> numbers() {
    std::vector<int64_t> all(next());
    for (int64_t& x : all) x = next();
    return all;
  }

 private:
  const int64_t* at_;
  const std::vector<Storage>* storages_;
};

struct RunOnHost {
  int64_t threads;

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, int64_t shared_bytes, const Arguments&... arguments) {
    if (blocks) shim::launch(blocks, threads, shared_bytes, [&] { kernel(arguments...); });
  }
};

// Parameters as a launch passes them, one after the other.
struct Pack {
  char* bytes;
  int64_t* header;  // blocks, shared bytes, then the size of each parameter

  template <class... Parameters, class... Arguments>
  void operator()(void (*)(Parameters...), int64_t blocks, int64_t shared_bytes, const Arguments&... arguments) {
    header[0] = blocks;
    header[1] = shared_bytes;
    int64_t* size = header + 2;
    ((add(arguments), *size++ = sizeof(arguments)), ...);
  }

  template <class T>
  void add(const T& argument) {
    std::memcpy(bytes, &argument, sizeof argument);
    bytes += sizeof argument;
  }
};

template <class Launch>
void realign(Words& words, int threads, int64_t wanted_blocks, Launch launch) {
  const std::vector<CacheStrip> strips = make_strips(words.tensors(), threads, wanted_blocks);
  const Strided start = words.tensor(), num_columns = words.tensor(), shift = words.tensor();
  const int rows = start.sizes[0], heads = most_heads(strips);
  launch(realign_kernel, rows * heads * strips.size(), 0, make_table(strips), rows, heads,
         ids(start), ids(num_columns), ids(shift));
}

template <class Launch>
void realign_step(Words& words, int threads, int64_t wanted_blocks, Launch launch) {
  const std::vector<CacheStrip> strips = make_strips(words.tensors(), threads, wanted_blocks);
  StepTensors x;
  for (Strided* tensor : {&x.tokens, &x.draft_ids, &x.target_ids, &x.limit, &x.max_length, &x.stop_ids, &x.n_accepted,
                          &x.start, &x.length, &x.new_start, &x.new_length, &x.position_ids})
    *tensor = words.tensor();
  x.masks = words.tensors();
  x.windows = words.numbers();
  x.summary = words.tensor();
  x.max_position = words.next();
  x.packed = words.next();
  for (size_t i = 0; i < x.masks.size(); ++i) x.hidden.push_back(words.next());
  const Step step = make_step(x);
  const int heads = most_heads(strips);
  launch(realign_step_kernel, step.small_blocks() + step.rows * heads * strips.size(), step.shared_bytes(),
         make_table(strips), step, heads);
}

template <class Launch>
void append_kv(Words& words, int threads, int64_t, Launch launch) {
  const Strided k_pool = words.tensor(), v_pool = words.tensor(), k = words.tensor(), v = words.tensor();
  const Strided row_of = words.tensor(), position_of = words.tensor();
  std::vector<Scatter> scatters;
  add_scatters(k_pool, k, scatters);
  add_scatters(v_pool, v, scatters);
  const int tokens = row_of.sizes[0], blocks = blocks_per_scatter(scatters, tokens, threads);
  launch(append_kv_kernel, blocks * scatters.size(), 0, make_scatter_table(scatters), tokens, blocks, ids(row_of),
         ids(position_of));
}

template <class Launch>
void run(Words& words, Launch launch) {
  const int64_t operation = words.next(), threads = words.next(), wanted_blocks = words.next();
  if (operation == 0) realign(words, threads, wanted_blocks, launch);
  if (operation == 1) realign_step(words, threads, wanted_blocks, launch);
  if (operation == 2) append_kv(words, threads, wanted_blocks, launch);
}

bool run_case(std::ifstream& file) {
  const auto read = [&](void* to, size_t bytes) { file.read(static_cast<char*>(to), bytes); };
  int64_t count = 0;
  read(&count, sizeof count);
  std::vector<Storage> storages(count);
  for (Storage& storage : storages) {
    read(&count, sizeof count);
    storage.bytes.reset(new char[count]);
    storage.expected.resize(count);
    read(storage.bytes.get(), count);
    read(storage.expected.data(), count);
  }
  read(&count, sizeof count);
  std::vector<int64_t> words(count);
  read(words.data(), count * sizeof(int64_t));
  Words reader(words.data(), &storages);
  run(reader, RunOnHost{words[1]});
  return std::all_of(storages.begin(), storages.end(), [](const Storage& storage) {
    return std::memcmp(storage.bytes.get(), storage.expected.data(), storage.expected.size()) == 0;
  });
}

}  // namespace

extern "C" void pack(const int64_t* words, int64_t* header, char* bytes) {
  Words reader(words);
  run(reader, Pack{bytes, header});
}

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  int failed = 0;
  for (int i = 0; file.peek() != EOF; ++i)
    if (!run_case(file)) {
      std::printf("case %d differs\n", i);
      ++failed;
    }
  return failed != 0;
}
