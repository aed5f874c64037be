#include "group.h"

#include <cstdio>
#include <cstring>
#include <thread>

#include "check.h"

namespace tpfused {
namespace {

constexpr size_t most_awaited = 1024;  // counts of a slot and peer that a time-out can tell of

}  // namespace

PeerMemory::PeerMemory(int size, size_t slot_bytes)
    : slot_bytes_((slot_bytes + 4095) / 4096 * 4096),
      small_bytes_(std::min(most_small_bytes, size * slot_bytes_)),
      base_(size, nullptr) {
  static_assert((words + small_flag_words + first_number + most_numbers) * sizeof(uint32_t) <= flag_bytes, "flags");
  if (size > most_ranks) throw std::runtime_error("a group of more than 64 ranks on one host");
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes()), "cudaMalloc of memory that peers write");
  own_ = static_cast<char*>(memory);
  check(cudaMemset(own_, 0, small_at()), "cudaMemset of flags");
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

std::vector<uint32_t> PeerMemory::all_words(cudaStream_t stream) const {
  std::vector<uint32_t> found(words + small_flag_words + first_number);
  cudaMemcpyAsync(found.data(), own_, found.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost, stream);
  cudaStreamSynchronize(stream);
  return found;
}

uint32_t* PeerMemory::number_of_use(bool in_graph) {
  if (!in_graph) return local(first_number + numbers_[0]++ % eager_numbers);
  if (numbers_[1] == most_numbers) throw std::runtime_error("too many operations in CUDA graphs of one group");
  return local(first_number + numbers_[1]++);
}

PeerMemory::~PeerMemory() {
  disconnect();
  cudaFree(own_);
}

void InOrder::create() {
  for (Last* last : {&eager_, &captured_}) {
    check(cudaEventCreateWithFlags(&last->ended, cudaEventDisableTiming), "cudaEventCreate");
  }
}

void InOrder::destroy() {
  for (Last* last : {&eager_, &captured_}) {
    if (last->ended) cudaEventDestroy(last->ended);
  }
}

void InOrder::begin(cudaStream_t stream, unsigned long long capture) {
  const Last& last = capture ? captured_ : eager_;
  if (!last.any || last.stream == stream || last.capture != capture) return;
  check(cudaStreamWaitEvent(stream, last.ended, 0), "cudaStreamWaitEvent");
}

void InOrder::end(cudaStream_t stream, unsigned long long capture) {
  Last& last = capture ? captured_ : eager_;
  check(cudaEventRecord(last.ended, stream), "cudaEventRecord");
  last.any = true;
  last.stream = stream;
  last.capture = capture;
}

Group::Group(int device, int rank, int size)
    : device(device), rank(rank), size(size), awaited_(PeerMemory::slots * size) {
  DeviceGuard guard(device);
  check(cudaDeviceGetAttribute(&architecture, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&transfers, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  check(cudaStreamCreateWithPriority(&beside, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  marks_.resize(size, nullptr);
  for (cudaEvent_t& mark : marks_) check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "cudaEventCreate");
  small_sums_.create();
  counts_.create();
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(Replays), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  replays_ = new (memory) Replays{};
  check(cudaMalloc(&memory, 2 * sizeof(uint32_t)), "cudaMalloc");
  replayed_ = static_cast<uint32_t*>(memory);
  check(cudaMemset(replayed_, 0, 2 * sizeof(uint32_t)), "cudaMemset");
  watchdog = std::make_unique<Watchdog>(
      device, replays_, [this](const std::string& operation, double seconds) { give_up(operation, seconds); });
}

void Group::connect_nccl(const ncclUniqueId& id, int processors) {
  DeviceGuard guard(device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.minCTAs = 1;
  config.maxCTAs = processors;
  ncclComm_t made = nullptr;
  check(ncclCommInitRankConfig(&made, size, id, rank, &config), "ncclCommInitRank");
  nccl = made;
  nccl_processors = processors;
}

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

void Group::give_up(const std::string& operation, double seconds) {
  std::string told = operation + " on rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " has not ended after " + std::to_string(static_cast<int>(seconds)) + " s" + release();
  fail(told);
  std::fprintf(stderr, "tpfused: %s; what this group computed since is wrong\n", told.c_str());
  abort_nccl();
}

std::string Group::release() {
  std::string told;
  if (released_.exchange(true)) return told;  // twice as far ahead would be behind what is waited for
  replays_->given_up = 1;
  cudaStream_t stream = nullptr;  // the waiting ones are busy
  if (peers && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) {
    std::vector<uint32_t> words = peers->all_words(stream);
    told = missing(words, stream);
    words.resize(PeerMemory::words);
    for (uint32_t& word : words) word += 1u << 30;  // beyond whatever is waited for
    cudaMemcpyAsync(peers->arrived(rank, 0, 0), words.data(), words.size() * sizeof(uint32_t), cudaMemcpyHostToDevice,
                    stream);
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  return told;
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

std::string Group::missing(const std::vector<uint32_t>& words, cudaStream_t stream) {
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
    const uint32_t* flags = peers->small_flags(rank) + sum % 2 * 2 * most_ranks * PeerMemory::small_blocks;
    const char* tiny_words = peers->tiny(rank) + (sum % 2 * size + peer) * PeerMemory::tiny_bytes;
    uint32_t tiny = 0;
    cudaMemcpyAsync(&tiny, tiny_words + sizeof tiny, sizeof tiny, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    bool arrived = words[flags - first + peer * PeerMemory::small_blocks] == sum || tiny == sum;
    if (!arrived) told += "; rank " + std::to_string(peer) + "'s part has not arrived";
  }
  return told;
}

void Group::abort_nccl() {
  ncclComm_t aborted = nccl.exchange(nullptr);
  if (!aborted) return;
  auto abort = [aborted, device = device] {
    cudaSetDevice(device);
    ncclCommAbort(aborted);
  };
  // NCCL ends its kernels at once, but returns only when no CUDA graph that holds one is left.
  if (captured_) return std::thread(abort).detach();
  abort();
}

Group::~Group() {
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(device);
  finish();  // else freeing memory would wait for an operation that waits for a rank that has died
  watchdog.reset();
  abort_nccl();  // waits for no other rank
  peers.reset();
  kept_.clear();
  if (replayed_) cudaFree(replayed_);
  if (replays_) cudaFreeHost(replays_);
  for (auto& matmul : matmuls_) matmul.reset();
  for (cudaEvent_t mark : marks_) {
    if (mark) cudaEventDestroy(mark);
  }
  small_sums_.destroy();
  counts_.destroy();
  if (transfers) cudaStreamDestroy(transfers);
  if (beside) cudaStreamDestroy(beside);
  cudaSetDevice(previous);
}

void Group::begin(const char* operation, cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  capture_ = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &capture_), "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) capture_ = 0;
  caller_ = stream;
  in_use_.clear();
  if (capturing()) {
    captured_ = true;
    if (peers && !peers->by_device) count_on_device();
    watchdog->watch_replays(operation);
    beginning_ = nullptr;
  } else {
    beginning_ = watchdog->begin(operation, stream);
  }
}

void Group::lead() {
  if (!beginning_) return follow({beside, transfers}, caller_);
  for (cudaStream_t stream : {beside, transfers})
    check(cudaStreamWaitEvent(stream, beginning_, 0), "cudaStreamWaitEvent");
}

void Group::end(cudaStream_t stream) {
  if (!capturing()) {
    cudaEvent_t ended = watchdog->end(stream);
    if (in_use_.empty()) return;
    // What comes next on the caller's stream need not wait until the peers know; but a graph's streams have to be
    // joined.
    check(cudaStreamWaitEvent(beside, ended, 0), "cudaStreamWaitEvent");
    stream = beside;
  }
  tell_emptied(stream);
}

void Group::count_on_device() {
  uint32_t counts[PeerMemory::slots];
  for (int slot = 0; slot < PeerMemory::slots; ++slot) {
    counts[slot] = (uses_ + PeerMemory::slots - 1 - slot) / PeerMemory::slots;
  }
  auto mode = cudaStreamCaptureModeRelaxed;  // this is not to be captured
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMemcpyAsync(peers->counter(0), counts, sizeof counts, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  cudaStreamDestroy(stream);
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  peers->by_device = true;
}

void Group::allocate(size_t slot_bytes) {
  check(cudaDeviceSynchronize(), "waiting for operations under way");
  if (peers && peers->by_device) kept_.push_back(std::move(peers));
  peers = nullptr;
  peers = std::make_unique<PeerMemory>(size, slot_bytes);
  uses_ = 0;
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  for (auto& counts : awaited_) counts.clear();
}

size_t Group::peer_bytes() const {
  size_t bytes = peers ? peers->bytes() : 0;
  for (const auto& kept : kept_) bytes += kept->bytes();
  return bytes;
}

void Group::finish() {
  if (has_failed()) {  // a part of an operation may be enqueued that nobody watches
    release();
    abort_nccl();
  } else {
    watchdog->finish();
  }
  for (cudaStream_t stream : {transfers, beside}) cudaStreamSynchronize(stream);
}

void Group::disconnect() {
  if (peers && !peers->by_device) peers->disconnect();
}

Group::Use Group::next_use() {
  uint32_t use = uses_++;
  int slot = static_cast<int>(use % PeerMemory::slots);
  in_use_.push_back({slot, use / PeerMemory::slots + 1});
  if (peers->by_device) {
    uint32_t* number = peers->number_of_use(capturing());
    counts_.begin(caller_, capture_);  // a use has the same number on every rank
    count_use(peers->counter(slot), number, caller_);
    counts_.end(caller_, capture_);
    follow({transfers, beside}, caller_);  // else they would read the number of the last replay
    in_use_.back() = {slot, 0, number};
  }
  return in_use_.back();
}

void Group::wait(const Words& words, Use use, uint32_t blocks, cudaStream_t stream) {
  if (use.on_device) return wait_for(words, {use.on_device, whole, blocks}, replays_, stream);
  for (int i = 0; i < words.count; ++i) operations_.wait(words.at[i], (use.number - 1) * whole + blocks);
  operations_.enqueue(stream);
}

void Group::set(const Words& words, Use use, uint32_t blocks, cudaStream_t stream) {
  if (use.on_device) return tpfused::set(words, {use.on_device, whole, blocks}, stream);
  gather_writes(words, use, blocks);
  operations_.enqueue(stream);
}

void Group::gather_writes(const Words& words, Use use, uint32_t blocks) {
  for (int i = 0; i < words.count; ++i) operations_.write(words.at[i], (use.number - 1) * whole + blocks);
}

void Group::wait_until_emptied(Use use) {
  Words words;
  for (int step = 1; step < size; ++step) words.add(peers->emptied(rank, use.slot, (rank + step) % size));
  wait(words, use, 0, transfers);
}

void Group::tell_emptied(cudaStream_t stream) {
  for (Use use : in_use_) {
    Words words;
    for (int step = 1; step < size; ++step) words.add(peers->emptied((rank + step) % size, use.slot, rank));
    if (use.on_device) {
      set(words, use, whole, stream);
    } else {
      gather_writes(words, use, whole);
    }
  }
  operations_.enqueue(stream);
}

void Group::tell_arrived(Use use, int peer, cudaStream_t stream, uint32_t blocks) {
  Words words;
  words.add(peers->arrived(peer, use.slot, rank));
  set(words, use, blocks, stream);
}

void Group::wait_for_arrival(Use use, int from, cudaStream_t stream, uint32_t blocks) {
  if (!use.on_device) {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    auto& counts = awaited_[use.slot * size + from];
    counts.push_back((use.number - 1) * whole + blocks);
    if (counts.size() > most_awaited) counts.pop_front();
  }
  Words words;
  words.add(peers->arrived(rank, use.slot, from));
  wait(words, use, blocks, stream);
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
