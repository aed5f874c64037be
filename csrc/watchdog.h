#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "signals.h"

namespace tpfused {

// Watches operations from a thread of its own: a stream that waits for a peer has no time-out. One that does not end
// in time, or under which a link has failed, is reported once, by `report` (in that thread), and nothing is watched
// after it.
class Watchdog {
 public:
  struct Calls {
    std::function<std::string()> failure;  // of the group's links, or empty
    std::function<void(const std::string& operation, const std::string& why)> report;
    std::function<void()> release;  // again and again, after the report, as long as operations have not ended
  };

  Watchdog(int device, const Replays* replays, Calls calls);
  ~Watchdog();

  // Around an operation that is enqueued on `stream`. Time counts from when the GPU has come to its beginning.
  // -> the events of its beginning and end, which other streams may wait for.
  cudaEvent_t begin(const char* operation, cudaStream_t stream);
  cudaEvent_t end(cudaStream_t stream);
  // `operation` is captured: from now on, that replays end is watched too.
  void watch_replays(const char* operation);
  // Returns when all operations have ended, replayed ones too; or those that were watched when one was reported. With
  // `releasing`, as for a group that has failed, nothing is reported any more, and they are let go at once.
  void finish(bool releasing);

  std::atomic<double> timeout_seconds{600};

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    const char* operation = nullptr;  // a literal
    cudaEvent_t begun = nullptr, ended = nullptr;
    bool running = false;  // seen to have begun, at `since`
    Clock::time_point since;
  };
  void watch();
  cudaEvent_t spare_event();  // or none
  void forget_oldest();
  bool replays_under_way() const;
  std::string replayed() const;  // what may be
  bool replays_expired(Clock::time_point now);
  void until_reported(std::unique_lock<std::mutex>& lock);
  void report(std::unique_lock<std::mutex>& lock, const std::string& operation, const std::string& why);
  void let_go(std::unique_lock<std::mutex>& lock);

  const int device_;
  const Replays* const replays_;
  const Calls calls_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  bool stopping_ = false, releasing_ = false, reported_ = false;
  bool over_ = false;               // what was watched at the report has ended
  std::set<std::string> captured_;  // the operations' names
  uint32_t replays_ended_ = 0;
  Clock::time_point replays_since_;  // when that many had ended, or none was under way
  std::deque<Watched> watched_;
  size_t since_last_look_ = 0;  // operations
  Watched next_;                // which is being enqueued; of the thread that does
  std::vector<cudaEvent_t> spare_;
  std::thread thread_;
};

}  // namespace tpfused
