#include "parts.h"
#include "reduce.h"
#include "small_rows.h"

namespace tpfused {
namespace {

constexpr int64_t least_split = 2048;  // own rows: a matmul of fewer leaves multiprocessors idle

void few_rows(Group& group, const MatmulReduceScatter& o, Workspace& workspace, cudaStream_t stream) {
  char* of_matmul = workspace.take(workspace_bytes(o.type));
  char* part = workspace.take(o.rows.total() * o.n * size_of(o.type));
  Product product{matrix(o.x, o.k), o.w.forward(), matrix(part, o.n), o.rows.total(), o.n, o.k};
  group.matmul(o.type).run(product, stream, of_matmul);
  small_scatter(group, o.rows, o.n, o.type, part, o.residual, o.bias, o.y, stream);
}

}  // namespace

// The peers' rows first and the own ones last: a finished part travels while the next is multiplied. Of two ranks, the
// first half of the own rows is summed beside the matmul of the second, which starts from the peer's part, which has
// arrived by then, unless a residual comes to the sum: that would be rounded once more.
void matmul_reduce_scatter(Group& group, Tier tier, const MatmulReduceScatter& o, Workspace workspace,
                           cudaStream_t stream) {
  const int64_t row_bytes = o.n * size_of(o.type);
  const bool in_vectors = row_bytes % 16 == 0;  // as the bias is added
  if (in_vectors && is_small(group, tier, o.rows, row_bytes, most_scattered)) {
    return few_rows(group, o, workspace, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  const Parts::Term term{o.x, o.w.forward(), o.k};
  Parts parts(group, tier, tiles, o.rows, {term}, o.n, workspace);
  const int64_t own = o.rows.by_rank().count(group.rank);
  const bool split = group.size == 2 && o.rows.batch == 1 && own >= least_split && o.k > 0 && !group.deterministic;
  const int64_t half = own / 256 * 128;
  auto from = [&](int64_t row, const void* base, int64_t width) {
    return base ? const_cast<char*>(static_cast<const char*>(base) + tiles.bytes(row * width)) : nullptr;
  };
  auto sum = [&](int64_t first, int64_t rows, cudaStream_t on) {
    auto all = parts.scatter().receive(parts.own(), on);
    if (o.residual) all.push_back(o.residual);
    for (const void*& part : all) part = from(first, part, o.n);
    add_parts(from(first, o.y, o.n), all.data(), static_cast<int>(all.size()), o.bias, rows, o.n, o.type, on);
  };

  Product product = parts.own_product(term);
  if (!split) {
    tiles.multiply(Tiles::caller, product);
    sum(0, own, stream);
    return tiles.end();
  }
  product.m = half;
  tiles.multiply(Tiles::caller, product);
  follow(group.transfers, stream);
  // Received before that sum is enqueued: what comes by NCCL is waited for with all that is on its stream by then.
  const void* theirs = o.residual ? nullptr : parts.scatter().receive(parts.own(), stream)[1 - group.rank];
  sum(0, half, group.transfers);
  product.m = own - half;
  product.a.data = from(half, product.a.data, o.k);
  if (o.residual) {
    product.y.data = from(half, product.y.data, o.n);
    tiles.multiply(Tiles::caller, product);
    sum(half, own - half, stream);
  } else {
    product.add = from(half, theirs, o.n);
    product.y.data = from(half, o.y, o.n);
    product.bias = o.bias;
    tiles.multiply(Tiles::caller, product);
  }
  tiles.end();
}

}  // namespace tpfused
