#include "check.h"
#include "parts.h"
#include "reduce.h"

namespace tpfused {
namespace {

constexpr int64_t least_split = 2048;  // own rows: a matmul of fewer leaves multiprocessors idle

}  // namespace

// The peers' rows first and the own ones last: a finished part travels while the next is multiplied. Of two ranks, the
// second half of the own rows starts from the peer's part, which has arrived by then, and the first half's sum is made
// beside it.
void matmul_reduce_scatter(Group& group, Tier tier, const MatmulReduceScatter& o, Workspace workspace,
                           cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  Parts parts(group, tier, tiles, o.rows, o.x, o.w.forward(), o.k, o.n, workspace);
  const int64_t own = o.rows.count(group.rank);
  const int64_t added = group.size == 2 && own >= least_split ? own / 256 * 128 : own;  // rows added by `add_parts`

  tiles.multiply(Tiles::caller, parts.own_product(0, added));
  tiles.join(Tiles::beside, Tiles::caller);
  auto all = parts.scatter().receive(parts.own(), tiles.stream(Tiles::beside));
  add_parts(o.y, all.data(), group.size, o.bias, added, o.n, o.type, tiles.stream(Tiles::beside));
  if (added < own) {
    auto rest = [&](const void* base) { return static_cast<const char*>(base) + tiles.bytes(added * o.n); };
    Product product = parts.own_product(added, own - added);
    product.add = rest(parts.scatter().receive(parts.own(), stream)[1 - group.rank]);
    product.y.data = const_cast<char*>(rest(o.y));
    product.bias = o.bias;
    tiles.multiply(Tiles::caller, product);
  }
  tiles.join(Tiles::caller, Tiles::beside);
  parts.scatter().finish(stream);
}

}  // namespace tpfused
