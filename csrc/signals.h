#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tpfused {

// Counts in memory as `MemoryOperations` sets and awaits them, for streams that a CUDA graph is captured from: a graph
// would repeat a count that the host has put into it. Here a use's number is on the GPU, and a kernel of two warps,
// which holds no multiprocessor that another kernel needs, reads it there.

constexpr int most_ranks = 64;

// Up to one word a rank.
struct Words {
  uint32_t* at[most_ranks];
  int count = 0;

  void add(uint32_t* word) { at[count++] = word; }
};

// In the host's memory, which the GPU reaches: how many replayed operations have begun and ended, for the watchdog, and
// whether it has given up, after which nothing waits any more.
struct Replays {
  volatile uint32_t begun = 0, ended = 0, small_begun = 0, small_ended = 0, given_up = 0;
};

// One of these two numbers, and the GPU's own count of the same.
struct Tally {
  uint32_t* count;
  volatile uint32_t* told;
};

// A count is `before` more than `unit` times the uses before this one, *number - 1.
struct Count {
  const uint32_t* number;
  uint32_t unit, before;
};

// *number = ++*counter: one more use of a slot.
void count_use(uint32_t* counter, uint32_t* number, cudaStream_t stream);
// The stream goes on when each word has come to the count, modulo 2**32.
void wait_for(const Words& words, Count count, const Replays* replays, cudaStream_t stream);
// Sets each word, which may be a peer's, after all that is before it on the stream.
void set(const Words& words, Count count, cudaStream_t stream);
// One more.
void tick(Tally tally, cudaStream_t stream);

}  // namespace tpfused
