#include <algorithm>

#include "check.h"
#include "numbers.h"
#include "reduce.h"

namespace tpfused {
namespace {

struct Addends {
  const void* at[most_parts];
};

// Floor: `count` reads and one write. `Width` entries a thread, 16 bytes where everything is aligned to them.
template <typename T, int Width>
__global__ void add_parts_kernel(T* y, Addends parts, int count, const T* bias, int64_t entries, int64_t n) {
  using Vector = Vector<T, Width>;
  for (int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * Width; i < entries;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x * Width) {
    float sum[Width] = {};
    for (int part = 0; part < count; ++part) {
      reinterpret_cast<const Vector*>(static_cast<const T*>(parts.at[part]) + i)->add_to(sum);
    }
    if (bias) reinterpret_cast<const Vector*>(bias + i % n)->add_to(sum);
    *reinterpret_cast<Vector*>(y + i) = Vector::rounded(sum);
  }
}

template <typename T>
void launch(void* y, const Addends& parts, int count, const void* bias, int64_t rows, int64_t n, cudaStream_t stream) {
  int64_t entries = rows * n;
  uintptr_t addresses = reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(bias);
  for (int part = 0; part < count; ++part) addresses |= reinterpret_cast<uintptr_t>(parts.at[part]);
  bool wide = addresses % 16 == 0 && n % width<T> == 0;
  int64_t threads = wide ? entries / width<T> : entries;
  int blocks = static_cast<int>(std::min<int64_t>((threads + 255) / 256, 132 * 16));
  auto out = static_cast<T*>(y);
  auto add = static_cast<const T*>(bias);
  if (wide) {
    add_parts_kernel<T, width<T>><<<blocks, 256, 0, stream>>>(out, parts, count, add, entries, n);
  } else {
    add_parts_kernel<T, 1><<<blocks, 256, 0, stream>>>(out, parts, count, add, entries, n);
  }
  check(cudaGetLastError(), "add_parts");
}

}  // namespace

void add_parts(void* y, const void* const* parts, int count, const void* bias, int64_t rows, int64_t n, Type type,
               cudaStream_t stream) {
  if (rows * n == 0) return;
  if (count > most_parts) throw std::runtime_error("add_parts: more than 65 parts");
  Addends list;
  for (int part = 0; part < count; ++part) list.at[part] = parts[part];
  by_type(type, [&](auto zero) { launch<decltype(zero)>(y, list, count, bias, rows, n, stream); });
}

}  // namespace tpfused
