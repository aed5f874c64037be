// How a group gives up an operation that has not ended in time, or under which NCCL has failed.
//
// It has to go without most of CUDA's functions: while another thread frees memory, which waits for the GPU, and so for
// that very operation, they wait for that thread (seen of copies, kernel launches and new streams, with driver 580; not
// of writes to words by an existing stream, of events that are asked, and of idle streams that are waited for).
#include <chrono>
#include <cstdio>
#include <thread>

#include "check.h"
#include "group.h"

namespace tpfused {
namespace {

constexpr auto longest_look = std::chrono::seconds(1);
constexpr uint32_t far_ahead = 1u << 30;  // counts go round: twice as far would be behind

}  // namespace

bool Group::has_failed() {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return !failure_.empty();
}

void Group::check_alive() {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

void Group::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.empty()) failure_ = why;
}

void Group::give_up(const std::string& operation, const std::string& why) {
  std::string told =
      operation + " on rank " + std::to_string(rank) + " of " + std::to_string(size) + " " + why + look();
  fail(told);  // before a thread that waits for the GPU goes on, and asks
  release();
  std::fprintf(stderr, "tpfused: %s; what this group computed since is wrong\n", told.c_str());
  abort_nccl();
}

std::string Group::look() {
  const std::string unseen = "; which ranks are missing can't be seen";  // what Python asks the others for
  if (!peers) return unseen;
  try {
    looking_ = std::async(std::launch::async, [this, seen = peers.get()] {
      cudaSetDevice(device);
      auto mode = cudaStreamCaptureModeRelaxed;  // another thread's capture is not disturbed
      cudaThreadExchangeStreamCaptureMode(&mode);
      return seen->look(looking_stream_);
    });
    if (looking_.wait_for(longest_look) == std::future_status::ready) {
      std::string told = missing(looking_.get());
      return told.empty() ? unseen : told;
    }
  } catch (const std::exception&) {  // of a GPU that has failed, or for want of threads
  }
  return unseen + " while memory is freed, or the GPU waited for";
}

void Group::release() {
  replays_->given_up = 1;
  if (!peers) return;
  const uint32_t beyond = (uses_ / PeerMemory::slots + 2) * whole + far_ahead;
  for (int slot = 0; slot < PeerMemory::slots; ++slot) {  // a call each, which takes up to 255 words
    MemoryOperations operations;
    for (int peer = 0; peer < size; ++peer) {
      operations.write(peers->arrived(rank, slot, peer), beyond);
      operations.write(peers->emptied(rank, slot, peer), beyond);
    }
    try {
      operations.enqueue(release_stream_);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "tpfused: what waits for other ranks can't be released: %s\n", error.what());
    }
  }
}

PeerMemory::Seen PeerMemory::look(cudaStream_t stream) const {
  const int ranks = static_cast<int>(base_.size());
  Seen seen;
  seen.words.resize(words + small_flag_words + first_number);
  seen.tiny.resize(2 * ranks);
  check(cudaMemcpyAsync(seen.words.data(), own_, seen.words.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  const char* numbers = own_ + flag_bytes + sizeof(uint32_t);  // of the first word of each rank in each area
  check(cudaMemcpy2DAsync(seen.tiny.data(), sizeof(uint32_t), numbers, tiny_bytes, sizeof(uint32_t), 2 * ranks,
                          cudaMemcpyDeviceToHost, stream),
        "cudaMemcpy2DAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return seen;
}

uint32_t Group::first_awaited(int slot, int peer, const std::vector<uint32_t>& words, uint32_t arrived) {
  if (peers->by_device) {  // whose own count does not tell which block it waits for: the first, at least
    uint32_t uses = words[peers->counter(slot) - peers->arrived(rank, 0, 0)];
    uint32_t first = uses ? (uses - 1) * whole + 1 : arrived;
    return static_cast<int32_t>(first - arrived) > 0 ? first : arrived;
  }
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  for (uint32_t count : awaited_[slot * size + peer]) {
    if (static_cast<int32_t>(count - arrived) > 0) return count;
  }
  return arrived;
}

std::string Group::missing(const PeerMemory::Seen& seen) {
  const std::vector<uint32_t>& words = seen.words;
  const uint32_t* first = peers->arrived(rank, 0, 0);
  std::string told;
  // Of all uses of slots, in the order in which operations take them, the first that waits is what the others wait for.
  uint32_t oldest = UINT32_MAX;
  for (int slot = 0; slot < PeerMemory::slots; ++slot) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      uint32_t arrived = words[peers->arrived(rank, slot, peer) - first];
      uint32_t awaited = first_awaited(slot, peer, words, arrived);
      if (awaited == arrived) continue;
      uint32_t use = (awaited - 1) / whole * PeerMemory::slots + slot;
      if (use > oldest) continue;
      if (use < oldest) told.clear();
      oldest = use;
      const std::string rows = "rank " + std::to_string(peer) + "'s rows";
      bool in_blocks = awaited % whole && !peers->by_device;
      told += in_blocks ? "; block " + std::to_string(awaited % whole) + " of " + rows + " has not arrived"
                        : "; " + rows + " have not arrived";
    }
  }
  if (!told.empty()) return told;
  // The number of a small sum is in a flag of each peer, or in its words.
  uint32_t sum = words[peers->small_counter() - first];
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const uint32_t* flags = peers->small_flags(rank) + sum % 2 * 2 * most_ranks * PeerMemory::most_small_blocks;
    bool arrived =
        words[flags - first + peer * PeerMemory::most_small_blocks] == sum || seen.tiny[sum % 2 * size + peer] == sum;
    if (!arrived) told += "; rank " + std::to_string(peer) + "'s part has not arrived";
  }
  return told;
}

std::string Group::nccl_failure() {
  std::lock_guard<std::mutex> lock(nccl_mutex_);
  ncclResult_t state = ncclSuccess;
  if (!nccl || ncclCommGetAsyncError(nccl, &state) != ncclSuccess) return "";
  if (state == ncclSuccess || state == ncclInProgress) return "";
  return std::string("NCCL: ") + ncclGetErrorString(state) + " (" + ncclGetLastError(nccl) + ")";
}

void Group::abort_nccl() {
  ncclComm_t aborted;
  {
    std::lock_guard<std::mutex> lock(nccl_mutex_);
    aborted = nccl.exchange(nullptr);
  }
  if (!aborted) return;
  // Another thread may be calling NCCL with it. One that does not come back is kept by NCCL: the abort lets it go.
  if (mutex.try_lock_for(longest_look)) mutex.unlock();
  auto abort = [aborted, device = device] {
    cudaSetDevice(device);
    ncclCommAbort(aborted);
  };
  // NCCL ends its kernels at once, but returns only when no CUDA graph that holds one is left.
  if (captured_) return std::thread(abort).detach();
  abort();
}

void Group::finish() {
  const bool failed = has_failed();
  if (failed) {  // a part of an operation may be enqueued that nobody watches
    release();
    abort_nccl();
  }
  watchdog->finish(failed);
  for (cudaStream_t stream : {transfers, beside}) {
    while (has_failed() && cudaStreamQuery(stream) == cudaErrorNotReady) {  // as the watchdog lets go
      release();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    cudaStreamSynchronize(stream);
  }
  if (looking_.valid()) looking_.wait();
}

}  // namespace tpfused
