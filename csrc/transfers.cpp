#include "transfers.h"

#include "check.h"

namespace tpfused {
namespace {

void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

class CopyGather : public Gather {
 public:
  CopyGather(Group& group, Rows rows, int64_t row_bytes, const void* x, bool whole, cudaStream_t stream)
      : group_(group), rows_(rows), row_bytes_(row_bytes), use_(group.next_use()) {
    const int rank = group.rank, size = group.size;
    const int64_t first = rows.first(rank) * row_bytes, bytes = rows.count(rank) * row_bytes;
    follow(group.transfers, stream);
    group.wait_until_emptied(use_);
    for (int step = 1; step < size; ++step) {
      int peer = (rank - step + size) % size;
      copy(group.peers->slot(peer, use_.slot) + first, x, bytes, group.transfers);
      group.tell_arrived(use_, peer, group.transfers);  // a rank without rows says so too
    }
    if (whole) copy(group.peers->slot(rank, use_.slot) + first, x, bytes, group.transfers);
    group.mark(rank, group.transfers);
  }

  int processors() const override { return 0; }

  const char* arrive(int owner, cudaStream_t stream) override {
    if (owner == group_.rank) {
      group_.wait_for_mark(owner, stream);
    } else {
      group_.wait_for_arrival(use_, owner, stream);
    }
    return all() + rows_.first(owner) * row_bytes_;
  }

  const char* all() const override { return group_.peers->slot(group_.rank, use_.slot); }

  void finish(cudaStream_t stream) override {
    follow(stream, group_.transfers);
    group_.tell_emptied(use_, stream);
  }

 private:
  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  Group::Use use_;
};

class CopyScatter : public Scatter {
 public:
  CopyScatter(Group& group, Rows rows, int64_t row_bytes)
      : group_(group), rows_(rows), row_bytes_(row_bytes), use_(group.next_use()) {
    group.wait_until_emptied(use_);
  }

  int processors() const override { return 0; }

  void send(int owner, const char* part, cudaStream_t stream) override {
    follow(group_.transfers, stream);
    int64_t bytes = rows_.count(owner) * row_bytes_;
    copy(group_.peers->slot(owner, use_.slot) + group_.rank * bytes, part, bytes, group_.transfers);
    group_.tell_arrived(use_, owner, group_.transfers);
  }

  std::vector<const void*> receive(const char* own, cudaStream_t stream) override {
    std::vector<const void*> parts(group_.size);
    int64_t bytes = rows_.count(group_.rank) * row_bytes_;
    for (int from = 0; from < group_.size; ++from) {
      parts[from] = from == group_.rank ? own : group_.peers->slot(group_.rank, use_.slot) + from * bytes;
      if (from != group_.rank) group_.wait_for_arrival(use_, from, stream);
    }
    return parts;
  }

  void finish(cudaStream_t stream) override {
    follow(stream, group_.transfers);
    group_.tell_emptied(use_, stream);
  }

 private:
  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  Group::Use use_;
};

// One step of an exchange in which every rank sends to one peer and receives from another.
void send_and_receive(Group& group, const void* sent, int64_t sent_bytes, int to, void* received,
                      int64_t received_bytes, int from) {
  check(ncclGroupStart(), "ncclGroupStart");
  if (sent_bytes > 0) check(ncclSend(sent, sent_bytes, ncclInt8, to, group.nccl, group.transfers), "ncclSend");
  if (received_bytes > 0)
    check(ncclRecv(received, received_bytes, ncclInt8, from, group.nccl, group.transfers), "ncclRecv");
  check(ncclGroupEnd(), "ncclGroupEnd");
}

class NcclGather : public Gather {
 public:
  NcclGather(Group& group, Rows rows, int64_t row_bytes, const void* x, bool whole, char* all, cudaStream_t stream)
      : group_(group), rows_(rows), row_bytes_(row_bytes), all_(all) {
    const int rank = group.rank, size = group.size;
    const int64_t bytes = rows.count(rank) * row_bytes;
    follow(group.transfers, stream);
    for (int step = 1; step < size; ++step) {
      int to = (rank - step + size) % size, from = (rank + step) % size;
      send_and_receive(group, x, bytes, to, at(from), rows.count(from) * row_bytes, from);
      group.mark(from, group.transfers);
    }
    if (whole) copy(at(rank), x, bytes, group.transfers);
    group.mark(rank, group.transfers);
  }

  int processors() const override { return group_.nccl_processors; }

  const char* arrive(int owner, cudaStream_t stream) override {
    group_.wait_for_mark(owner, stream);
    return at(owner);
  }

  const char* all() const override { return all_; }

  void finish(cudaStream_t stream) override { follow(stream, group_.transfers); }

 private:
  char* at(int owner) const { return all_ + rows_.first(owner) * row_bytes_; }

  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  char* all_;
};

// As many bytes as NCCL's own reduce-scatter, and the parts are added in the ranks' order.
class NcclScatter : public Scatter {
 public:
  NcclScatter(Group& group, Rows rows, int64_t row_bytes, char* received)
      : group_(group), rows_(rows), row_bytes_(row_bytes), received_(received) {}

  int processors() const override { return group_.nccl_processors; }

  void send(int owner, const char* part, cudaStream_t stream) override {
    const int rank = group_.rank, size = group_.size;
    int from = (2 * rank - owner + size) % size;  // as far before this rank as the owner is after it
    int64_t bytes = rows_.count(rank) * row_bytes_;
    follow(group_.transfers, stream);
    send_and_receive(group_, part, rows_.count(owner) * row_bytes_, owner, received_ + from * bytes, bytes, from);
  }

  std::vector<const void*> receive(const char* own, cudaStream_t stream) override {
    follow(stream, group_.transfers);
    std::vector<const void*> parts(group_.size);
    for (int from = 0; from < group_.size; ++from) {
      parts[from] = from == group_.rank ? own : received_ + from * rows_.count(group_.rank) * row_bytes_;
    }
    return parts;
  }

  void finish(cudaStream_t) override {}

 private:
  Group& group_;
  Rows rows_;
  int64_t row_bytes_;
  char* received_;
};

}  // namespace

std::unique_ptr<Gather> start_gather(Group& group, Tier tier, Rows rows, int64_t row_bytes, const void* x, bool whole,
                                     Workspace& workspace, cudaStream_t stream) {
  if (tier == Tier::p2p) return std::make_unique<CopyGather>(group, rows, row_bytes, x, whole, stream);
  char* all = workspace.take(rows.total() * row_bytes);
  return std::make_unique<NcclGather>(group, rows, row_bytes, x, whole, all, stream);
}

std::unique_ptr<Scatter> start_scatter(Group& group, Tier tier, Rows rows, int64_t row_bytes, Workspace& workspace) {
  if (tier == Tier::p2p) return std::make_unique<CopyScatter>(group, rows, row_bytes);
  char* received = workspace.take(group.size * rows.count(group.rank) * row_bytes);
  return std::make_unique<NcclScatter>(group, rows, row_bytes, received);
}

}  // namespace tpfused
