#pragma once

#include "transfers.h"

namespace tpfused {

// Gathers and scatters of so few rows that only latency counts: one kernel each, as for small sums, whose areas and
// order they share (small_sums.h), and whole matmuls before or after it. Copy engines and what streams tell each other
// would take 15 us whatever the size.

// Whether an operation exchanges these rows so, of which a rank writes `most` bytes at its peers: the same answer on
// every rank. Not where another tier has to give the same bits, for its matmuls are cut.
bool is_small(const Group& group, Tier tier, const Rows& rows, int64_t row_bytes, int64_t most);

// With more than that, what travels beside a matmul is the faster (two H200).
constexpr int64_t most_gathered = 8 << 20;
constexpr int64_t most_scattered = 8 << 20;

// all [total rows] = every rank's rows, of which this one's are x. Contiguous, aligned to 16 bytes.
void small_gather(Group& group, const Rows& rows, int64_t row_bytes, const void* x, void* all, cudaStream_t stream);

// y [own rows, n] = these rows of the sum over the ranks of part [total rows, n], plus bias [n] or null: added in
// float32 in the ranks' order, and rounded once. Contiguous; y and part aligned to 16 bytes.
void small_scatter(Group& group, const Rows& rows, int64_t n, Type type, const void* part, const void* bias, void* y,
                   cudaStream_t stream);

}  // namespace tpfused
