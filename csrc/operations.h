#pragma once

#include <cstdint>
#include <vector>

#include "group.h"
#include "small_sums.h"
#include "transfers.h"

namespace tpfused {

// Matmuls that overlap a collective. Each call enqueues everything on `stream` and on the group's own streams, which
// rejoin it before the call returns; the host waits for nothing.

// What a backward pass does with a weight's gradient: nothing, write it, or add it to float32 that is there.
enum class Dw { none = 0, write = 1, add = 2 };

// A linear layer's weight, [features out, features in]: forward multiplies by its transpose.
struct Weight {
  const void* data;
  int64_t leading;          // entries from one row to the next
  bool transposed = false;  // the rows in memory are those of [features in, features out], also of its gradient

  Matrix forward() const { return {const_cast<void*>(data), leading, !transposed}; }
  Matrix backward() const { return {const_cast<void*>(data), leading, transposed}; }
};

// For each of the layers that share an input: y [total, n] = activation(x @ w.T + bias), x [total, k] all ranks' rows
// joined, of which this one gives its own.
struct Column {
  Weight w;  // [n, k]
  int64_t n;
  void* y;  // contiguous
  Activation activation;
  const void* bias;  // or null
  void* pre;         // with gelu, or null: contiguous [total, n]
};
struct AllGatherMatmul {
  Rows rows;
  int64_t k;
  const void* x;  // contiguous [own rows, k]
  std::vector<Column> columns;
  Type type;
  void* all = nullptr;  // or contiguous [total, k], which receives all rows
};
void all_gather_matmul(Group& group, Tier tier, const AllGatherMatmul& operation, Workspace workspace,
                       cudaStream_t stream);

// y [own rows, n] = this rank's rows of the sum over the ranks of x [total, k] @ w.T, plus a residual and a bias. Each
// rank's part is rounded to the type, and the parts are added in float32 in the ranks' order, and then those. But of
// two ranks and many rows, outside deterministic mode, some own parts are added to the peer's before they are rounded.
struct MatmulReduceScatter {
  Rows rows;
  int64_t k, n;
  const void* x;  // contiguous [total, k]
  Weight w;
  void* y;               // contiguous
  const void* residual;  // contiguous [own rows, n], or null
  const void* bias;      // or null
  Type type;
};
void matmul_reduce_scatter(Group& group, Tier tier, const MatmulReduceScatter& operation, Workspace workspace,
                           cudaStream_t stream);

// The backward pass of `all_gather_matmul` below its activations. From each dpre [total, n]: dx [own rows, k], this
// rank's rows of the sum over the ranks and layers of dpre @ w; and dw [n, k] = dpre.T @ x. x is gathered again beside
// the first matmuls, unless it is `whole`, and the last ones hide the exchange of the first ones' parts.
struct ColumnGradient {
  const void* dpre;  // contiguous
  Weight w;          // [n, k]
  int64_t n;
  void* dw;  // contiguous, transposed as w is
};
struct ColumnBackward {
  Rows rows;
  int64_t k;
  const void* x;  // contiguous [own rows, k], or [total, k] if `whole`
  bool whole;
  void* dx;  // contiguous
  std::vector<ColumnGradient> columns;
  bool wants_dx;  // the same on every rank, of which some may have no rows of them
  Dw wants_dw;    // likewise, whether any
  Type type;
};
void column_backward(Group& group, Tier tier, const ColumnBackward& operation, Workspace workspace,
                     cudaStream_t stream);

// The backward pass of `matmul_reduce_scatter`. From dy [own rows, n], which is gathered beside the first matmul: dx
// [total, k] = dy @ w and dw [n, k] = dy.T @ x.
struct RowBackward {
  Rows rows;
  int64_t k, n;
  const void* dy;  // contiguous [own rows, n]
  const void* x;   // contiguous [total, k]
  Weight w;        // [n, k]
  void* dx;        // contiguous
  void* dw;        // contiguous, transposed as w is
  bool wants_dx;
  Dw wants_dw;
  Type type;
};
void row_backward(Group& group, Tier tier, const RowBackward& operation, Workspace workspace, cudaStream_t stream);

// y [m, all n] = activation(x [m, k] @ w.T + bias) of all ranks' output features, of which this one computes its own.
struct MatmulAllGather {
  Rows features;  // `tokens` of which are features here: all ranks'
  int64_t m, k;
  const void* x;  // contiguous
  Weight w;       // of this rank's features
  void* y;        // contiguous
  Activation activation;
  const void* bias;  // of this rank's features, or null
  void* pre;         // with gelu, or null: contiguous, of this rank's features
  Type type;
};
void matmul_all_gather(Group& group, Tier tier, const MatmulAllGather& operation, Workspace workspace,
                       cudaStream_t stream);

// y [m, n] = the sum over the ranks of x [m, k] @ w, plus bias, on every rank; parts and sums as in
// `matmul_reduce_scatter`, except that the NCCL tier adds as NCCL does. With `dw`, the backward pass of a
// column-parallel layer whose input is whole: x is dpre, y is dx, and dw [k, n] = dpre.T @ `whole_input` [m, n] hides
// the exchange. With `norm`, that follows, and takes the place of y.
struct MatmulAllReduce {
  int64_t m, k, n;
  const void* x;            // contiguous
  Matrix w;                 // a weight's `forward`, or its `backward` with dw, which is laid out alike
  void* y;                  // contiguous
  const void* bias;         // or null
  const void* whole_input;  // contiguous, for dw
  void* dw;                 // contiguous
  Dw wants_dw;
  Type type;
  const AddNorm* norm = nullptr;
};
void matmul_all_reduce(Group& group, Tier tier, const MatmulAllReduce& operation, Workspace workspace,
                       cudaStream_t stream);

}  // namespace tpfused
