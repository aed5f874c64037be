#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "matmul.h"

namespace tpfused {

// For kernels: numbers of any type are added in float32, 16 bytes of them at a time where they are aligned.

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void round_to(float x, float* y) { *y = x; }
__device__ inline void round_to(float x, __half* y) { *y = __float2half_rn(x); }
__device__ inline void round_to(float x, __nv_bfloat16* y) { *y = __float2bfloat16_rn(x); }

template <typename T, int Width>
struct alignas(sizeof(T) * Width) Vector {
  T at[Width];

  __device__ void add_to(float* sums) const {
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j] += to_float(at[j]);
  }
  __device__ static Vector rounded(const float* sums) {
    Vector out;
#pragma unroll
    for (int j = 0; j < Width; ++j) round_to(sums[j], &out.at[j]);
    return out;
  }
};

// 16 bytes.
template <typename T>
constexpr int width = 16 / sizeof(T);  // numbers in a vector

template <typename T>
__device__ inline void add(int4 value, float* sums) {
  reinterpret_cast<const Vector<T, width<T>>&>(value).add_to(sums);
}

// A bias, or none, which need not be aligned.
template <typename T>
__device__ inline void add_bias(const T* bias, float* sums) {
  if (!bias) return;
#pragma unroll
  for (int j = 0; j < width<T>; ++j) sums[j] += to_float(bias[j]);
}

template <typename T>
__device__ inline int4 rounded(const float* sums) {
  auto out = Vector<T, width<T>>::rounded(sums);
  return reinterpret_cast<const int4&>(out);
}

// Calls `function` with a zero of the numbers' type, for its `decltype`.
template <typename Function>
void by_type(Type type, Function function) {
  switch (type) {
    case Type::float16:
      return function(__half{});
    case Type::bfloat16:
      return function(__nv_bfloat16{});
    default:
      return function(float{});
  }
}

}  // namespace tpfused
