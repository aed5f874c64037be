#include "check.h"
#include "reduce.h"
#include "tiles.h"

namespace tpfused {

void column_backward(Group& group, Tier tier, const ColumnBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  std::unique_ptr<Gather> gather;
  if (o.wants_dw) gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, true, workspace, stream);

  std::unique_ptr<Scatter> scatter;
  char* part = nullptr;
  if (o.wants_dx) {
    scatter = start_scatter(group, tier, o.rows, tiles.bytes(o.k), workspace, stream);
    char* staged = workspace.take(tiles.bytes(o.rows.total() * o.k));
    for (int step = 1; step <= group.size; ++step) {
      int owner = (group.rank + step) % group.size;
      int64_t first = o.rows.first(owner);
      part = staged + tiles.bytes(first * o.k);
      auto dpre = static_cast<const char*>(o.dpre) + tiles.bytes(first * o.n);
      Product product{
          matrix(dpre, o.n), matrix(o.w.data, o.w.leading), matrix(part, o.k), o.rows.count(owner), o.k, o.n};
      tiles.multiply(step, product);
      if (step < group.size) scatter->send(owner, part, tiles.stream_of(step));
    }
    tiles.join();
  }

  if (o.wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
    Product product{matrix(o.dpre, o.n, true), matrix(gather->all(), o.k), matrix(o.dw, o.k), o.n, o.k, o.rows.total()};
    tiles.multiply(0, product);
    gather->finish(stream);
  }
  if (o.wants_dx) {
    auto parts = scatter->receive(part, stream);
    add_parts(o.dx, parts.data(), group.size, nullptr, o.rows.count(group.rank), o.k, o.type, stream);
    scatter->finish(stream);
  }
}

void row_backward(Group& group, Tier tier, const RowBackward& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.n), o.dy, true, workspace, stream);
  for (int step = 0; step < group.size; ++step) {
    int owner = (group.rank + step) % group.size;
    const void* dy = step == 0 ? o.dy : gather->arrive(owner, tiles.stream_of(step));
    if (!o.wants_dx) continue;
    auto dx = static_cast<char*>(o.dx) + tiles.bytes(o.rows.first(owner) * o.k);
    Product product{matrix(dy, o.n), matrix(o.w.data, o.w.leading), matrix(dx, o.k), o.rows.count(owner), o.k, o.n};
    tiles.multiply(step, product);
  }
  tiles.join();
  if (o.wants_dw) {
    gather->arrive(group.rank, stream);
    Product product{matrix(gather->all(), o.n, true), matrix(o.x, o.k), matrix(o.dw, o.k), o.n, o.k, o.rows.total()};
    tiles.multiply(0, product);
  }
  gather->finish(stream);
}

}  // namespace tpfused
