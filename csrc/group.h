#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "matmul.h"
#include "signals.h"
#include "streams.h"
#include "watchdog.h"

namespace tpfused {

// Which rows a rank owns of all: those of its tokens, which are split as torch.chunk does it, so that the last ranks
// may have fewer of them, or none. A token has `each` rows, one after the other; and all tokens come `batch` times, of
// which a rank's own lie together.
struct Rows {
  int64_t tokens, each, batch;
  int size;

  // Of one of the batch.
  int64_t all() const { return tokens * each; }
  int64_t first(int rank) const { return each * std::min(tokens, rank * ((tokens + size - 1) / size)); }
  int64_t count(int rank) const { return first(rank + 1) - first(rank); }

  int64_t total() const { return batch * all(); }
  // The same rows, if each rank's lay together.
  Rows by_rank() const { return {tokens, batch * each, 1, size}; }
};

// Memory that every rank of a group can write: flags, areas for tiny and for small sums, then buffers ("slots") that
// operations use in turn.
//
// A slot's owner and its peers agree through two words a rank on each side. Use number u of a slot: whoever pushes into
// it first waits until the owner has "emptied" it of use u - 1, and counts the owner's "arrived" up after its data. The
// owner itself, which puts its own rows there, waits too: what it empties may be on another stream.
class PeerMemory {
 public:
  static constexpr int slots = 3;                       // operations that may be under way at a time
  static constexpr size_t most_small_bytes = 16 << 20;  // of each of the two areas for small sums
  static constexpr int most_small_blocks = 64;          // of a kernel that exchanges them
  static constexpr size_t tiny_bytes = 128 << 10;       // for each rank's words in each of the two areas for tiny sums
  static constexpr int words = slots * 2 * most_ranks;  // of one rank's slots, in the order of `arrived` and `emptied`

  PeerMemory(int rank, int size, size_t slot_bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  size_t bytes() const { return slots_at() + slots * slot_bytes_; }
  std::string handle() const;                             // for the peers
  void connect(const std::vector<std::string>& handles);  // one of each rank
  void disconnect();                                      // before any peer frees its memory

  size_t slot_bytes() const { return slot_bytes_; }
  char* slot(int rank, int slot) const { return base_[rank] + slots_at() + slot * slot_bytes_; }
  // On `rank`: what `from` has pushed, and (written by that rank) what it has emptied of its own.
  uint32_t* arrived(int rank, int slot, int from) const { return word(rank, 2 * slot * most_ranks + from); }
  uint32_t* emptied(int rank, int slot, int from) const { return word(rank, (2 * slot + 1) * most_ranks + from); }

  // The area and the flags of small sums that alternate ones use, see small_sums.h.
  char* small(int rank, int turn) const { return base_[rank] + small_at() + turn * small_bytes_; }
  size_t small_bytes() const { return small_bytes_; }
  // Of a kernel of this group's that waits for peers: the same on every rank, and so few that those of two groups leave
  // a card multiprocessors for what the peers may have to do first, a collective of NCCL's, say.
  int small_blocks() const { return small_blocks_; }
  uint32_t* small_flags(int rank) const { return word(rank, words); }
  uint32_t* small_counter() const { return local(slots); }  // and the word after it
  // The first of the two areas of tiny sums, see tiny_sums.h.
  char* tiny(int rank) const { return base_[rank] + flag_bytes; }

  // This rank's own counts of each slot's uses, where the GPU keeps them, and a word for one use's number.
  uint32_t* counter(int slot) const { return local(slot); }
  uint32_t* number_of_use(bool in_graph);  // a graph's is its own for ever

  struct Seen {
    std::vector<uint32_t> words;  // from the first `arrived` on, without uses' numbers
    std::vector<uint32_t> tiny;   // of the two areas of tiny sums, the number of each rank's last
  };
  Seen look(cudaStream_t stream) const;

  bool by_device = false;  // whether the GPU keeps the counts, as it does from the first capture on

 private:
  static constexpr size_t flag_bytes = 1 << 20;
  static constexpr int small_flag_words = 2 * 2 * most_ranks * most_small_blocks;
  static constexpr int first_number = 64, eager_numbers = 1 << 12, most_numbers = 1 << 17;

  size_t small_at() const { return flag_bytes + 2 * base_.size() * tiny_bytes; }
  size_t slots_at() const { return small_at() + 2 * small_bytes_; }
  uint32_t* word(int rank, int index) const { return reinterpret_cast<uint32_t*>(base_[rank]) + index; }
  uint32_t* local(int index) const { return reinterpret_cast<uint32_t*>(own_) + words + small_flag_words + index; }

  size_t slot_bytes_;
  size_t small_bytes_;  // for every sum of which a slot has room for a rank's part
  int small_blocks_;
  const int rank_;
  uint32_t numbers_[2] = {0, eager_numbers};  // how many have been used: outside graphs, in turn; and in graphs
  std::vector<char*> base_;                   // of each rank, as this process sees it: its own always
  char* own_ = nullptr;
};

// What has to run in the order in which it is enqueued, on whichever streams, in one CUDA graph too.
class InOrder {
 public:
  void create();
  void destroy();
  // Around each one. `capture`: the number of the capture that is under way, or 0.
  void begin(cudaStream_t stream, unsigned long long capture);
  void end(cudaStream_t stream, unsigned long long capture);

 private:
  struct Last {
    cudaEvent_t ended = nullptr;
    bool any = false;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
  };
  Last eager_, captured_;
};

// What this rank needs to overlap a group's collectives with its matmuls. One a process group and device.
class Group {
 public:
  Group(int device, int rank, int size);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // For the NCCL tier, by all ranks together; NCCL may take so many multiprocessors. Throws where ranks do not come in
  // the time that operations have.
  void connect_nccl(const ncclUniqueId& id, int processors);

  const int device, rank, size;
  bool may_follow_early = false;  // kernels may start while the one before ends, and wait for it: `follow_matmul`
  int nccl_processors = 0;
  std::atomic<ncclComm_t> nccl{nullptr};  // none, too, once an operation has been given up
  cudaStream_t transfers = nullptr;       // copies and collectives
  std::timed_mutex mutex;                 // held while an operation is enqueued
  cudaStream_t beside = nullptr;          // matmuls beside those of the caller's stream
  std::unique_ptr<PeerMemory> peers;

  // Around an operation, eager or captured: something watches whether it ends.
  void begin(const char* operation, cudaStream_t stream);
  void end(cudaStream_t stream);
  // In place of `end`, where it could not be enqueued as a whole: what was is watched, and the caller's stream waits
  // for it, for it may use memory that the caller is about to free. Never throws.
  void break_off(cudaStream_t stream);
  // One of the group's streams follows the caller's as it was at the operation's beginning; in a graph, as it is now.
  void lead(cudaStream_t stream);

  // A slot, and the number of its use: known here or, in a graph that is captured, on the GPU only.
  struct Use {
    int slot;
    uint32_t number;
    const uint32_t* on_device = nullptr;
  };
  // Of an operation that has begun, until its end: whatever is enqueued from now on may use so many bytes of it.
  Use next_use(size_t bytes);
  // On `transfers`: wait until every rank, this one too, has emptied the slot of its last use.
  void wait_until_emptied(Use use);
  // All that a peer is to get, or the first `blocks` of what comes in up to `whole` pieces.
  static constexpr uint32_t whole = 16;
  void tell_arrived(Use use, int peer, cudaStream_t stream, uint32_t blocks = whole);
  void wait_for_arrival(Use use, int from, cudaStream_t stream, uint32_t blocks = whole);

  // Around the kernels of a small sum, which use the same areas in turn.
  void begin_small_sum(cudaStream_t stream) { small_sums_.begin(stream, capture_); }
  void end_small_sum(cudaStream_t stream) { small_sums_.end(stream, capture_); }
  Replays* replays() const { return replays_; }
  bool capturing() const { return capture_ != 0; }
  // What an operation in a graph tells the watchdog at its begin and end; null outside one.
  Tally begun() const { return capturing() ? Tally{replayed_, &replays_->begun} : Tally{}; }
  Tally ended() const { return capturing() ? Tally{replayed_ + 1, &replays_->ended} : Tally{}; }

  // With new memory for `slots`; what a captured graph uses stays.
  void allocate(size_t slot_bytes);
  std::atomic<size_t> peer_bytes{0};  // of all such memory
  // Returns when operations have ended, or one has been given up: nothing that was enqueued writes to peers any more.
  void finish();
  // The peers' memory is no longer mapped here; that of graphs which were captured only if they, too, are done with.
  // After `finish`.
  void disconnect(bool graphs_too);

  // The same bits from every tier and at every run.
  std::atomic<bool> deterministic{false};
  // How many multiprocessors the matmuls leave to NCCL meanwhile.
  int spared() const { return deterministic ? 0 : nccl_processors; }

  // One event a rank, for what arrives by other means.
  void mark(int owner, cudaStream_t stream);
  void wait_for_mark(int owner, cudaStream_t stream);

  Matmul& matmul(Type type);

  // Throws if an operation was broken off, or has not ended in time: nothing that came after it is to be believed.
  void check_alive();
  void fail(const std::string& why);
  std::unique_ptr<Watchdog> watchdog;

 private:
  // Says who is missing, and releases what waits for them.
  void give_up(const std::string& operation, const std::string& why);
  // Which peers this rank waits for, and for what; or why that can't be seen.
  std::string look();
  std::string missing(const PeerMemory::Seen& seen);  // as far as the words in its memory tell
  // Lets everything on this rank's streams go on, so that the GPU and its process can. No harm to repeat.
  void release();
  bool has_failed();
  uint32_t first_awaited(int slot, int peer, const std::vector<uint32_t>& words, uint32_t arrived);
  std::string nccl_failure();  // what it has found wrong by itself, a peer that died or a link that broke; or empty
  void abort_nccl();
  void count_on_device();  // from now on
  // To all ranks, what the last operation has used: as one call, or with the next ones of `operations_`.
  void tell_emptied(cudaStream_t stream, bool at_once = true);
  void tell_emptied_apart();  // on the stream beside, when that operation has ended
  void wait(const Words& words, Use use, uint32_t blocks, cudaStream_t stream);
  void set(const Words& words, Use use, uint32_t blocks, cudaStream_t stream);
  void gather_writes(const Words& words, Use use, uint32_t blocks);  // which `operations_` then enqueues as one call

  MemoryOperations operations_;
  std::atomic<uint32_t> uses_{0};
  unsigned long long capture_ = 0;     // the number of the capture that is under way, or 0
  std::atomic<bool> captured_{false};  // whether a graph has ever been
  cudaStream_t caller_ = nullptr;      // of the operation that is being enqueued
  cudaEvent_t beginning_ = nullptr;    // its beginning; null in a graph
  std::vector<Use> in_use_;            // by it
  // By the last operation that used any. The next one on its stream tells the ranks, in a call that it makes anyway:
  // whoever waits for this waits for what that one sends, too.
  struct Emptied {
    std::vector<Use> uses;
    cudaStream_t stream = nullptr;
    cudaEvent_t ended = nullptr;
  };
  Emptied emptied_;
  std::vector<std::unique_ptr<PeerMemory>> kept_;  // for graphs that were captured with them
  Replays* replays_ = nullptr;                     // the host's
  uint32_t* replayed_ = nullptr;                   // its counts on the GPU
  std::vector<std::deque<uint32_t>> awaited_;      // of each slot and peer, the counts that were waited for, in order
  std::mutex awaited_mutex_;
  std::mutex nccl_mutex_;  // held while it is asked: it must not be destroyed meanwhile
  cudaStream_t looking_stream_ = nullptr, release_stream_ = nullptr;  // made before they are needed: see time_out.cpp
  std::future<PeerMemory::Seen> looking_;
  std::mutex failure_mutex_;
  std::string failure_;
  std::vector<cudaEvent_t> marks_;
  InOrder small_sums_;
  InOrder counts_;  // of uses, by the GPU
  std::array<std::unique_ptr<Matmul>, 4> matmuls_;
};

}  // namespace tpfused
