#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "matmul.h"
#include "streams.h"
#include "watchdog.h"

namespace tpfused {

// Which rows a rank owns of all, `each` for a token: the tokens are split as torch.chunk does it, and the last ranks
// may have fewer of them, or none.
struct Rows {
  int64_t tokens, each;
  int size;

  int64_t total() const { return tokens * each; }
  int64_t first(int rank) const { return each * std::min(tokens, rank * ((tokens + size - 1) / size)); }
  int64_t count(int rank) const { return first(rank + 1) - first(rank); }
};

// Memory that every rank of a group can write: a page of flags, then buffers ("slots") that operations use in turn.
//
// A slot's owner and its peers agree through two words a peer on each side. Use number u of a slot: whoever pushes into
// it first waits until the owner has "emptied" it of use u - 1, and counts the owner's "arrived" up after its data.
class PeerMemory {
 public:
  static constexpr int slots = 3;  // operations that may be under way at a time

  PeerMemory(int size, size_t slot_bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  std::string handle() const;                                       // for the peers
  void connect(int rank, const std::vector<std::string>& handles);  // one of each rank
  void disconnect();                                                // before any peer frees its memory

  char* slot(int rank, int slot) const { return base_[rank] + flag_bytes + slot * slot_bytes_; }
  // On `rank`: what `from` has pushed, and (written by that peer) what it has emptied of its own.
  uint32_t* arrived(int rank, int slot, int from) const { return word(rank, 2 * slot, from); }
  uint32_t* emptied(int rank, int slot, int from) const { return word(rank, 2 * slot + 1, from); }

  static constexpr int words = slots * 2 * 64;  // of one rank, in the order of the above

 private:
  static constexpr size_t flag_bytes = 1 << 16;
  uint32_t* word(int rank, int row, int from) const {
    return reinterpret_cast<uint32_t*>(base_[rank]) + row * 64 + from;  // a row of words for up to 64 ranks
  }

  size_t slot_bytes_;
  int rank_ = -1;
  std::vector<char*> base_;  // of each rank, as this process sees it
  char* own_ = nullptr;
};

// What this rank needs to overlap a group's collectives with its matmuls. One a process group and device.
class Group {
 public:
  Group(int device, int rank, int size, const ncclUniqueId& id, int nccl_processors);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const int device, rank, size;
  const int nccl_processors;  // as many as NCCL may take
  ncclComm_t nccl = nullptr;
  cudaStream_t transfers = nullptr;  // copies and collectives
  std::mutex mutex;                  // held while an operation is enqueued
  cudaStream_t beside = nullptr;     // matmuls beside those of the caller's stream, and before them
  std::unique_ptr<PeerMemory> peers;

  // A slot, and the number of its use.
  struct Use {
    int slot;
    uint32_t number;
  };
  Use next_use();
  void restart_uses();  // with new memory
  // On `transfers`: wait until every peer has emptied the slot of its last use.
  void wait_until_emptied(Use use);
  // On `stream`: this rank has read all that was pushed to it.
  void tell_emptied(Use use, cudaStream_t stream);
  // All that a peer is to get, or the first `blocks` of what comes in up to `whole` pieces.
  static constexpr uint32_t whole = 16;
  void tell_arrived(Use use, int peer, cudaStream_t stream, uint32_t blocks = whole);
  void wait_for_arrival(Use use, int from, cudaStream_t stream, uint32_t blocks = whole);

  // One event a rank, for what arrives by other means.
  void mark(int owner, cudaStream_t stream);
  void wait_for_mark(int owner, cudaStream_t stream);

  Matmul& matmul(Type type);

  // Throws if an operation was broken off, or has not ended in time: nothing that came after it is to be believed.
  void check_alive();
  void fail(const std::string& why);
  std::unique_ptr<Watchdog> watchdog;

 private:
  // Says who is missing, and lets everything on this rank's streams go on, so that the GPU and its process can.
  void give_up(const std::string& operation, double seconds);

  MemoryOperations operations_;
  uint32_t uses_ = 0;
  std::vector<std::atomic<uint32_t>> awaited_;  // of each slot and peer, the count that was waited for last
  std::mutex failure_mutex_;
  std::string failure_;
  std::vector<cudaEvent_t> marks_;
  std::array<std::unique_ptr<Matmul>, 4> matmuls_;
};

}  // namespace tpfused
