#pragma once

#include <cuda_runtime_api.h>

#include "matmul.h"

namespace tpfused {

constexpr int most_parts = 65;  // of all ranks, and a residual

// y = the sum of `count` parts, in their order and in float32, plus bias (or null), rounded once. y and each part:
// contiguous [rows, n].
void add_parts(void* y, const void* const* parts, int count, const void* bias, int64_t rows, int64_t n, Type type,
               cudaStream_t stream);

}  // namespace tpfused
