#include "group.h"

#include <cstdio>
#include <cstring>

#include "check.h"

namespace tpfused {

PeerMemory::PeerMemory(int size, size_t slot_bytes)
    : slot_bytes_((slot_bytes + 4095) / 4096 * 4096), base_(size, nullptr) {
  size_t bytes = flag_bytes + slots * slot_bytes_;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc of memory that peers write");
  own_ = static_cast<char*>(memory);
  check(cudaMemset(own_, 0, flag_bytes), "cudaMemset of flags");
  check(cudaDeviceSynchronize(), "clearing flags");
}

std::string PeerMemory::handle() const {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, own_), "cudaIpcGetMemHandle");
  return std::string(handle.reserved, sizeof handle.reserved);
}

void PeerMemory::connect(int rank, const std::vector<std::string>& handles) {
  rank_ = rank;
  for (int peer = 0; peer < static_cast<int>(base_.size()); ++peer) {
    if (peer == rank) {
      base_[peer] = own_;
      continue;
    }
    cudaIpcMemHandle_t handle;
    if (handles[peer].size() != sizeof handle.reserved) throw std::runtime_error("a peer's memory handle is malformed");
    std::memcpy(handle.reserved, handles[peer].data(), sizeof handle.reserved);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    base_[peer] = static_cast<char*>(memory);
  }
}

void PeerMemory::disconnect() {
  for (int peer = 0; peer < static_cast<int>(base_.size()); ++peer) {
    if (peer != rank_ && base_[peer]) cudaIpcCloseMemHandle(base_[peer]);
    base_[peer] = nullptr;
  }
}

PeerMemory::~PeerMemory() {
  disconnect();
  cudaFree(own_);
}

Group::Group(int device, int rank, int size, const ncclUniqueId& id, int nccl_processors)
    : device(device), rank(rank), size(size), nccl_processors(nccl_processors), awaited_(PeerMemory::slots * size) {
  DeviceGuard guard(device);
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&transfers, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  check(cudaStreamCreateWithPriority(&beside, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  marks_.resize(size, nullptr);
  for (cudaEvent_t& mark : marks_) check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "cudaEventCreate");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.minCTAs = 1;
  config.maxCTAs = nccl_processors;
  check(ncclCommInitRankConfig(&nccl, size, id, rank, &config), "ncclCommInitRank");
  watchdog = std::make_unique<Watchdog>(
      device, [this](const std::string& operation, double seconds) { give_up(operation, seconds); });
}

void Group::check_alive() {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

void Group::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.empty()) failure_ = why;
}

void Group::give_up(const std::string& operation, double seconds) {
  std::string told = operation + " on rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " has not ended after " + std::to_string(static_cast<int>(seconds)) + " s";
  cudaStream_t stream = nullptr;  // the waiting ones are busy
  if (peers && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) {
    std::vector<uint32_t> words(PeerMemory::words);
    size_t bytes = words.size() * sizeof(uint32_t);
    uint32_t* flags = peers->arrived(rank, 0, 0);
    cudaMemcpyAsync(words.data(), flags, bytes, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    for (int peer = 0; peer < size; ++peer) {
      bool missing = false;
      for (int slot = 0; slot < PeerMemory::slots && peer != rank; ++slot) {
        uint32_t arrived = words[peers->arrived(rank, slot, peer) - flags];
        missing |= static_cast<int32_t>(arrived - awaited_[slot * size + peer]) < 0;
      }
      if (missing) told += "; rank " + std::to_string(peer) + "'s rows have not arrived";
    }
    for (uint32_t& word : words) word += 1u << 30;  // beyond whatever is waited for
    cudaMemcpyAsync(flags, words.data(), bytes, cudaMemcpyHostToDevice, stream);
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  fail(told);
  std::fprintf(stderr, "tpfused: %s; what this group computed since is wrong\n", told.c_str());
  if (nccl) {
    ncclCommAbort(nccl);
    nccl = nullptr;
  }
}

Group::~Group() {
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(device);
  watchdog.reset();
  if (nccl) ncclCommAbort(nccl);  // waits for nobody
  peers.reset();
  for (auto& matmul : matmuls_) matmul.reset();
  for (cudaEvent_t mark : marks_) {
    if (mark) cudaEventDestroy(mark);
  }
  if (transfers) cudaStreamDestroy(transfers);
  if (beside) cudaStreamDestroy(beside);
  cudaSetDevice(previous);
}

Group::Use Group::next_use() {
  uint32_t use = uses_++;
  return {static_cast<int>(use % PeerMemory::slots), use / PeerMemory::slots + 1};
}

void Group::restart_uses() {
  uses_ = 0;
  for (auto& count : awaited_) count = 0;
}

void Group::wait_until_emptied(Use use) {
  for (int step = 1; step < size; ++step) {
    operations_.wait(peers->emptied(rank, use.slot, (rank + step) % size), use.number - 1);
  }
  operations_.enqueue(transfers);
}

void Group::tell_emptied(Use use, cudaStream_t stream) {
  for (int step = 1; step < size; ++step) {
    operations_.write(peers->emptied((rank + step) % size, use.slot, rank), use.number);
  }
  operations_.enqueue(stream);
}

void Group::tell_arrived(Use use, int peer, cudaStream_t stream, uint32_t blocks) {
  operations_.write(peers->arrived(peer, use.slot, rank), (use.number - 1) * whole + blocks);
  operations_.enqueue(stream);
}

void Group::wait_for_arrival(Use use, int from, cudaStream_t stream, uint32_t blocks) {
  uint32_t count = (use.number - 1) * whole + blocks;
  awaited_[use.slot * size + from] = count;
  operations_.wait(peers->arrived(rank, use.slot, from), count);
  operations_.enqueue(stream);
}

void Group::mark(int owner, cudaStream_t stream) { check(cudaEventRecord(marks_[owner], stream), "cudaEventRecord"); }

void Group::wait_for_mark(int owner, cudaStream_t stream) {
  check(cudaStreamWaitEvent(stream, marks_[owner], 0), "cudaStreamWaitEvent");
}

Matmul& Group::matmul(Type type) {
  auto& known = matmuls_[static_cast<int>(type)];
  if (!known) known = std::make_unique<Matmul>(device, type);
  return *known;
}

}  // namespace tpfused
