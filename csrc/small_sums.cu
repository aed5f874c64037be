#include "check.h"
#include "normalize_row.h"
#include "small_areas.h"
#include "small_sums.h"
#include "split.h"
#include "tiny_sums.h"

namespace tpfused {
namespace {

// With more, two-shot. Of two ranks it writes as much but adds half. Two H200, us after the matmul of so many rows of
// 4096 in bf16, one-shot and two-shot: 256 14 and 18, 512 20 and 24, 1024 35 and 36, 2048 66 and 60 (by copies 72).
// One-shot in pieces, some threads adding one while others write the next, lost: 50 for 1024, where it then took 40.
constexpr int64_t one_shot_bytes = 256 << 10, one_shot_bytes_of_two = 8 << 20;

template <typename T>
__global__ void __launch_bounds__(small_threads)
    one_shot(Areas areas, int4* y, const int4* part, const T* bias, int64_t vectors, int64_t n) {
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  for_each_batch(vectors, [&](auto batch) {
    int4 values[batch.count];
    batch.each([&](int a) { values[a] = part[batch.at(a)]; });
    areas.tell_peers(turn, 0, batch, values);
  });
  areas.meet(epoch, 0);
  for_each_batch(vectors, [&](auto batch) {
    int4 sums[batch.count];
    auto own = [&](int a) { return part[batch.at(a)]; };
    auto bias_at = [&](int a) { return bias ? bias + batch.at(a) * width<T> % n : nullptr; };
    areas.sum<T>(turn, batch, own, nullptr, bias_at, sums);
    batch.each([&](int a) { y[batch.at(a)] = sums[a]; });
  });
  areas.end(epoch);
}

// A scatter of the parts, and a gather of the sums.
template <typename T>
__global__ void __launch_bounds__(small_threads)
    two_shot(Areas areas, Split split, int4* y, const int4* part, const T* bias, int64_t n) {
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  scatter_parts(areas, split, turn, part);
  areas.meet(epoch, 0);
  sum_own<T>(areas, split, turn, part, nullptr, bias, n, [&](auto batch, const int4* sums) {
    batch.each([&](int a) { y[split.place(areas.rank, batch.at(a))] = sums[a]; });
    areas.tell_peers(turn, 1, batch, sums);
  });
  areas.meet(epoch, 1);
  gather_peers(areas, split, turn, 1, y);
  areas.end(epoch);
}

// An `AddNorm` of a sum that is there, a row a block.
template <typename T>
__global__ void __launch_bounds__(norm_threads) add_norm(AddNorm norm, const char* sum, int64_t n) {
  const int64_t row = blockIdx.x, vectors = n / width<T>;
  add_and_normalize_row<T, most_vectors>(norm, row, n, [&](int vector, float* sums) {
    add<T>(*reinterpret_cast<const int4*>(sum + (row * vectors + vector) * 16), sums);
  });
}

int64_t vectors_of(int64_t rows, int64_t n, Type type) { return rows * n * size_of(type) / 16; }

bool by_one_shot(const Group& group, int64_t vectors) {
  return vectors * 16 <= (group.size == 2 ? one_shot_bytes_of_two : one_shot_bytes);
}

// Vectors that a rank adds of a two-shot sum; the last ones may have fewer.
int64_t share_of(const Group& group, int64_t vectors) { return (vectors + group.size - 1) / group.size; }

}  // namespace

Areas areas_of(Group& group, int64_t stride) {
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
  areas.stride = stride;
  return areas;
}

bool is_small_sum(const Group& group, int64_t rows, int64_t n, Type type) {
  int64_t vectors = vectors_of(rows, n, type);
  if (n * size_of(type) % 16 || vectors == 0) return false;
  if (by_one_shot(group, vectors)) return has_room(group, 16 * vectors, 1);
  return has_room(group, 16 * share_of(group, vectors), 2);
}

void small_all_reduce(Group& group, const SmallSum& s, cudaStream_t stream) {
  if (is_tiny_sum(s.rows, s.n, s.type)) return tiny_all_reduce(group, s, stream);
  const int64_t vectors = vectors_of(s.rows, s.n, s.type);
  auto part = static_cast<const int4*>(s.part);
  auto y = static_cast<int4*>(s.y);
  group.begin_small_sum(stream);
  by_type(s.type, [&](auto zero) {
    using T = decltype(zero);
    auto bias = static_cast<const T*>(s.bias);
    if (by_one_shot(group, vectors)) {
      launch_after_matmul(group, one_shot<T>, blocks_for(group, vectors), small_threads, stream,
                          areas_of(group, 16 * vectors), y, part, bias, vectors, s.n);
    } else {
      const int64_t share = share_of(group, vectors);
      Split split{static_cast<int>(share), static_cast<int>(vectors), 1};
      launch_after_matmul(group, two_shot<T>, blocks_for(group, share), small_threads, stream,
                          areas_of(group, 16 * share), split, y, part, bias, s.n);
    }
  });
  group.end_small_sum(stream);
}

void add_and_normalize(const AddNorm& norm, const void* sum, int64_t rows, int64_t n, Type type, cudaStream_t stream) {
  by_type(type, [&](auto zero) {
    using T = decltype(zero);
    add_norm<T><<<static_cast<unsigned>(rows), norm_threads, 0, stream>>>(norm, static_cast<const char*>(sum), n);
    check(cudaGetLastError(), "add_and_normalize");
  });
}

}  // namespace tpfused
