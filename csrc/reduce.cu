#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "check.h"
#include "reduce.h"

namespace tpfused {
namespace {

struct Parts {
  const void* at[most_parts];
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void round_to(float x, float* y) { *y = x; }
__device__ void round_to(float x, __half* y) { *y = __float2half_rn(x); }
__device__ void round_to(float x, __nv_bfloat16* y) { *y = __float2bfloat16_rn(x); }

// Floor: `count` reads and one write. `Width` entries a thread, 16 bytes where everything is aligned to them.
template <typename T, int Width>
__global__ void add_parts_kernel(T* y, Parts parts, int count, const T* bias, int64_t entries, int64_t n) {
  struct alignas(sizeof(T) * Width) Vector {
    T at[Width];
  };
  for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * Width; i < entries;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x * Width) {
    float sum[Width] = {};
    for (int part = 0; part < count; ++part) {
      Vector v = *reinterpret_cast<const Vector*>(static_cast<const T*>(parts.at[part]) + i);
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += to_float(v.at[j]);
    }
    if (bias) {
      Vector v = *reinterpret_cast<const Vector*>(bias + i % n);
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += to_float(v.at[j]);
    }
    Vector out;
#pragma unroll
    for (int j = 0; j < Width; ++j) round_to(sum[j], &out.at[j]);
    *reinterpret_cast<Vector*>(y + i) = out;
  }
}

template <typename T>
void launch(void* y, const Parts& parts, int count, const void* bias, int64_t rows, int64_t n, cudaStream_t stream) {
  constexpr int width = 16 / sizeof(T);
  int64_t entries = rows * n;
  uintptr_t addresses = reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(bias);
  for (int part = 0; part < count; ++part) addresses |= reinterpret_cast<uintptr_t>(parts.at[part]);
  bool wide = addresses % 16 == 0 && n % width == 0;
  int64_t threads = wide ? entries / width : entries;
  int blocks = static_cast<int>(std::min<int64_t>((threads + 255) / 256, 132 * 16));
  auto out = static_cast<T*>(y);
  auto add = static_cast<const T*>(bias);
  if (wide) {
    add_parts_kernel<T, width><<<blocks, 256, 0, stream>>>(out, parts, count, add, entries, n);
  } else {
    add_parts_kernel<T, 1><<<blocks, 256, 0, stream>>>(out, parts, count, add, entries, n);
  }
  check(cudaGetLastError(), "add_parts");
}

}  // namespace

void add_parts(void* y, const void* const* parts, int count, const void* bias, int64_t rows, int64_t n, Type type,
               cudaStream_t stream) {
  if (rows * n == 0) return;
  if (count > most_parts) throw std::runtime_error("add_parts: more than 64 parts");
  Parts list;
  for (int part = 0; part < count; ++part) list.at[part] = parts[part];
  switch (type) {
    case Type::float16:
      return launch<__half>(y, list, count, bias, rows, n, stream);
    case Type::bfloat16:
      return launch<__nv_bfloat16>(y, list, count, bias, rows, n, stream);
    default:
      return launch<float>(y, list, count, bias, rows, n, stream);
  }
}

}  // namespace tpfused
