#include "check.h"
#include "parts.h"
#include "reduce.h"

namespace tpfused {

void column_backward(Group& group, Tier tier, const ColumnBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  std::unique_ptr<Gather> gather;
  if (o.wants_dw) gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, true, workspace, stream);

  const int64_t own = o.rows.count(group.rank);
  std::unique_ptr<Parts> parts;
  if (o.wants_dx) {
    parts = std::make_unique<Parts>(group, tier, tiles, o.rows, o.dpre, o.w.backward(), o.n, o.k, workspace);
    tiles.multiply(Tiles::caller, parts->own_product(0, own));
    tiles.join(Tiles::beside, Tiles::caller);
  }
  if (o.wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
    Product product{matrix(o.dpre, o.n, true), matrix(gather->all(), o.k), matrix(o.dw, o.k), o.n, o.k, o.rows.total()};
    tiles.multiply(Tiles::caller, product);
  }
  if (o.wants_dx) {
    auto beside = tiles.stream(Tiles::beside);
    auto all = parts->scatter().receive(parts->own(), beside);
    add_parts(o.dx, all.data(), group.size, nullptr, own, o.k, o.type, beside);
    tiles.join(Tiles::caller, Tiles::beside);
    parts->scatter().finish(stream);
  }
  if (o.wants_dw) gather->finish(stream);
}

void row_backward(Group& group, Tier tier, const RowBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.n), o.dy, true, workspace, stream);
  for (int step = 0; step < group.size && o.wants_dx; ++step) {
    int owner = (group.rank + step) % group.size;
    auto lane = step % 2 ? Tiles::beside : Tiles::caller;
    const void* dy = step == 0 ? o.dy : gather->arrive(owner, tiles.stream(lane));
    auto dx = static_cast<char*>(o.dx) + tiles.bytes(o.rows.first(owner) * o.k);
    Product product{matrix(dy, o.n), o.w.backward(), matrix(dx, o.k), o.rows.count(owner), o.k, o.n};
    if (step + 1 < group.size) product.spared = gather->processors();
    tiles.multiply(lane, product);
  }
  tiles.join(Tiles::caller, Tiles::beside);
  if (o.wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
    Product product{matrix(gather->all(), o.n, true), matrix(o.x, o.k), matrix(o.dw, o.k), o.n, o.k, o.rows.total()};
    tiles.multiply(Tiles::caller, product);
  }
  gather->finish(stream);
}

}  // namespace tpfused
