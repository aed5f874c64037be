#pragma once

#include "transfers.h"

namespace tpfused {

// Gathers and scatters of so few rows that latency counts: one kernel each, as for small sums, whose areas and
// order they share (small_sums.h), and whole matmuls before or after it. Copy engines and what streams tell each other
// would take 15 us whatever the size.

// Whether an operation exchanges these rows so, of which a rank writes `most` bytes at its peers: the same answer on
// every rank. Not where another tier has to give the same bits, for its matmuls are cut.
bool is_small(const Group& group, Tier tier, const Rows& rows, int64_t row_bytes, int64_t most);

// With more, what travels beside a matmul is the faster. Two H200, hidden size 4096, us by one kernel and beside:
// gather of 256 rows 37 and 45, of 512 59 and 54; scatter of 512 56 and 71, of 1024 100 and 95; gather of 512 rows'
// features, which copy engines bring slowly to their columns, 74 and 89.
constexpr int64_t most_gathered = 1 << 20;
constexpr int64_t most_scattered = 3 << 20;
constexpr int64_t most_features_gathered = 8 << 20;

// all [total rows] = every rank's rows, of which this one's are x. Contiguous, aligned to 16 bytes.
void small_gather(Group& group, const Rows& rows, int64_t row_bytes, const void* x, void* all, cudaStream_t stream);

// y [own rows, n] = these rows of the sum over the ranks of part [total rows, n], plus residual [own rows, n] and bias
// [n], either of which may be null: added in float32 in the ranks' order, and rounded once. Contiguous; y, part and
// residual aligned to 16 bytes; with a bias, rows of whole 16 bytes.
void small_scatter(Group& group, const Rows& rows, int64_t n, Type type, const void* part, const void* residual,
                   const void* bias, void* y, cudaStream_t stream);

}  // namespace tpfused
