#include "check.h"
#include "few_rows.h"
#include "numbers.h"
#include "small_areas.h"

namespace tpfused {
namespace {

constexpr int most_rows = 4;
constexpr int warps = 8;
constexpr int of_warp = 2;                // outputs, which share what is read of x
constexpr int outputs = warps * of_warp;  // of a block
constexpr int width = 8;                  // numbers in a vector
constexpr int step = 32 * width;          // of a warp, through k
constexpr int ahead = 4;                  // steps that are read before they are needed

// Weights are read once, by one block.
__device__ int4 read_once(const void* from) {
  int4 value;
  asm("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(from));
  return value;
}

template <typename T>
__device__ void multiply(int4 a, const float* b, float* sum) {
  auto& numbers = reinterpret_cast<const Vector<T, width>&>(a);
#pragma unroll
  for (int j = 0; j < width; ++j) *sum += to_float(numbers.at[j]) * b[j];
}

// The kernel after this one may start, up to where it has to wait for this one's end.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Floor: w is read once. A warp has `of_warp` outputs, and its lanes read 512 bytes of each of their weights at a time.
template <typename T, int M>
__global__ void __launch_bounds__(warps * 32)
    multiply_and_push_kernel(Areas areas, T* part, const T* x, const T* w, int64_t leading, int64_t n, int64_t k,
                             int blocks_of_sum) {
  __shared__ uint32_t epoch;
  __shared__ alignas(16) T results[M][outputs];
  __shared__ bool is_last;
  if (threadIdx.x == 0) epoch = areas.next();
  __syncthreads();
  let_next_start();  // which counts the epoch on

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = blockIdx.x * static_cast<int64_t>(outputs);
  const T* weights[of_warp];
  float sums[of_warp][M] = {};
#pragma unroll
  for (int i = 0; i < of_warp; ++i) weights[i] = w + min(first + warp * of_warp + i, n - 1) * leading;
  for (int64_t start = lane * width; start < k; start += ahead * step) {
    int4 of_weight[ahead][of_warp];
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
#pragma unroll
      for (int i = 0; i < of_warp; ++i) {
        int64_t at = start + a * step;
        of_weight[a][i] = at < k ? read_once(weights[i] + at) : int4{};
      }
    }
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      int64_t at = start + a * step;
      if (at >= k) break;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float of_x[width] = {};
        reinterpret_cast<const Vector<T, width>*>(x + m * k + at)->add_to(of_x);
#pragma unroll
        for (int i = 0; i < of_warp; ++i) multiply<T>(of_weight[a][i], of_x, &sums[i][m]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < of_warp; ++i) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      for (int offset = 16; offset > 0; offset /= 2) sums[i][m] += __shfl_xor_sync(~0u, sums[i][m], offset);
      if (lane == 0) round_to(sums[i][m], &results[m][warp * of_warp + i]);
    }
  }
  __syncthreads();

  constexpr int vectors = outputs / width;  // of each row
  int row = threadIdx.x / vectors, column = threadIdx.x % vectors * width;
  if (row < M && first + column < n) {
    int4 value = *reinterpret_cast<const int4*>(&results[row][column]);
    int64_t at = row * n + first + column;
    write(reinterpret_cast<char*>(part + at), value);
    for (int ahead = 1; ahead < areas.size; ++ahead) {
      int peer = (areas.rank + ahead) % areas.size;
      write(areas.numbers(peer, epoch % 2, 0, areas.rank) + at * static_cast<int64_t>(sizeof(T)), value);
    }
    __threadfence_system();
  }
  __syncthreads();
  // The last block to have written tells the peers, each block of whose sum looks at a flag of its own.
  uint32_t* ticket = areas.counter + 2;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
    if (is_last) *ticket = 0;
    __threadfence_system();
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < areas.size * blocks_of_sum; i += blockDim.x) {
    int peer = i / blocks_of_sum;
    if (peer != areas.rank) store_release(areas.flag(peer, epoch % 2, 0, areas.rank, i % blocks_of_sum), epoch);
  }
}

bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

template <typename T, int M>
void launch(const Areas& areas, const FewRows& product, int blocks_of_sum, cudaStream_t stream) {
  auto blocks = static_cast<unsigned>((product.n + outputs - 1) / outputs);
  multiply_and_push_kernel<T, M><<<blocks, warps * 32, 0, stream>>>(
      areas, static_cast<T*>(product.part), static_cast<const T*>(product.x), static_cast<const T*>(product.w),
      product.leading, product.n, product.k, blocks_of_sum);
  check(cudaGetLastError(), "multiply_and_push");
}

}  // namespace

bool is_few_rows(const Group& group, const FewRows& product) {
  bool together = product.n % width == 0 && product.k % width == 0 && product.leading % width == 0;
  return product.m <= most_rows && size_of(product.type) == 2 && together && is_aligned(product.x) &&
         is_aligned(product.w) && is_one_shot(group, product.m, product.n, product.type);
}

void multiply_and_push(Group& group, const FewRows& product, cudaStream_t stream) {
  Areas areas = areas_of(group, product.m, product.n, product.type);
  int blocks = static_cast<int>(blocks_of(group, product.m, product.n, product.type, product.with_norm));
  group.begin_small_sum(stream);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    constexpr decltype(&launch<T, 1>) launches[most_rows] = {launch<T, 1>, launch<T, 2>, launch<T, 3>, launch<T, 4>};
    launches[product.m - 1](areas, product, blocks, stream);
  };
  if (product.type == Type::float16) return run(__half{});
  run(__nv_bfloat16{});
}

}  // namespace tpfused
