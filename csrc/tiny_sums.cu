#include "normalize_row.h"
#include "tiny_sums.h"
#include "tiny_words.h"

namespace tpfused {
namespace {

constexpr int threads = norm_threads;

// The block's vectors of this rank's part, which the matmul has written.
__device__ void give_part(const Areas& areas, uint32_t epoch, const int4* part, int64_t first, int64_t end,
                          int64_t step) {
  follow_matmul();
  for (int64_t i = first; i < end; i += step) give(areas, epoch, i, part[i]);
}

// Adds all ranks' vector, in their order, and the bias.
template <typename T>
__device__ void add_all(const Areas& areas, uint32_t epoch, int64_t vector, const T* bias, float* sums) {
  for (int from = 0; from < areas.size; ++from) add<T>(take(areas, epoch, from, vector), sums);
  add_bias(bias, sums);
}

template <typename T>
__global__ void __launch_bounds__(threads)
    tiny_sum(Areas areas, int4* y, const int4* part, const T* bias, int64_t vectors, int64_t n, bool pushed) {
  uint32_t epoch = areas.begin();
  int64_t first = blockIdx.x * static_cast<int64_t>(threads) + threadIdx.x;
  int64_t step = static_cast<int64_t>(gridDim.x) * threads;
  if (!pushed) give_part(areas, epoch, part, first, vectors, step);
  for (int64_t i = first; i < vectors; i += step) {
    float sums[width<T>] = {};
    add_all(areas, epoch, i, bias ? bias + i * width<T> % n : nullptr, sums);
    y[i] = rounded<T>(sums);
  }
  // A matmul that pushes has nothing else to write; but who comes after this kernel counts on its end, too.
  if (pushed) follow_matmul();
  areas.end(epoch);
}

// The residual is older than the matmul, and need not be waited for. `Vectors` of a row are each thread's, at most.
template <typename T, int Vectors>
__global__ void __launch_bounds__(threads)
    tiny_sum_norm(Areas areas, AddNorm norm, const int4* part, const T* bias, int64_t rows, int64_t n, bool pushed) {
  uint32_t epoch = areas.begin();
  const int64_t vectors = n / width<T>;
  for (int64_t row = blockIdx.x; row < rows && !pushed; row += gridDim.x) {
    give_part(areas, epoch, part, row * vectors + threadIdx.x, (row + 1) * vectors, threads);
  }
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    add_and_normalize_row<T, Vectors>(norm, row, n, [&](int vector, float* sums) {
      add_all(areas, epoch, row * vectors + vector, bias ? bias + vector * width<T> : nullptr, sums);
    });
  }
  if (pushed) follow_matmul();
  areas.end(epoch);
}

}  // namespace

bool is_tiny_sum(int64_t rows, int64_t n, Type type) {
  return 2 * rows * n * size_of(type) <= static_cast<int64_t>(PeerMemory::tiny_bytes) && n * size_of(type) % 16 == 0;
}

void tiny_all_reduce(Group& group, const SmallSum& s, cudaStream_t stream) {
  Areas areas = areas_of(group, 0);
  int64_t vectors = s.rows * s.n * size_of(s.type) / 16;
  auto part = static_cast<const int4*>(s.part);
  const int64_t wanted = s.norm ? s.rows : (vectors + threads - 1) / threads;
  const int64_t blocks = std::min<int64_t>(wanted, group.peers->small_blocks());
  if (!s.pushed) group.begin_small_sum(stream);  // else the matmul's kernel has
  by_type(s.type, [&](auto zero) {
    using T = decltype(zero);
    auto bias = static_cast<const T*>(s.bias);
    if (s.norm) {
      bool is_short = s.n / width<T> <= threads;  // fewer registers, which other kernels hold meanwhile
      auto kernel = is_short ? tiny_sum_norm<T, 1> : tiny_sum_norm<T, most_vectors>;
      launch_after_matmul(group, kernel, blocks, threads, stream, areas, *s.norm, part, bias, s.rows, s.n, s.pushed);
    } else {
      launch_after_matmul(group, tiny_sum<T>, blocks, threads, stream, areas, static_cast<int4*>(s.y), part, bias,
                          vectors, s.n, s.pushed);
    }
  });
  group.end_small_sum(stream);
}

}  // namespace tpfused
