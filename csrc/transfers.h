#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "group.h"

namespace tpfused {

// How rows travel: by NCCL, on any topology; or by copy engines into the peers' memory, on one host, which take no
// multiprocessor and no staging copy. The operations are written once, on what the two have in common.
enum class Tier { nccl = 0, p2p = 1 };

// Memory that an operation uses until the caller's stream has passed it: two matmuls' workspaces, and its own.
class Workspace {
 public:
  Workspace(void* data, size_t bytes) : next_(static_cast<char*>(data)), end_(next_ + bytes) {}
  char* take(size_t bytes) {
    char* taken = next_;
    next_ += (bytes + 255) / 256 * 256;
    if (next_ > end_) throw std::runtime_error("the workspace is too small");
    return taken;
  }

 private:
  char *next_, *end_;
};

// Of bytes that lie together, which may be a peer's.
void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream);

class Transfer {
 public:
  virtual ~Transfer() = default;
  // How many multiprocessors a matmul beside it should leave to it.
  virtual int processors() const = 0;
};

// Every rank's rows on their way here. Peers arrive in the order rank + 1, rank + 2, ...
class Gather : public Transfer {
 public:
  // Makes `stream` wait for the rows of `owner` (this rank only if `whole`) -> where they lie, among all.
  virtual const char* arrive(int owner, cudaStream_t stream) = 0;
  // All rows, when all have arrived.
  virtual const char* all() const = 0;
};

// NCCL's messages to a peer at a time: with more batches of rows, a peer's come as one and are put to their places.
// So many are measured as 8 are, and more as 16 (`bucket` of tpfused/overlap/choice.py).
constexpr int64_t most_messages = 11;

// Starts it on the group's stream. `x`: this rank's rows; `whole`: they are needed among the others too.
std::unique_ptr<Gather> start_gather(Group& group, Tier tier, Rows rows, int64_t row_bytes, const void* x, bool whole,
                                     Workspace& workspace);

// Each rank's part of every rank's rows, on its way to their owner: rows that lie together (`Rows::by_rank`).
class Scatter : public Transfer {
 public:
  // Sends the part of the rows of `owner`, after what is on `stream`. All peers, in the order rank + 1, rank + 2, ...
  virtual void send(int owner, const char* part, cudaStream_t stream) = 0;
  // Makes `stream` wait for the peers' parts of this rank's rows -> all parts in the ranks' order, with this one's own.
  virtual std::vector<const void*> receive(const char* own, cudaStream_t stream) = 0;
};

std::unique_ptr<Scatter> start_scatter(Group& group, Tier tier, Rows rows, int64_t row_bytes, Workspace& workspace);

}  // namespace tpfused
