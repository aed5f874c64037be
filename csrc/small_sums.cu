#include <algorithm>

#include "check.h"
#include "device_words.h"
#include "numbers.h"
#include "small_sums.h"

namespace tpfused {
namespace {

constexpr int threads = 512;
constexpr int64_t one_shot_bytes = 256 << 10;  // with more, and more than two ranks, two-shot

// What the peers write here, and where this rank writes at theirs.
struct Areas {
  char* area[most_ranks];       // the first of the two, which is followed by the other
  uint32_t* flags[most_ranks];  // [turn][phase][from][block]
  uint32_t* counter;            // of sums so far, and then a ticket
  Replays* replays;
  int rank, size;
  bool in_graph;
  int64_t stride;  // bytes from one rank's numbers to the next one's

  __device__ char* numbers(int owner, uint32_t turn, int phase, int from) const {
    return area[owner] + turn * PeerMemory::small_bytes + phase * (PeerMemory::small_bytes / 2) + from * stride;
  }
  __device__ uint32_t* flag(int owner, uint32_t turn, int phase, int from) const {
    return flags[owner] + ((turn * 2 + phase) * most_ranks + from) * PeerMemory::small_blocks + blockIdx.x;
  }

  // All threads of the block have written to the peers -> all have what the peers' blocks of this number have written.
  __device__ void meet(uint32_t epoch, int phase) const {
    __syncthreads();
    int peer = threadIdx.x;
    if (peer < size && peer != rank) {
      __threadfence_system();
      store_release(flag(peer, epoch % 2, phase, rank), epoch);
      wait_until(flag(rank, epoch % 2, phase, peer), epoch, replays);
    }
    __syncthreads();
  }

  // -> the number of this sum. The last block to have read it counts it. The matmul before it may still be writing
  // until `follow_matmul`.
  __device__ uint32_t begin() const {
    __shared__ uint32_t epoch;
    if (threadIdx.x == 0) {
      epoch = *static_cast<volatile uint32_t*>(counter) + 1;
      if (in_graph && blockIdx.x == 0) replays->small_begun = epoch;
      __threadfence();
      if (atomicAdd(counter + 1, 1) == gridDim.x - 1) {
        counter[1] = 0;
        counter[0] = epoch;
      }
    }
    __syncthreads();
    return epoch;
  }

  __device__ void end(uint32_t epoch) const {
    if (in_graph && blockIdx.x == 0 && threadIdx.x == 0) replays->small_ended = epoch;
  }
};

// All that the kernel before this one on the stream has written is seen from now on. `launch` lets this one start while
// that one ends, which hides the start and `begin`.
__device__ void follow_matmul() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// What a peer has written is not to come from this multiprocessor's cache.
__device__ int4 read(const char* from) { return __ldcg(reinterpret_cast<const int4*>(from)); }
__device__ void write(char* to, int4 value) { *reinterpret_cast<int4*>(to) = value; }

// The sum of all ranks' vector, of which this rank's lies at `own` and the others' at `numbers` + `at`.
template <typename T>
__device__ int4 sum_of(const Areas& areas, uint32_t turn, const char* own, int64_t at, const T* bias) {
  constexpr int width = 16 / sizeof(T);
  using Numbers = Vector<T, width>;
  float sums[width] = {};
  for (int from = 0; from < areas.size; ++from) {
    int4 value =
        from == areas.rank ? *reinterpret_cast<const int4*>(own) : read(areas.numbers(areas.rank, turn, 0, from) + at);
    reinterpret_cast<const Numbers&>(value).add_to(sums);
  }
  if (bias) {  // it need not be aligned
#pragma unroll
    for (int j = 0; j < width; ++j) sums[j] += to_float(bias[j]);
  }
  Numbers out = Numbers::rounded(sums);
  return reinterpret_cast<const int4&>(out);
}

template <typename T>
__global__ void __launch_bounds__(threads)
    one_shot(Areas areas, char* y, const char* part, const T* bias, int64_t vectors, int64_t n) {
  constexpr int width = 16 / sizeof(T);
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  int64_t first = blockIdx.x * threads + threadIdx.x, step = static_cast<int64_t>(gridDim.x) * threads;
  for (int64_t i = first; i < vectors; i += step) {
    int4 value = *reinterpret_cast<const int4*>(part + i * 16);
    for (int ahead = 1; ahead < areas.size; ++ahead) {
      int peer = (areas.rank + ahead) % areas.size;
      write(areas.numbers(peer, turn, 0, areas.rank) + i * 16, value);
    }
  }
  areas.meet(epoch, 0);
  for (int64_t i = first; i < vectors; i += step) {
    write(y + i * 16, sum_of(areas, turn, part + i * 16, i * 16, bias ? bias + i * width % n : nullptr));
  }
  areas.end(epoch);
}

template <typename T>
__global__ void __launch_bounds__(threads)
    two_shot(Areas areas, char* y, const char* part, const T* bias, int64_t vectors, int64_t n) {
  constexpr int width = 16 / sizeof(T);
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  int64_t first = blockIdx.x * threads + threadIdx.x, step = static_cast<int64_t>(gridDim.x) * threads;
  int64_t share = areas.stride / 16;  // vectors that a rank adds; the last ones may have fewer
  auto count = [&](int owner) { return min(share, vectors - owner * share); };
  for (int ahead = 1; ahead < areas.size; ++ahead) {
    int peer = (areas.rank + ahead) % areas.size;
    for (int64_t i = first; i < count(peer); i += step) {
      int4 value = *reinterpret_cast<const int4*>(part + (peer * share + i) * 16);
      write(areas.numbers(peer, turn, 0, areas.rank) + i * 16, value);
    }
  }
  areas.meet(epoch, 0);
  for (int64_t i = first; i < count(areas.rank); i += step) {
    int64_t at = areas.rank * share + i;
    int4 sum = sum_of(areas, turn, part + at * 16, i * 16, bias ? bias + at * width % n : nullptr);
    write(y + at * 16, sum);
    for (int ahead = 1; ahead < areas.size; ++ahead) {
      int peer = (areas.rank + ahead) % areas.size;
      write(areas.numbers(peer, turn, 1, areas.rank) + i * 16, sum);
    }
  }
  areas.meet(epoch, 1);
  for (int ahead = 1; ahead < areas.size; ++ahead) {
    int peer = (areas.rank + ahead) % areas.size;
    for (int64_t i = first; i < count(peer); i += step) {
      write(y + (peer * share + i) * 16, read(areas.numbers(areas.rank, turn, 1, peer) + i * 16));
    }
  }
  areas.end(epoch);
}

int64_t vectors_of(int64_t rows, int64_t n, Type type) { return rows * n * static_cast<int64_t>(size_of(type)) / 16; }

bool by_one_shot(const Group& group, int64_t vectors) { return group.size == 2 || vectors * 16 <= one_shot_bytes; }

int64_t stride_of(const Group& group, int64_t vectors) {
  return 16 * (by_one_shot(group, vectors) ? vectors : (vectors + group.size - 1) / group.size);
}

template <typename T>
void launch(const Areas& areas, bool once, bool starts_early, void* y, const void* part, const void* bias,
            int64_t vectors, int64_t n, cudaStream_t stream) {
  int64_t each = once ? vectors : areas.stride / 16;
  int blocks = static_cast<int>(std::clamp<int64_t>((each + threads - 1) / threads, 1, PeerMemory::small_blocks));
  auto kernel = once ? one_shot<T> : two_shot<T>;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, areas, static_cast<char*>(y), static_cast<const char*>(part),
                           static_cast<const T*>(bias), vectors, n),
        "small_all_reduce");
}

}  // namespace

bool is_small_sum(const Group& group, int64_t rows, int64_t n, Type type) {
  int64_t vectors = vectors_of(rows, n, type);
  int64_t room = PeerMemory::small_bytes / (by_one_shot(group, vectors) ? 1 : 2);
  bool fits = stride_of(group, vectors) * group.size <= room;
  return n * size_of(type) % 16 == 0 && vectors > 0 && fits;
}

void small_all_reduce(Group& group, void* y, const void* part, const void* bias, int64_t rows, int64_t n, Type type,
                      cudaStream_t stream) {
  int64_t vectors = vectors_of(rows, n, type);
  Areas areas{};
  for (int rank = 0; rank < group.size; ++rank) {
    areas.area[rank] = group.peers->small(rank, 0);
    areas.flags[rank] = group.peers->small_flags(rank);
  }
  areas.counter = group.peers->small_counter();
  areas.replays = group.replays();
  areas.in_graph = group.capturing();
  areas.rank = group.rank;
  areas.size = group.size;
  areas.stride = stride_of(group, vectors);
  bool once = by_one_shot(group, vectors), early = group.architecture >= 9;
  group.begin_small_sum(stream);
  switch (type) {
    case Type::float16:
      launch<__half>(areas, once, early, y, part, bias, vectors, n, stream);
      break;
    case Type::bfloat16:
      launch<__nv_bfloat16>(areas, once, early, y, part, bias, vectors, n, stream);
      break;
    default:
      launch<float>(areas, once, early, y, part, bias, vectors, n, stream);
  }
  group.end_small_sum(stream);
}

}  // namespace tpfused
