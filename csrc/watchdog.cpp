#include "watchdog.h"

#include <cstdio>
#include <utility>

#include "check.h"

namespace tpfused {
namespace {

constexpr auto pause = std::chrono::milliseconds(100);
constexpr auto longest_release = std::chrono::seconds(1);
constexpr size_t looked_at_together = 16;  // operations; for each alone, that would be a call more

std::string not_ended(double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "has not ended after %.*f s", seconds < 10 ? 1 : 0, seconds);
  return text;
}

}  // namespace

Watchdog::Watchdog(int device, const Replays* replays, Calls calls)
    : device_(device), replays_(replays), calls_(std::move(calls)), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  watched_.push_back(next_);
  for (const Watched& each : watched_) {
    if (each.begun) cudaEventDestroy(each.begun);
    if (each.ended) cudaEventDestroy(each.ended);
  }
  for (cudaEvent_t event : spare_) cudaEventDestroy(event);
}

cudaEvent_t Watchdog::spare_event() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spare_.empty()) return nullptr;
  cudaEvent_t event = spare_.back();
  spare_.pop_back();
  return event;
}

void Watchdog::forget_oldest() {
  spare_.push_back(watched_.front().begun);
  spare_.push_back(watched_.front().ended);
  watched_.pop_front();
}

// Without the lock, which the other thread needs: it is what frees a full stream, on which these calls would wait.
cudaEvent_t Watchdog::begin(const char* operation, cudaStream_t stream) {
  next_.operation = operation;
  for (cudaEvent_t* event : {&next_.begun, &next_.ended}) {  // or those of an operation that was broken off
    if (!*event) *event = spare_event();
    if (!*event) check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
  }
  check(cudaEventRecord(next_.begun, stream), "cudaEventRecord");
  return next_.begun;
}

cudaEvent_t Watchdog::end(cudaStream_t stream) {
  check(cudaEventRecord(next_.ended, stream), "cudaEventRecord");
  cudaEvent_t ended = next_.ended;
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    first = watched_.empty();
    watched_.push_back(std::exchange(next_, {}));
    // Those that have ended need no thread to say so, and their events serve again.
    if (++since_last_look_ >= looked_at_together) {
      since_last_look_ = 0;
      while (watched_.size() > 1 && cudaEventQuery(watched_.front().ended) == cudaSuccess) forget_oldest();
    }
  }
  if (first) wake_.notify_all();  // else it looks every now and then
  return ended;
}

void Watchdog::finish(bool releasing) {
  std::unique_lock<std::mutex> lock(mutex_);
  releasing_ |= releasing;
  wake_.notify_all();
  idle_.wait(lock, [this] { return watched_.empty() && (over_ || (!reported_ && !replays_under_way())); });
}

void Watchdog::report(std::unique_lock<std::mutex>& lock, const std::string& operation, const std::string& why) {
  reported_ = true;  // from now on `finish` waits for all that follows
  lock.unlock();
  calls_.report(operation, why);
  lock.lock();
}

// Once does not do: a peer that comes to the same later sets counts that have been set too far back. And what another
// thread was about to enqueue comes yet.
void Watchdog::let_go(std::unique_lock<std::mutex>& lock) {
  // Replays end at once when they are let go, but on a GPU that has failed never.
  const auto given = Clock::now() + longest_release;
  while (!stopping_) {
    bool replaying = replays_under_way() && Clock::now() < given;
    if (watched_.empty() && !replaying) {
      over_ = true;
      idle_.notify_all();
      wake_.wait(lock);
    } else if (!watched_.empty() && cudaEventQuery(watched_.front().ended) != cudaErrorNotReady) {
      forget_oldest();
    } else {
      lock.unlock();
      calls_.release();
      lock.lock();
      wake_.wait_for(lock, pause);
    }
  }
}

void Watchdog::watch_replays(const char* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (captured_.empty()) replays_since_ = Clock::now();
  captured_.insert(operation);
  wake_.notify_all();
}

bool Watchdog::replays_under_way() const {
  return replays_->begun + replays_->small_begun != replays_->ended + replays_->small_ended;
}

std::string Watchdog::replayed() const {
  std::string names;
  for (const std::string& name : captured_) names += (names.empty() ? "" : " or ") + name;
  return "a replayed " + names;
}

bool Watchdog::replays_expired(Clock::time_point now) {
  uint32_t ended = replays_->ended + replays_->small_ended;
  if (!replays_under_way() || ended != replays_ended_) {
    replays_ended_ = ended;
    replays_since_ = now;
  }
  return std::chrono::duration<double>(now - replays_since_).count() > timeout_seconds;
}

void Watchdog::watch() {
  cudaSetDevice(device_);
  auto mode = cudaStreamCaptureModeRelaxed;  // another thread's capture is not disturbed
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  until_reported(lock);
  reported_ = true;
  let_go(lock);
}

void Watchdog::until_reported(std::unique_lock<std::mutex>& lock) {
  while (!stopping_ && !releasing_) {
    auto now = Clock::now();
    if (!captured_.empty() && replays_expired(now)) return report(lock, replayed(), not_ended(timeout_seconds));
    if (watched_.empty()) {
      idle_.notify_all();
      if (captured_.empty()) {
        wake_.wait(lock);
        continue;
      }
      if (replays_under_way()) {
        std::string failure = calls_.failure();
        if (!failure.empty()) return report(lock, replayed(), "has failed: " + failure);
      }
      wake_.wait_for(lock, pause);
      continue;
    }
    // Operations of one group rarely overlap, so the oldest is the one that others wait for.
    Watched& oldest = watched_.front();
    if (cudaEventQuery(oldest.ended) != cudaErrorNotReady) {  // ended, or lost with all else on the GPU
      forget_oldest();
      continue;
    }
    if (!oldest.running && cudaEventQuery(oldest.begun) == cudaSuccess) {
      oldest.running = true;
      oldest.since = now;
    }
    double seconds = std::chrono::duration<double>(now - oldest.since).count();
    if (oldest.running && seconds > timeout_seconds) return report(lock, oldest.operation, not_ended(seconds));
    std::string failure = calls_.failure();
    if (!failure.empty()) return report(lock, oldest.operation, "has failed: " + failure);
    wake_.wait_for(lock, pause);
  }
}

}  // namespace tpfused
