#include "check.h"
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
  small_scatter(group, o.rows, o.n, o.type, part, o.bias, o.y, stream);
}

}  // namespace

// The peers' rows first and the own ones last: a finished part travels while the next is multiplied. Of two ranks, the
// second half of the own rows starts from the peer's part, which has arrived by then, and the first half's sum is made
// beside it.
void matmul_reduce_scatter(Group& group, Tier tier, const MatmulReduceScatter& o, Workspace workspace,
                           cudaStream_t stream) {
  DeviceGuard guard(group.device);
  if (is_small(group, tier, o.rows, o.n * static_cast<int64_t>(size_of(o.type)), most_scattered)) {
    return few_rows(group, o, workspace, stream);
  }
  Tiles tiles(group, o.type, o.rows.all(), workspace, stream);
  const Parts::Term term{o.x, o.w.forward(), o.k};
  Parts parts(group, tier, tiles, o.rows, {term}, o.n, workspace);
  const int64_t own = o.rows.by_rank().count(group.rank);
  const bool split = group.size == 2 && o.rows.batch == 1 && own >= least_split && o.k > 0 && !group.deterministic;
  const int64_t added = split ? own / 256 * 128 : own;  // rows of which `add_parts` makes the sums

  Product product = parts.own_product(term);
  if (split) product.m = added;
  tiles.multiply(Tiles::caller, product);
  if (split) tiles.join(Tiles::beside, Tiles::caller);
  auto adding = tiles.stream(split ? Tiles::beside : Tiles::caller);
  auto all = parts.scatter().receive(parts.own(), adding);
  add_parts(o.y, all.data(), group.size, o.bias, added, o.n, o.type, adding);
  if (split) {
    auto rest = [&](const void* base, int64_t width) {
      return const_cast<char*>(static_cast<const char*>(base) + tiles.bytes(added * width));
    };
    product.m = own - added;
    product.a.data = rest(product.a.data, o.k);
    product.add = rest(parts.scatter().receive(parts.own(), stream)[1 - group.rank], o.n);
    product.y.data = rest(o.y, o.n);
    product.bias = o.bias;
    tiles.multiply(Tiles::caller, product);
    tiles.join(Tiles::caller, Tiles::beside);
  }
  tiles.end();
}

}  // namespace tpfused
