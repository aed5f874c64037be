#pragma once

#include <utility>

#include "operations.h"

namespace tpfused {

inline Matrix matrix(const void* data, int64_t leading, bool transposed = false) {
  return {const_cast<void*>(data), leading, transposed};
}

// dw [n, k] = dy.T @ x of a weight that lies `transposed` or not, as it does: from dy [m, n] and x [m, k].
inline Product weight_gradient(const void* dy, const void* x, void* dw, int64_t n, int64_t k, int64_t m,
                               bool transposed) {
  if (transposed) return {matrix(x, k, true), matrix(dy, n), matrix(dw, n), k, n, m};
  return {matrix(dy, n, true), matrix(x, k), matrix(dw, k), n, k, m};
}

// A product that gives a weight's gradient, as it is `wanted`.
inline Product as_wanted(Product product, Dw wanted) {
  if (wanted == Dw::add) {
    product.add = product.y.data;
    product.wide = true;
  }
  return product;
}

// The matmuls of one operation, on the caller's stream and on one beside it, whose blocks the GPU starts first. What is
// on both fills the multiprocessors that a matmul's last wave leaves idle. The group's streams follow what is on the
// caller's when the operation begins; the one beside it does so when it is first used, for that takes the host's time.
class Tiles {
 public:
  enum Lane { caller = 0, beside = 1 };

  Tiles(Group& group, Type type, Workspace& workspace, cudaStream_t stream)
      : type_(type), group_(group), matmul_(group.matmul(type)), streams_{stream, group.beside} {
    if (group.begun().count) tick(group.begun(), stream);
    for (char*& own : workspaces_) own = workspace.take(workspace_bytes(type));
    group.lead(group.transfers);
    if (group.capturing()) this->stream(beside);  // later, it would follow more than the beginning
  }

  // All is enqueued. The caller's stream follows the group's.
  void end() {
    follow(streams_[caller], group_.transfers);
    join();
    if (group_.ended().count) tick(group_.ended(), streams_[caller]);
  }

  cudaStream_t stream(Lane lane) {
    if (lane == beside && !std::exchange(in_use_beside_, true)) group_.lead(streams_[beside]);
    return streams_[lane];
  }
  void multiply(Lane lane, const Product& product) { matmul_.run(product, stream(lane), workspaces_[lane]); }
  // A weight's gradient, for the whole card also beside an exchange by NCCL: that takes a part of its time only, and
  // has the multiprocessors it needs as soon as a tile on each has ended, for its stream comes first.
  void multiply(Lane lane, const Product& product, Dw wanted) {
    if (wanted != Dw::none) multiply(lane, as_wanted(product, wanted));
  }
  // The caller's stream follows what is on the one beside it.
  void join() {
    if (std::exchange(in_use_beside_, false)) follow(streams_[caller], streams_[beside]);
  }

  int64_t bytes(int64_t entries) const { return entries * size_of(type_); }

 private:
  Type type_;
  Group& group_;
  Matmul& matmul_;
  cudaStream_t streams_[2];
  char* workspaces_[2];
  bool in_use_beside_ = false;
};

// A batch of matrices of contiguous rows, of which there are `rows` from one to the next.
inline Matrix matrices(const void* data, int64_t leading, int64_t rows) {
  return {const_cast<void*>(data), leading, false, rows * leading};
}

}  // namespace tpfused
