#pragma once

#include "signals.h"

namespace tpfused {

// For kernels: words that other GPUs read and write.

__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Until *word >= value modulo 2**32, or the watchdog has given up, which is looked at now and then: it is far away.
__device__ inline void wait_until(const uint32_t* word, uint32_t value, const Replays* replays) {
  for (int tries = 1; static_cast<int32_t>(load_acquire(word) - value) < 0; ++tries) {
    if (tries % 1024 == 0 && replays->given_up) return;
  }
}

// The same for a count that must be met exactly.
__device__ inline void wait_until_equal(const uint32_t* word, uint32_t value, const Replays* replays) {
  for (int tries = 1; load_acquire(word) != value; ++tries) {
    if (tries % 1024 == 0 && replays->given_up) return;
  }
}

// By one thread. Others may do it at the same time: whoever has told a count looks whether it still is the latest.
__device__ inline void tick(Tally tally) {
  uint32_t latest = atomicAdd(tally.count, 1) + 1, told;
  do {
    told = latest;
    *tally.told = told;
    __threadfence_system();
    latest = atomicAdd(tally.count, 0);
  } while (latest != told);
}

}  // namespace tpfused
