#include "transfers.h"

#include "check.h"

namespace tpfused {
namespace {

constexpr int64_t most_pitch = INT32_MAX;  // bytes from one row to the next of a two-dimensional copy

// A rank's rows, which lie together in `x`, to their places among all.
void copy_among(char* all, const void* x, Rows rows, int rank, int64_t row_bytes, cudaStream_t stream) {
  const int64_t bytes = rows.count(rank) * row_bytes;
  if (bytes == 0 || rows.batch == 0) return;
  const int64_t pitch = rows.all() * row_bytes;
  all += rows.first(rank) * row_bytes;
  if (rows.batch == 1 || pitch > most_pitch) {
    for (int64_t each = 0; each < rows.batch; ++each) {
      copy(all + each * pitch, static_cast<const char*>(x) + each * bytes, bytes, stream);
    }
    return;
  }
  check(cudaMemcpy2DAsync(all, pitch, x, bytes, bytes, rows.batch, cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpy2DAsync");
}

// NCCL starts what is called in its life together, at `start`. It is over, too, where a call throws: NCCL would only
// collect whatever this thread calls later, torch's collectives among it.
class NcclCalls {
 public:
  NcclCalls() { check(ncclGroupStart(), "ncclGroupStart"); }
  ~NcclCalls() {
    if (open_) ncclGroupEnd();
  }
  void start() {
    open_ = false;
    check(ncclGroupEnd(), "ncclGroupEnd");
  }
  NcclCalls(const NcclCalls&) = delete;
  NcclCalls& operator=(const NcclCalls&) = delete;

 private:
  bool open_ = true;
};

// What a gather and a scatter of one tier have in common.
template <typename Interface>
class ByCopies : public Interface {
 public:
  ByCopies(Group& group, Rows rows, int64_t row_bytes, int64_t all_rows)
      : group_(group), rows_(rows), row_bytes_(row_bytes), use_(group.next_use(all_rows * row_bytes)) {}

  int processors() const override { return 0; }

 protected:
  char* slot(int rank) const { return group_.peers->slot(rank, use_.slot); }

  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  Group::Use use_;
};

template <typename Interface>
class ByNccl : public Interface {
 public:
  ByNccl(Group& group, Rows rows, int64_t row_bytes, char* memory)
      : group_(group), rows_(rows), row_bytes_(row_bytes), memory_(memory) {}

  int processors() const override { return group_.spared(); }

 protected:
  // One step of an exchange in which every rank sends to one peer and receives from another.
  void send_and_receive(const void* sent, int64_t sent_bytes, int to, void* received, int64_t received_bytes,
                        int from) {
    ncclComm_t nccl = group_.nccl;
    cudaStream_t transfers = group_.transfers;
    NcclCalls calls;
    if (sent_bytes > 0) check(ncclSend(sent, sent_bytes, ncclInt8, to, nccl, transfers), "ncclSend");
    if (received_bytes > 0) check(ncclRecv(received, received_bytes, ncclInt8, from, nccl, transfers), "ncclRecv");
    calls.start();
  }

  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  char* memory_;  // what arrives
};

class CopyGather : public ByCopies<Gather> {
 public:
  CopyGather(Group& group, Rows rows, int64_t row_bytes, const void* x, bool whole)
      : ByCopies(group, rows, row_bytes, rows.total()) {
    const int rank = group.rank, size = group.size;
    group.wait_until_emptied(use_);
    for (int step = 1; step < size; ++step) {
      int peer = (rank - step + size) % size;
      copy_among(slot(peer), x, rows, rank, row_bytes, group.transfers);
      group.tell_arrived(use_, peer, group.transfers);  // a rank without rows says so too
    }
    if (whole) {
      copy_among(slot(rank), x, rows, rank, row_bytes, group.transfers);
      group.mark(rank, group.transfers);
    }
  }

  const char* arrive(int owner, cudaStream_t stream) override {
    if (owner == group_.rank) {
      group_.wait_for_mark(owner, stream);
    } else {
      group_.wait_for_arrival(use_, owner, stream);
    }
    return all() + rows_.first(owner) * row_bytes_;
  }

  const char* all() const override { return slot(group_.rank); }
};

class CopyScatter : public ByCopies<Scatter> {
 public:
  CopyScatter(Group& group, Rows rows, int64_t row_bytes)
      : ByCopies(group, rows, row_bytes, group.size * rows.count(group.rank)) {
    group.wait_until_emptied(use_);
  }

  void send(int owner, const char* part, cudaStream_t stream) override {
    follow(group_.transfers, stream);
    int64_t bytes = rows_.count(owner) * row_bytes_;
    copy(slot(owner) + group_.rank * bytes, part, bytes, group_.transfers);
    group_.tell_arrived(use_, owner, group_.transfers);
  }

  std::vector<const void*> receive(const char* own, cudaStream_t stream) override {
    std::vector<const void*> parts(group_.size);
    int64_t bytes = rows_.count(group_.rank) * row_bytes_;
    for (int from = 0; from < group_.size; ++from) {
      parts[from] = from == group_.rank ? own : slot(group_.rank) + from * bytes;
      if (from != group_.rank) group_.wait_for_arrival(use_, from, stream);
    }
    return parts;
  }
};

class NcclGather : public ByNccl<Gather> {
 public:
  // `staged`: for a peer's rows that come together, and are copied to their places among all.
  NcclGather(Group& group, Rows rows, int64_t row_bytes, const void* x, bool whole, char* memory, char* staged)
      : ByNccl(group, rows, row_bytes, memory) {
    const int rank = group.rank, size = group.size;
    for (int step = 1; step < size; ++step) {
      int to = (rank - step + size) % size, from = (rank + step) % size;
      const int64_t sent = rows.count(rank) * row_bytes, received = rows.count(from) * row_bytes;
      if (rows.batch > most_messages) {
        send_and_receive(x, rows.batch * sent, to, staged, rows.batch * received, from);
        copy_among(memory, staged, rows, from, row_bytes, group.transfers);
      } else {
        NcclCalls calls;
        for (int64_t each = 0; each < rows.batch; ++each) {
          send_and_receive(static_cast<const char*>(x) + each * sent, sent, to, at(from, each), received, from);
        }
        calls.start();
      }
      group.mark(from, group.transfers);
    }
    if (whole) {
      copy_among(memory, x, rows, rank, row_bytes, group.transfers);
      group.mark(rank, group.transfers);
    }
  }

  const char* arrive(int owner, cudaStream_t stream) override {
    group_.wait_for_mark(owner, stream);
    return at(owner, 0);
  }

  const char* all() const override { return memory_; }

 private:
  char* at(int owner, int64_t each) const { return memory_ + (each * rows_.all() + rows_.first(owner)) * row_bytes_; }
};

// As many bytes as NCCL's own reduce-scatter, and the parts are added in the ranks' order.
class NcclScatter : public ByNccl<Scatter> {
 public:
  using ByNccl::ByNccl;

  void send(int owner, const char* part, cudaStream_t stream) override {
    const int rank = group_.rank, size = group_.size;
    int from = (2 * rank - owner + size) % size;  // as far before this rank as the owner is after it
    int64_t bytes = rows_.count(rank) * row_bytes_;
    follow(group_.transfers, stream);
    send_and_receive(part, rows_.count(owner) * row_bytes_, owner, memory_ + from * bytes, bytes, from);
  }

  std::vector<const void*> receive(const char* own, cudaStream_t stream) override {
    if (stream != group_.transfers) follow(stream, group_.transfers);
    std::vector<const void*> parts(group_.size);
    for (int from = 0; from < group_.size; ++from) {
      parts[from] = from == group_.rank ? own : memory_ + from * rows_.count(group_.rank) * row_bytes_;
    }
    return parts;
  }
};

}  // namespace

void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

std::unique_ptr<Gather> start_gather(Group& group, Tier tier, Rows rows, int64_t row_bytes, const void* x, bool whole,
                                     Workspace& workspace) {
  if (tier == Tier::p2p) return std::make_unique<CopyGather>(group, rows, row_bytes, x, whole);
  char* all = workspace.take(rows.total() * row_bytes);
  char* staged = rows.batch > most_messages ? workspace.take(rows.batch * rows.count(0) * row_bytes) : nullptr;
  return std::make_unique<NcclGather>(group, rows, row_bytes, x, whole, all, staged);
}

std::unique_ptr<Scatter> start_scatter(Group& group, Tier tier, Rows rows, int64_t row_bytes, Workspace& workspace) {
  if (tier == Tier::p2p) return std::make_unique<CopyScatter>(group, rows, row_bytes);
  char* received = workspace.take(group.size * rows.count(group.rank) * row_bytes);
  return std::make_unique<NcclScatter>(group, rows, row_bytes, received);
}

}  // namespace tpfused
