#pragma once

#include "group.h"

namespace tpfused {

// All-reduce by one kernel, in which every rank writes into its peers' memory, through NVLink: of what is small enough
// that latency counts, up to 2048 rows of 4096 on two ranks. It takes less than half of the multiprocessors.
//
// One-shot: each rank writes its part to all others, and adds all parts. Two-shot: to each other what that one adds,
// and then its sums to all others; that is less to write where there are more than two. Parts are added in float32 in
// the ranks' order, then the bias, and rounded once.
//
// Two areas of each rank are used in turn, and the kernels of a group run one after the other. So nothing is
// overwritten that a peer still reads: who has seen a peer's flags of one sum knows that the peer has finished the one
// before. The smallest sums, in tiny_sums.h, do without flags.

constexpr int64_t most_normalized = 32 << 10;  // bytes of a row

// What may follow a sum in a block of a transformer: sum = residual + it, and y = that normalised over its n entries,
// (sum - mean) / sqrt(variance + eps) * weight + bias; the mean counts as 0 unless `centered`. [rows, n], weight and
// bias [n], bias null if there is none. Contiguous, aligned to 16 bytes, of rows of at most 32 KiB that are multiples
// of 16 bytes.
struct AddNorm {
  const void* residual;
  void* sum;
  void* y;
  const void* weight;
  const void* bias;
  float eps;
  bool centered;
};

// y [rows, n] = the sum over the ranks of part [rows, n], plus bias [n] or null; or `norm` of it. Contiguous; y and
// part aligned to 16 bytes.
struct SmallSum {
  int64_t rows, n;
  Type type;
  const void* part;
  const void* bias;
  void* y;              // not with `norm`
  const AddNorm* norm;  // or null: a tiny sum only
  bool pushed;          // a tiny sum: the kernel before gives the part to all ranks, this one too
};

// Whether `small_all_reduce` takes it.
bool is_small_sum(const Group& group, int64_t rows, int64_t n, Type type);
void small_all_reduce(Group& group, const SmallSum& sum, cudaStream_t stream);

// What follows a sum [rows, n] that is there.
void add_and_normalize(const AddNorm& norm, const void* sum, int64_t rows, int64_t n, Type type, cudaStream_t stream);

}  // namespace tpfused
