#include "check.h"
#include "parts.h"
#include "reduce.h"

namespace tpfused {

void column_backward(Group& group, Tier tier, const ColumnBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, o.rows.all(), workspace, stream);
  std::unique_ptr<Gather> gather;
  if (o.wants_dw) gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, true, workspace);

  const int64_t own = o.rows.by_rank().count(group.rank);
  std::unique_ptr<Parts> parts;
  if (o.wants_dx) {
    std::vector<Parts::Term> terms;
    for (const ColumnGradient& column : o.columns) terms.push_back({column.dpre, column.w.backward(), column.n});
    parts = std::make_unique<Parts>(group, tier, tiles, o.rows, std::move(terms), o.k, workspace);
    parts->multiply_own();
    tiles.join(Tiles::beside, Tiles::caller);
  }
  if (o.wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
    for (const ColumnGradient& column : o.columns) {
      const int64_t n = column.n;
      tiles.multiply(Tiles::caller, {matrix(column.dpre, n, true), matrix(gather->all(), o.k), matrix(column.dw, o.k),
                                     n, o.k, o.rows.total()});
    }
  }
  if (o.wants_dx) {
    auto beside = tiles.stream(Tiles::beside);
    auto all = parts->scatter().receive(parts->own(), beside);
    add_parts(o.dx, all.data(), group.size, nullptr, own, o.k, o.type, beside);
    tiles.join(Tiles::caller, Tiles::beside);
  }
  tiles.end();
}

void row_backward(Group& group, Tier tier, const RowBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, o.rows.all(), workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.n), o.dy, true, workspace);
  for (int step = 0; step < group.size && o.wants_dx; ++step) {
    int owner = (group.rank + step) % group.size;
    auto lane = step % 2 ? Tiles::beside : Tiles::caller;
    const void* dy = step == 0 ? o.dy : gather->arrive(owner, tiles.stream(lane));
    auto dx = static_cast<char*>(o.dx) + tiles.bytes(o.rows.first(owner) * o.k);
    const int64_t count = o.rows.count(owner);
    Product product{matrices(dy, o.n, step == 0 ? count : o.rows.all()),
                    o.w.backward(),
                    matrices(dx, o.k, o.rows.all()),
                    count,
                    o.k,
                    o.n,
                    o.rows.batch};
    if (step + 1 < group.size) product.spared = gather->processors();
    tiles.multiply(lane, product);
  }
  tiles.join(Tiles::caller, Tiles::beside);
  if (o.wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
    Product product{matrix(gather->all(), o.n, true), matrix(o.x, o.k), matrix(o.dw, o.k), o.n, o.k, o.rows.total()};
    tiles.multiply(Tiles::caller, product);
  }
  tiles.end();
}

}  // namespace tpfused
