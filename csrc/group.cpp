#include "group.h"

#include <cstdio>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "build_info.h"
#include "check.h"

namespace tpfused {
namespace {

constexpr size_t most_awaited = 1024;  // counts of a slot and peer that a time-out can tell of
constexpr int left_to_others = 4;      // multiprocessors beside the waiting kernels of two groups, at least

// What this thread calls in its life is in no capture, and disturbs none.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What a rank tells its peers of its memory.
struct Handle {
  cudaIpcMemHandle_t memory;
  int small_blocks;
};

}  // namespace

PeerMemory::PeerMemory(int rank, int size, size_t slot_bytes)
    : slot_bytes_((slot_bytes + 4095) / 4096 * 4096),
      small_bytes_(std::min(most_small_bytes, size * slot_bytes_)),
      rank_(rank),
      base_(size, nullptr) {
  static_assert((words + small_flag_words + first_number + most_numbers) * sizeof(uint32_t) <= flag_bytes, "flags");
  if (size > most_ranks) throw std::runtime_error("a group of more than 64 ranks on one host");
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  small_blocks_ = std::clamp((processors - left_to_others) / 2, 1, most_small_blocks);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes()), "cudaMalloc of memory that peers write");
  cudaError_t cleared = cudaMemset(memory, 0, small_at());
  if (cleared == cudaSuccess) cleared = cudaDeviceSynchronize();
  if (cleared != cudaSuccess) cudaFree(memory);
  check(cleared, "clearing flags");
  base_[rank] = own_ = static_cast<char*>(memory);
}

std::string PeerMemory::handle() const {
  Handle handle{{}, small_blocks_};
  check(cudaIpcGetMemHandle(&handle.memory, own_), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof handle);
}

void PeerMemory::connect(const std::vector<std::string>& handles) {
  for (int peer = 0; peer < static_cast<int>(base_.size()); ++peer) {
    if (peer == rank_) continue;
    Handle handle;
    if (handles[peer].size() != sizeof handle) throw std::runtime_error("a peer's memory handle is malformed");
    std::memcpy(&handle, handles[peer].data(), sizeof handle);
    small_blocks_ = std::min(small_blocks_, handle.small_blocks);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, handle.memory, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    base_[peer] = static_cast<char*>(memory);
  }
}

void PeerMemory::disconnect() {
  for (int peer = 0; peer < static_cast<int>(base_.size()); ++peer) {
    if (peer == rank_) continue;
    if (base_[peer]) cudaIpcCloseMemHandle(base_[peer]);
    base_[peer] = nullptr;
  }
}

uint32_t* PeerMemory::number_of_use(bool in_graph) {
  if (!in_graph) return local(first_number + numbers_[0]++ % eager_numbers);
  if (numbers_[1] == most_numbers)
    throw std::runtime_error("too many operations in a group's CUDA graphs, freed ones too: make a new group");
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
  int architecture = 0, features = 0;
  check(kernel_architecture(device, &architecture, &features), "the extension's kernels");
  may_follow_early = features >= 90;
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&transfers, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  check(cudaStreamCreateWithPriority(&beside, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  for (cudaStream_t* stream : {&looking_stream_, &release_stream_}) {
    check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
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
      device, replays_,
      Watchdog::Calls{[this] { return nccl_failure(); },
                      [this](const std::string& operation, const std::string& why) { give_up(operation, why); },
                      [this] { release(); }});
}

void Group::connect_nccl(const ncclUniqueId& id, int processors) {
  DeviceGuard guard(device);
  int of_card = 0;
  check(cudaDeviceGetAttribute(&of_card, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  abort_nccl();                                         // what was made before another rank failed to
  processors = std::clamp(of_card / 4, 1, processors);  // a small card's matmuls keep most of it, too
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.minCTAs = 1;
  config.maxCTAs = processors;
  // NCCL waits without end for ranks that may have failed: by a thread that is left behind then.
  std::packaged_task<ncclComm_t()> connect([=, device = device, rank = rank, size = size]() mutable {
    check(cudaSetDevice(device), "cudaSetDevice");
    ncclComm_t made = nullptr;
    check(ncclCommInitRankConfig(&made, size, id, rank, &config), "ncclCommInitRank");
    return made;
  });
  std::future<ncclComm_t> made = connect.get_future();
  std::thread(std::move(connect)).detach();
  const double seconds = std::min(watchdog->timeout_seconds.load(), 1e9);  // which a clock can count
  if (made.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) {
    char told[96];
    std::snprintf(told, sizeof told, "NCCL has waited for other ranks for %.1f s", seconds);
    throw std::runtime_error(told);
  }
  nccl = made.get();
  nccl_processors = processors;
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
  for (cudaStream_t stream : {transfers, beside, looking_stream_, release_stream_}) {
    if (stream) cudaStreamDestroy(stream);
  }
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
    // Before the events of operations that have ended serve again.
    if (!emptied_.uses.empty() && emptied_.stream != stream) tell_emptied_apart();
    beginning_ = watchdog->begin(operation, stream);
  }
}

void Group::lead(cudaStream_t stream) {
  if (!beginning_) return follow(stream, caller_);
  check(cudaStreamWaitEvent(stream, beginning_, 0), "cudaStreamWaitEvent");
}

void Group::end(cudaStream_t stream) {
  cudaEvent_t ended = capturing() ? nullptr : watchdog->end(stream);
  if (in_use_.empty()) return;
  emptied_ = {in_use_, stream, ended};
  if (capturing()) {
    tell_emptied(stream);  // what a replay is followed by is not known
  } else if (peers->by_device) {
    tell_emptied_apart();
  }
}

void Group::break_off(cudaStream_t stream) {
  if (capturing()) return;  // nothing runs
  try {
    for (cudaStream_t own : {transfers, beside}) follow(stream, own);
    watchdog->end(stream);
  } catch (const std::exception&) {  // the GPU has failed, say: what broke the operation off tells more
  }
}

void Group::count_on_device() {
  uint32_t counts[PeerMemory::slots];
  for (int slot = 0; slot < PeerMemory::slots; ++slot) {
    counts[slot] = (uses_ + PeerMemory::slots - 1 - slot) / PeerMemory::slots;
  }
  RelaxedCapture not_captured;
  if (!emptied_.uses.empty()) tell_emptied_apart();  // perhaps no operation comes any more but the graph's
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMemcpyAsync(peers->counter(0), counts, sizeof counts, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  cudaStreamDestroy(stream);
  peers->by_device = true;
}

void Group::allocate(size_t slot_bytes) {
  check(cudaDeviceSynchronize(), "waiting for operations under way");
  if (peers && peers->by_device) kept_.push_back(std::move(peers));
  peers = nullptr;
  size_t kept = 0;
  for (const auto& each : kept_) kept += each->bytes();
  peer_bytes = kept;
  peers = std::make_unique<PeerMemory>(rank, size, slot_bytes);
  peer_bytes = kept + peers->bytes();
  uses_ = 0;
  emptied_ = {};
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  for (auto& counts : awaited_) counts.clear();
}

void Group::disconnect(bool graphs_too) {
  if (peers && (graphs_too || !peers->by_device)) peers->disconnect();
  if (graphs_too) {
    for (const auto& each : kept_) each->disconnect();
  }
  emptied_ = {};
}

Group::Use Group::next_use(size_t bytes) {
  if (bytes > peers->slot_bytes()) throw std::runtime_error("the memory that peers write is too small");
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
  tell_emptied(transfers, false);  // which follows the caller's stream
  Words words;
  for (int from = 0; from < size; ++from) words.add(peers->emptied(rank, use.slot, from));
  wait(words, use, 0, transfers);
}

void Group::tell_emptied(cudaStream_t stream, bool at_once) {
  for (Use use : std::exchange(emptied_.uses, {})) {
    Words words;
    for (int step = 1; step <= size; ++step) words.add(peers->emptied((rank + step) % size, use.slot, rank));
    if (use.on_device) {
      set(words, use, whole, stream);
    } else {
      gather_writes(words, use, whole);
    }
  }
  if (at_once) operations_.enqueue(stream);
}

void Group::tell_emptied_apart() {
  check(cudaStreamWaitEvent(beside, emptied_.ended, 0), "cudaStreamWaitEvent");
  tell_emptied(beside);
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
