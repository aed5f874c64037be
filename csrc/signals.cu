#include "check.h"
#include "device_words.h"
#include "signals.h"

namespace tpfused {
namespace {

__device__ uint32_t value_of(Count count) { return (*count.number - 1) * count.unit + count.before; }

__global__ void count_use_kernel(uint32_t* counter, uint32_t* number) { *number = ++*counter; }

__global__ void wait_kernel(Words words, Count count, const Replays* replays) {
  if (threadIdx.x < words.count) wait_until(words.at[threadIdx.x], value_of(count), replays);
}

__global__ void set_kernel(Words words, Count count) {
  if (threadIdx.x < words.count) store_release(words.at[threadIdx.x], value_of(count));
}

__global__ void tick_kernel(Tally tally) { tick(tally); }

}  // namespace

void count_use(uint32_t* counter, uint32_t* number, cudaStream_t stream) {
  count_use_kernel<<<1, 1, 0, stream>>>(counter, number);
  check(cudaGetLastError(), "count_use");
}

void wait_for(const Words& words, Count count, const Replays* replays, cudaStream_t stream) {
  wait_kernel<<<1, most_ranks, 0, stream>>>(words, count, replays);
  check(cudaGetLastError(), "wait_for");
}

void set(const Words& words, Count count, cudaStream_t stream) {
  set_kernel<<<1, most_ranks, 0, stream>>>(words, count);
  check(cudaGetLastError(), "set");
}

void tick(Tally tally, cudaStream_t stream) {
  tick_kernel<<<1, 1, 0, stream>>>(tally);
  check(cudaGetLastError(), "tick");
}

}  // namespace tpfused
