#pragma once

#include "operations.h"

namespace tpfused {

// The matmuls of one operation: tile after tile on the caller's stream and the group's in turn, so that each fills the
// multiprocessors that the other's last wave leaves idle.
class Tiles {
 public:
  Tiles(Group& group, Type type, Workspace& workspace, cudaStream_t stream)
      : group_(group), type_(type), matmul_(group.matmul(type)), stream_(stream) {
    for (char*& lane : lanes_) lane = workspace.take(workspace_bytes);
    follow(group.beside, stream);
  }

  // The stream of tile number `index`.
  cudaStream_t stream_of(int index) const { return index % 2 ? group_.beside : stream_; }

  void multiply(int index, const Product& product) { matmul_.run(product, stream_of(index), lanes_[index % 2]); }

  void join() { follow(stream_, group_.beside); }

  int64_t bytes(int64_t entries) const { return entries * static_cast<int64_t>(size_of(type_)); }

 private:
  Group& group_;
  Type type_;
  Matmul& matmul_;
  cudaStream_t stream_;
  char* lanes_[2];
};

inline Matrix matrix(const void* data, int64_t leading, bool transposed = false) {
  return {const_cast<void*>(data), leading, 0, transposed};
}

}  // namespace tpfused
