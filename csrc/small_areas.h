#pragma once

#include "check.h"
#include "device_words.h"
#include "group.h"
#include "numbers.h"

namespace tpfused {

// For kernels: the memory through which the ranks exchange small sums and few rows, see small_sums.h.

constexpr int small_threads = 512;  // of a block

// What a peer has written is not to come from this multiprocessor's cache.
__device__ inline int4 read(const char* from) { return __ldcg(reinterpret_cast<const int4*>(from)); }
__device__ inline void write(char* to, int4 value) { *reinterpret_cast<int4*>(to) = value; }

// Vectors of a thread that are read together: one alone would be waited for before the next is asked for.
template <int Count>
struct Batch {
  static constexpr int count = Count;
  int64_t first, step;

  __device__ int64_t at(int i) const { return first + i * step; }
  template <typename Work>
  __device__ void each(Work work) const {
#pragma unroll
    for (int i = 0; i < count; ++i) work(i);
  }
};

// work(batch) with each i < count that is this thread's, of all blocks'.
template <typename Work>
__device__ void for_each_batch(int64_t count, Work work) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * small_threads;
  int64_t i = blockIdx.x * static_cast<int64_t>(small_threads) + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) work(Batch<4>{i, step});
  for (; i < count; i += step) work(Batch<1>{i, step});
}

// put(i, take(i)) with each.
template <typename Take, typename Put>
__device__ void for_each_vector(int64_t count, Take take, Put put) {
  for_each_batch(count, [&](auto batch) {
    int4 values[batch.count];
    batch.each([&](int a) { values[a] = take(batch.at(a)); });
    batch.each([&](int a) { put(batch.at(a), values[a]); });
  });
}

// What the peers write here, and where this rank writes at theirs.
struct Areas {
  char* area[most_ranks];       // the first of the two, which is followed by the other
  uint32_t* flags[most_ranks];  // [turn][phase][from][block]
  char* tiny[most_ranks];       // the first of the two of tiny sums
  uint32_t* counter;            // of sums so far, and then a ticket
  Replays* replays;
  int rank, size;
  bool in_graph;
  int64_t bytes;   // of an area
  int64_t stride;  // from one rank's numbers to the next one's

  // Where rank `from` writes at `owner`, which is another.
  __device__ char* numbers(int owner, uint32_t turn, int phase, int from) const {
    int before = (from - owner - 1 + size) % size;
    return area[owner] + turn * bytes + phase * (bytes / 2) + before * stride;
  }
  __device__ uint32_t* flag(int owner, uint32_t turn, int phase, int from) const {
    return flags[owner] + ((turn * 2 + phase) * most_ranks + from) * PeerMemory::most_small_blocks + blockIdx.x;
  }

  // Where rank `from` writes a vector of a tiny sum at `owner`.
  __device__ char* words(int owner, uint32_t turn, int from, int64_t vector) const {
    return tiny[owner] + (turn * size + from) * PeerMemory::tiny_bytes + vector * 32;
  }

  // This rank's vectors, to where all peers find them.
  template <typename Batch>
  __device__ void tell_peers(uint32_t turn, int phase, Batch batch, const int4* values) const {
    for (int ahead = 1; ahead < size; ++ahead) {
      char* to = numbers((rank + ahead) % size, turn, phase, rank);
      batch.each([&](int a) { write(to + batch.at(a) * 16, values[a]); });
    }
  }

  // Sums of all ranks' vectors of the first phase, in their order, then of the residual's and the bias, if there are
  // any. The peers' lie at the batch's numbers, and so does the residual; own(a) is this rank's vector, and bias(a) is
  // where the bias of it begins, or null.
  template <typename T, typename Batch, typename Own, typename Bias>
  __device__ void sum(uint32_t turn, Batch batch, Own own, const int4* residual, Bias bias, int4* values) const {
    float sums[batch.count][width<T>] = {};
    auto add_each = [&](auto part) {
      int4 parts[batch.count];
      batch.each([&](int a) { parts[a] = part(a); });
      batch.each([&](int a) { add<T>(parts[a], sums[a]); });
    };
    for (int from = 0; from < size; ++from) {
      const char* theirs = numbers(rank, turn, 0, from);
      if (from == rank) {
        add_each(own);
      } else {
        add_each([&](int a) { return read(theirs + batch.at(a) * 16); });
      }
    }
    if (residual) add_each([&](int a) { return residual[batch.at(a)]; });
    batch.each([&](int a) {
      add_bias<T>(bias(a), sums[a]);
      values[a] = rounded<T>(sums[a]);
    });
  }

  // All threads of the block have written to the peers -> all have what the peers' blocks of this number have written.
  __device__ void meet(uint32_t epoch, int phase) const {
    __syncthreads();
    int peer = threadIdx.x;
    if (peer < size && peer != rank) {
      __threadfence_system();
      store_release(flag(peer, epoch % 2, phase, rank), epoch);
      // Its peer cannot be ahead. Whatever a flag holds that has not been written for long is not taken for this
      // number.
      wait_until_equal(flag(rank, epoch % 2, phase, peer), epoch, replays);
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
        __threadfence();  // before this kernel ends: the next one may read it before `follow_matmul`
      }
    }
    __syncthreads();
    return epoch;
  }

  __device__ void end(uint32_t epoch) const {
    if (in_graph && blockIdx.x == 0 && threadIdx.x == 0) replays->small_ended = epoch;
  }
};

// `stride`: the bytes that a rank writes at each peer, in one phase, for which there must be room.
Areas areas_of(Group& group, int64_t stride);
inline bool has_room(const Group& group, int64_t stride, int phases) {
  return (group.size - 1) * stride <= static_cast<int64_t>(group.peers->small_bytes()) / phases;
}
inline int blocks_for(const Group& group, int64_t vectors) {
  return static_cast<int>(
      std::clamp<int64_t>((vectors + small_threads - 1) / small_threads, 1, group.peers->small_blocks()));
}

// All that the kernel before this one on the stream has written is seen from now on. `launch_after_matmul` lets this
// one start while that one ends, which hides the start and `begin`.
__device__ inline void follow_matmul() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

template <typename... Parameters, typename... Arguments>
void launch_after_matmul(const Group& group, void (*kernel)(Parameters...), int64_t blocks, int threads,
                         cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute serialization{};
  serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  serialization.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &serialization;
  config.numAttrs = group.may_follow_early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "a kernel that exchanges small sums or few rows");
}

}  // namespace tpfused
