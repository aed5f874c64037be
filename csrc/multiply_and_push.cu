#include "multiply_and_push.h"
#include "numbers.h"
#include "tiny_words.h"

namespace tpfused {
namespace {

constexpr int most_rows = 2;  // of more, what each lane multiplies takes longer than the weight; not tuned
constexpr int64_t most_x_bytes = 47 << 10;  // in shared memory, where something else is, too
constexpr int warps = 8;
constexpr int vector = 8;          // numbers in 16 bytes
constexpr int step = 32 * vector;  // of a warp, through k

// Weights are read once, by one block.
__device__ int4 read_once(const void* from) {
  int4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

template <typename T>
__device__ float dot(int4 a, const float* b, float sum) {
  auto& numbers = reinterpret_cast<const Vector<T, vector>&>(a);
#pragma unroll
  for (int j = 0; j < vector; ++j) sum += to_float(numbers.at[j]) * b[j];
  return sum;
}

// The kernel after this one may start, up to where it has to wait for what this one gives.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Floor: w is read once. A warp has `Outputs` of the outputs; `ahead` vectors of each one's weights are on their way to
// each lane before the first is needed. x, which all warps read, is in shared memory: in the cache each of its lines
// would be missed at first, one after the other. (H200, one row, n 4096, k 7168: 15.7 us, 17.8 from the cache, 18.3
// with 8 ahead, whose registers leave room for fewer blocks.)
template <typename T, int M, int Outputs>
__global__ void __launch_bounds__(warps * 32)
    multiply_and_push_kernel(Areas areas, const int4* x, const T* w, int64_t leading, int64_t n, int64_t k) {
  constexpr int of_block = warps * Outputs, ahead = 4;
  extern __shared__ int4 shared_x[];  // [M][k]
  __shared__ uint32_t epoch;
  __shared__ alignas(16) T results[M][of_block];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = blockIdx.x * static_cast<int64_t>(of_block);
  const T* weights[Outputs];
#pragma unroll
  for (int i = 0; i < Outputs; ++i) weights[i] = w + min(first + warp * Outputs + i, n - 1) * leading;
  int4 of_weight[ahead][Outputs];
  auto read_ahead = [&](int64_t start) {
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
#pragma unroll
      for (int i = 0; i < Outputs; ++i) {
        int64_t at = start + a * step;
        of_weight[a][i] = at < k ? read_once(weights[i] + at) : int4{};
      }
    }
  };

  int64_t start = lane * vector;
  read_ahead(start);
  for (int64_t i = threadIdx.x; i < M * k / vector; i += warps * 32) shared_x[i] = x[i];
  if (threadIdx.x == 0) epoch = areas.next();
  __syncthreads();
  let_next_start();  // which counts the epoch on
  float sums[Outputs][M] = {};
  while (start < k) {
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      int64_t at = start + a * step;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float of_x[vector] = {};
        if (at < k) add<T>(shared_x[(m * k + at) / vector], of_x);
#pragma unroll
        for (int i = 0; i < Outputs; ++i) sums[i][m] = dot<T>(of_weight[a][i], of_x, sums[i][m]);
      }
    }
    start += ahead * step;
    if (start < k) read_ahead(start);
  }
#pragma unroll
  for (int i = 0; i < Outputs; ++i) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      for (int offset = 16; offset > 0; offset /= 2) sums[i][m] += __shfl_xor_sync(~0u, sums[i][m], offset);
      if (lane == 0) round_to(sums[i][m], &results[m][warp * Outputs + i]);
    }
  }
  __syncthreads();

  constexpr int vectors = of_block / vector;  // of each row
  int row = threadIdx.x / vectors, column = threadIdx.x % vectors * vector;
  if (row >= M || first + column >= n) return;
  give(areas, epoch, (row * n + first + column) / vector, *reinterpret_cast<const int4*>(&results[row][column]));
}

bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

template <typename T, int M>
void launch(const Areas& areas, const PushedProduct& product, cudaStream_t stream) {
  constexpr int outputs = M == 1 ? 1 : 2;  // of several rows, x is much of what a warp reads
  auto blocks = static_cast<unsigned>((product.n + warps * outputs - 1) / (warps * outputs));
  multiply_and_push_kernel<T, M, outputs><<<blocks, warps * 32, M * product.k * sizeof(T), stream>>>(
      areas, static_cast<const int4*>(product.x), static_cast<const T*>(product.w), product.leading, product.n,
      product.k);
  check(cudaGetLastError(), "multiply_and_push");
}

}  // namespace

bool can_push(const PushedProduct& product) {
  bool together = product.n % vector == 0 && product.k % vector == 0 && product.leading % vector == 0;
  bool fits = product.m <= most_rows && product.m * product.k * 2 <= most_x_bytes;
  return fits && size_of(product.type) == 2 && together && is_aligned(product.x) && is_aligned(product.w) &&
         is_tiny_sum(product.m, product.n, product.type);
}

void multiply_and_push(Group& group, const PushedProduct& product, cudaStream_t stream) {
  Areas areas = areas_of(group, 0);
  group.begin_small_sum(stream);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    constexpr decltype(&launch<T, 1>) launches[most_rows] = {launch<T, 1>, launch<T, 2>};
    launches[product.m - 1](areas, product, stream);
  };
  if (product.type == Type::float16) return run(__half{});
  run(__nv_bfloat16{});
}

}  // namespace tpfused
