#pragma once

#include "numbers.h"
#include "small_sums.h"

namespace tpfused {

// For kernels: an `AddNorm` of one row by one block.

constexpr int norm_threads = 512;
constexpr int most_vectors = 4;  // of a row, for each thread
static_assert(norm_threads * most_vectors * 16 == most_normalized);

// Of all threads of the block.
__device__ inline float block_sum(float x) {
  __shared__ float of_warp[norm_threads / 32];
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  __syncthreads();  // of the sum before
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (float each : of_warp) sum += each;
  return sum;
}

// One row of an `AddNorm`, of at most `Vectors` for each thread: `add_part(vector, sums)` adds a vector of what comes
// to the residual; what does not depend on that is on its way before.
template <typename T, int Vectors, typename AddPart>
__device__ void add_and_normalize_row(const AddNorm& norm, int64_t row, int64_t n, AddPart add_part) {
  const int vectors = static_cast<int>(n / width<T>);
  auto at = [&](const void* from, int64_t vector) { return static_cast<const int4*>(from)[vector]; };
  int4 residual[Vectors], weight[Vectors], bias[Vectors];
  float x[Vectors][width<T>];
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    int vector = threadIdx.x + i * norm_threads;
    residual[i] = weight[i] = bias[i] = {};
    if (vector >= vectors) continue;
    residual[i] = at(norm.residual, row * vectors + vector);
    weight[i] = at(norm.weight, vector);
    if (norm.bias) bias[i] = at(norm.bias, vector);
  }

  float mean = 0, square = 0;
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    int vector = threadIdx.x + i * norm_threads;
#pragma unroll
    for (int j = 0; j < width<T>; ++j) x[i][j] = 0;
    if (vector >= vectors) continue;
    add_part(vector, x[i]);
    add<T>(residual[i], x[i]);
    int4 sum = rounded<T>(x[i]);
    static_cast<int4*>(norm.sum)[row * vectors + vector] = sum;
#pragma unroll
    for (int j = 0; j < width<T>; ++j) x[i][j] = 0;
    add<T>(sum, x[i]);  // what is normalised is what was written
#pragma unroll
    for (int j = 0; j < width<T>; ++j) mean += x[i][j];
  }
  mean = norm.centered ? block_sum(mean) / n : 0;
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    bool inside = threadIdx.x + i * norm_threads < vectors;
#pragma unroll
    for (int j = 0; j < width<T>; ++j) square += inside ? (x[i][j] - mean) * (x[i][j] - mean) : 0;
  }
  float scale = rsqrtf(block_sum(square) / n + norm.eps);
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    int vector = threadIdx.x + i * norm_threads;
    if (vector >= vectors) continue;
    float w[width<T>] = {}, out[width<T>] = {};
    add<T>(weight[i], w);
    add<T>(bias[i], out);
#pragma unroll
    for (int j = 0; j < width<T>; ++j) out[j] += (x[i][j] - mean) * scale * w[j];
    static_cast<int4*>(norm.y)[row * vectors + vector] = rounded<T>(out);
  }
}

}  // namespace tpfused
