#pragma once

#include "small_areas.h"

namespace tpfused {

// For kernels: a vector of 16 bytes as four words, each beside the sum's number, see tiny_sums.h.

// To every rank's area, this one's too.
__device__ inline void give(const Areas& areas, uint32_t epoch, int64_t vector, int4 value) {
  for (int ahead = 0; ahead < areas.size; ++ahead) {
    char* to = areas.words((areas.rank + 1 + ahead) % areas.size, epoch % 2, areas.rank, vector);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(value.x), "r"(epoch), "r"(value.y)
                 : "memory");
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to + 16), "r"(value.z), "r"(epoch),
                 "r"(value.w)
                 : "memory");
  }
}

__device__ inline uint4 look_at(const char* words) {
  uint4 found;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(words)
               : "memory");
  return found;
}

// What `from` gives this rank, once it is there; whatever is, if the watchdog has given up.
__device__ inline int4 take(const Areas& areas, uint32_t epoch, int from, int64_t vector) {
  const char* words = areas.words(areas.rank, epoch % 2, from, vector);
  uint4 first, second;
  for (int tries = 1;; ++tries) {
    first = look_at(words);
    second = look_at(words + 16);
    if (first.y == epoch && first.w == epoch && second.y == epoch && second.w == epoch) break;
    if (tries % 1024 == 0 && areas.replays->given_up) break;
  }
  return {static_cast<int>(first.x), static_cast<int>(first.z), static_cast<int>(second.x), static_cast<int>(second.z)};
}

}  // namespace tpfused
