#pragma once

#include "operations.h"

namespace tpfused {

// The matmuls of one operation, on the caller's stream and on one beside it, whose blocks the GPU starts first. What is
// on both fills the multiprocessors that a matmul's last wave leaves idle.
class Tiles {
 public:
  enum Lane { caller = 0, beside = 1 };

  Tiles(Group& group, Type type, Workspace& workspace, cudaStream_t stream)
      : type_(type), matmul_(group.matmul(type)), streams_{stream, group.beside} {
    for (char*& own : workspaces_) own = workspace.take(workspace_bytes);
    follow(group.beside, stream);
  }

  cudaStream_t stream(Lane lane) const { return streams_[lane]; }
  void multiply(Lane lane, const Product& product) { matmul_.run(product, streams_[lane], workspaces_[lane]); }
  // Whatever comes on one lane from now on follows what is on the other now.
  void join(Lane later, Lane earlier) { follow(streams_[later], streams_[earlier]); }

  int64_t bytes(int64_t entries) const { return entries * static_cast<int64_t>(size_of(type_)); }

 private:
  Type type_;
  Matmul& matmul_;
  cudaStream_t streams_[2];
  char* workspaces_[2];
};

inline Matrix matrix(const void* data, int64_t leading, bool transposed = false) {
  return {const_cast<void*>(data), leading, transposed};
}

}  // namespace tpfused
