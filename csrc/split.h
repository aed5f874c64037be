#pragma once

#include "small_areas.h"

namespace tpfused {

// For kernels: what every rank has a share of, in vectors of 16 bytes. It comes `batch` times; each time the ranks'
// chunks follow each other, and the last ones may have less, or nothing. What is a rank's own lies together.
struct Split {
  int padded, all, batch;  // vectors of the first rank's chunk, and of all ranks' chunks

  __device__ int first(int rank) const { return min(all, rank * padded); }
  __device__ int chunk(int rank) const { return first(rank + 1) - first(rank); }
  __device__ int count(int rank) const { return chunk(rank) * batch; }
  // Where a rank's i-th vector is among all.
  __device__ int64_t place(int rank, int i) const {
    int of_chunk = chunk(rank);
    return static_cast<int64_t>(i / of_chunk) * all + first(rank) + i % of_chunk;
  }
};

// This rank's part of what each peer owns, to that peer.
__device__ inline void scatter_parts(const Areas& areas, const Split& split, uint32_t turn, const int4* part) {
  for (int ahead = 1; ahead < areas.size; ++ahead) {
    int peer = (areas.rank + ahead) % areas.size;
    char* to = areas.numbers(peer, turn, 0, areas.rank);
    for_each_vector(
        split.count(peer), [&](int64_t i) { return part[split.place(peer, i)]; },
        [&](int64_t i, int4 value) { write(to + i * 16, value); });
  }
}

// put(batch, sums) for what this rank owns, when the peers' parts of it have come. A residual, or none, lies as what it
// owns.
template <typename T, typename Put>
__device__ void sum_own(const Areas& areas, const Split& split, uint32_t turn, const int4* part, const int4* residual,
                        const T* bias, int64_t n, Put put) {
  for_each_batch(split.count(areas.rank), [&](auto batch) {
    int4 sums[batch.count];
    auto place = [&](int a) { return split.place(areas.rank, batch.at(a)); };
    auto own = [&](int a) { return part[place(a)]; };
    auto bias_at = [&](int a) { return bias ? bias + place(a) * width<T> % n : nullptr; };
    areas.sum<T>(turn, batch, own, residual, bias_at, sums);
    put(batch, sums);
  });
}

// What each peer owns, when it has come, to its place among all.
__device__ inline void gather_peers(const Areas& areas, const Split& split, uint32_t turn, int phase, int4* all) {
  for (int ahead = 1; ahead < areas.size; ++ahead) {
    int peer = (areas.rank + ahead) % areas.size;
    const char* from = areas.numbers(areas.rank, turn, phase, peer);
    for_each_vector(
        split.count(peer), [&](int64_t i) { return read(from + i * 16); },
        [&](int64_t i, int4 value) { all[split.place(peer, i)] = value; });
  }
}

}  // namespace tpfused
