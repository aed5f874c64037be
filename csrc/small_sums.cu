#include <algorithm>

#include "check.h"
#include "normalize_row.h"
#include "small_areas.h"
#include "small_sums.h"
#include "tiny_sums.h"

namespace tpfused {
namespace {

constexpr int threads = norm_threads;
constexpr int64_t one_shot_bytes = 256 << 10;  // with more, and more than two ranks, two-shot

// Adds all ranks' vector, of which this rank's lies at `own` and the others' at `numbers` + `at`, and the bias.
template <typename T>
__device__ void add_all(const Areas& areas, uint32_t turn, const char* own, int64_t at, const T* bias, float* sums) {
  for (int from = 0; from < areas.size; ++from) {
    add<T>(
        from == areas.rank ? *reinterpret_cast<const int4*>(own) : read(areas.numbers(areas.rank, turn, 0, from) + at),
        sums);
  }
  add_bias(bias, sums);
}

template <typename T>
__device__ int4 sum_of(const Areas& areas, uint32_t turn, const char* own, int64_t at, const T* bias) {
  float sums[width<T>] = {};
  add_all(areas, turn, own, at, bias, sums);
  return rounded<T>(sums);
}

template <typename T>
__global__ void __launch_bounds__(threads)
    one_shot(Areas areas, char* y, const char* part, const T* bias, int64_t vectors, int64_t n) {
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
    write(y + i * 16, sum_of(areas, turn, part + i * 16, i * 16, bias ? bias + i * width<T> % n : nullptr));
  }
  areas.end(epoch);
}

template <typename T>
__global__ void __launch_bounds__(threads)
    two_shot(Areas areas, char* y, const char* part, const T* bias, int64_t vectors, int64_t n) {
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
    int4 sum = sum_of(areas, turn, part + at * 16, i * 16, bias ? bias + at * width<T> % n : nullptr);
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

// An `AddNorm` of a sum that is there, a row a block.
template <typename T>
__global__ void __launch_bounds__(threads) add_norm(AddNorm norm, const char* sum, int64_t n) {
  const int64_t row = blockIdx.x, vectors = n / width<T>;
  add_and_normalize_row<T, most_vectors>(norm, row, n, [&](int vector, float* sums) {
    add<T>(*reinterpret_cast<const int4*>(sum + (row * vectors + vector) * 16), sums);
  });
}

int64_t vectors_of(int64_t rows, int64_t n, Type type) { return rows * n * static_cast<int64_t>(size_of(type)) / 16; }

bool by_one_shot(const Group& group, int64_t vectors) { return group.size == 2 || vectors * 16 <= one_shot_bytes; }

int64_t stride_of(const Group& group, int64_t vectors) {
  return 16 * (by_one_shot(group, vectors) ? vectors : (vectors + group.size - 1) / group.size);
}

}  // namespace

Areas areas_of(Group& group, int64_t rows, int64_t n, Type type) {
  Areas areas{};
  for (int rank = 0; rank < group.size; ++rank) {
    areas.area[rank] = group.peers->small(rank, 0);
    areas.flags[rank] = group.peers->small_flags(rank);
    areas.tiny[rank] = group.peers->tiny(rank);
  }
  areas.counter = group.peers->small_counter();
  areas.replays = group.replays();
  areas.in_graph = group.capturing();
  areas.rank = group.rank;
  areas.size = group.size;
  areas.bytes = static_cast<int64_t>(group.peers->small_bytes());
  areas.stride = stride_of(group, vectors_of(rows, n, type));
  return areas;
}

bool is_small_sum(const Group& group, int64_t rows, int64_t n, Type type) {
  int64_t vectors = vectors_of(rows, n, type);
  int64_t room = static_cast<int64_t>(group.peers->small_bytes()) / (by_one_shot(group, vectors) ? 1 : 2);
  bool fits = stride_of(group, vectors) * group.size <= room;
  return n * size_of(type) % 16 == 0 && vectors > 0 && fits;
}

void small_all_reduce(Group& group, const SmallSum& s, cudaStream_t stream) {
  if (is_tiny_sum(s.rows, s.n, s.type)) return tiny_all_reduce(group, s, stream);
  int64_t vectors = vectors_of(s.rows, s.n, s.type);
  bool once = by_one_shot(group, vectors);
  int64_t each = once ? vectors : stride_of(group, vectors) / 16;
  int64_t blocks = std::clamp<int64_t>((each + threads - 1) / threads, 1, PeerMemory::small_blocks);
  Areas areas = areas_of(group, s.rows, s.n, s.type);
  auto part = static_cast<const char*>(s.part);
  auto y = static_cast<char*>(s.y);
  group.begin_small_sum(stream);
  by_type(s.type, [&](auto zero) {
    using T = decltype(zero);
    auto bias = static_cast<const T*>(s.bias);
    launch_after_matmul(group, once ? one_shot<T> : two_shot<T>, blocks, threads, stream, areas, y, part, bias, vectors,
                        s.n);
  });
  group.end_small_sum(stream);
}

void add_and_normalize(const AddNorm& norm, const void* sum, int64_t rows, int64_t n, Type type, cudaStream_t stream) {
  by_type(type, [&](auto zero) {
    using T = decltype(zero);
    add_norm<T><<<static_cast<unsigned>(rows), threads, 0, stream>>>(norm, static_cast<const char*>(sum), n);
    check(cudaGetLastError(), "add_and_normalize");
  });
}

}  // namespace tpfused
