#pragma once

#include "device_words.h"
#include "group.h"

namespace tpfused {

// For kernels: the memory through which the ranks exchange small sums, see small_sums.h.

// What the peers write here, and where this rank writes at theirs.
struct Areas {
  char* area[most_ranks];       // the first of the two, which is followed by the other
  uint32_t* flags[most_ranks];  // [turn][phase][from][block]
  uint32_t* counter;            // of sums so far; then tickets, of the kernel that adds and of one that pushes
  Replays* replays;
  int rank, size;
  bool in_graph;
  int64_t bytes;   // of an area
  int64_t stride;  // from one rank's numbers to the next one's

  __device__ char* numbers(int owner, uint32_t turn, int phase, int from) const {
    return area[owner] + turn * bytes + phase * (bytes / 2) + from * stride;
  }
  __device__ uint32_t* flag(int owner, uint32_t turn, int phase, int from, int block) const {
    return flags[owner] + ((turn * 2 + phase) * most_ranks + from) * PeerMemory::small_blocks + block;
  }

  // All threads of the block have written to the peers, unless that was `done` by a kernel before -> all have what the
  // peers have written for the block of this number.
  __device__ void meet(uint32_t epoch, int phase, bool done = false) const {
    __syncthreads();
    int peer = threadIdx.x;
    if (peer < size && peer != rank) {
      if (!done) {
        __threadfence_system();
        store_release(flag(peer, epoch % 2, phase, rank, blockIdx.x), epoch);
      }
      wait_until(flag(rank, epoch % 2, phase, peer, blockIdx.x), epoch, replays);
    }
    __syncthreads();
  }

  // The number of the sum that is next, while none is under way on this rank.
  __device__ uint32_t next() const { return *static_cast<volatile uint32_t*>(counter) + 1; }

  // -> the number of this sum. The last block to have read it counts it. The matmul before it may still be writing
  // until `follow_matmul`.
  __device__ uint32_t begin() const {
    __shared__ uint32_t epoch;
    if (threadIdx.x == 0) {
      epoch = next();
      if (in_graph && blockIdx.x == 0) replays->small_begun = epoch;
      __threadfence();
      if (atomicAdd(counter + 1, 1) == gridDim.x - 1) {
        counter[1] = 0;
        counter[0] = epoch;
      }
    }
    __syncthreads();
    return epoch;
  }

  __device__ void end(uint32_t epoch) const {
    if (in_graph && blockIdx.x == 0 && threadIdx.x == 0) replays->small_ended = epoch;
  }
};

Areas areas_of(Group& group, int64_t rows, int64_t n, Type type);
// How many blocks add such a sum, each of which waits for a flag of its own.
int64_t blocks_of(const Group& group, int64_t rows, int64_t n, Type type, bool with_norm);

// What a peer has written is not to come from this multiprocessor's cache.
__device__ inline int4 read(const char* from) { return __ldcg(reinterpret_cast<const int4*>(from)); }
__device__ inline void write(char* to, int4 value) { *reinterpret_cast<int4*>(to) = value; }

}  // namespace tpfused
