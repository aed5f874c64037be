#include "check.h"
#include "small_rows.h"
#include "split.h"

namespace tpfused {
namespace {

__global__ void __launch_bounds__(small_threads) gather(Areas areas, Split split, const int4* x, int4* all) {
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  for_each_batch(split.count(areas.rank), [&](auto batch) {
    int4 values[batch.count];
    batch.each([&](int a) { values[a] = x[batch.at(a)]; });
    areas.tell_peers(turn, 0, batch, values);
    batch.each([&](int a) { all[split.place(areas.rank, batch.at(a))] = values[a]; });
  });
  areas.meet(epoch, 0);
  gather_peers(areas, split, turn, 0, all);
  areas.end(epoch);
}

template <typename T>
__global__ void __launch_bounds__(small_threads)
    scatter(Areas areas, Split split, const int4* part, const int4* residual, const T* bias, int64_t n, int4* y) {
  uint32_t epoch = areas.begin(), turn = epoch % 2;
  follow_matmul();
  scatter_parts(areas, split, turn, part);
  areas.meet(epoch, 0);
  sum_own<T>(areas, split, turn, part, residual, bias, n,
             [&](auto batch, const int4* sums) { batch.each([&](int a) { y[batch.at(a)] = sums[a]; }); });
  areas.end(epoch);
}

// Bytes that the first rank, which has the most, gives to each peer of its own rows.
int64_t own_bytes(const Rows& rows, int64_t row_bytes) { return rows.by_rank().count(0) * row_bytes; }

Split split_of(const Rows& rows, int64_t row_bytes) {
  auto vectors = [&](int64_t count) { return static_cast<int>(count * row_bytes / 16); };
  return {vectors(rows.count(0)), vectors(rows.all()), static_cast<int>(rows.batch)};
}

}  // namespace

bool is_small(const Group& group, Tier tier, const Rows& rows, int64_t row_bytes, int64_t most) {
  if (tier != Tier::p2p || group.deterministic) return false;
  const int64_t own = own_bytes(rows, row_bytes);
  bool in_vectors = rows.count(0) * row_bytes % 16 == 0 && rows.all() * row_bytes % 16 == 0;
  return in_vectors && own > 0 && (group.size - 1) * own <= most && has_room(group, own, 1);
}

void small_gather(Group& group, const Rows& rows, int64_t row_bytes, const void* x, void* all, cudaStream_t stream) {
  const int64_t own = own_bytes(rows, row_bytes);
  group.begin_small_sum(stream);
  launch_after_matmul(group, gather, blocks_for(group, own / 16), small_threads, stream, areas_of(group, own),
                      split_of(rows, row_bytes), static_cast<const int4*>(x), static_cast<int4*>(all));
  group.end_small_sum(stream);
}

void small_scatter(Group& group, const Rows& rows, int64_t n, Type type, const void* part, const void* residual,
                   const void* bias, void* y, cudaStream_t stream) {
  const int64_t row_bytes = n * size_of(type), own = own_bytes(rows, row_bytes);
  group.begin_small_sum(stream);
  by_type(type, [&](auto zero) {
    using T = decltype(zero);
    launch_after_matmul(group, scatter<T>, blocks_for(group, own / 16), small_threads, stream, areas_of(group, own),
                        split_of(rows, row_bytes), static_cast<const int4*>(part), static_cast<const int4*>(residual),
                        static_cast<const T*>(bias), n, static_cast<int4*>(y));
  });
  group.end_small_sum(stream);
}

}  // namespace tpfused
