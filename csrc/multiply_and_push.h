#pragma once

#include "tiny_sums.h"

namespace tpfused {

// The matmul of a decoding step, part [m, n] = x [m, k] @ w [n, k].T of at most two rows, whose blocks give every rank
// what they have multiplied at once, for a tiny sum. It reads the weight once, as fast as memory gives it: no tensor
// cores, and no second kernel that adds parts of k.
struct PushedProduct {
  int64_t m, n, k;
  Type type;
  const void* x;  // contiguous
  const void* w;
  int64_t leading;  // entries from one row of w to the next
};

// Whether `multiply_and_push` takes it: up to two rows and 47 KiB of x, 16-bit numbers, 16 bytes of which lie together
// everywhere. Another rank may differ in that, and push what it has multiplied otherwise.
bool can_push(const PushedProduct& product);
void multiply_and_push(Group& group, const PushedProduct& product, cudaStream_t stream);

}  // namespace tpfused
