#include "check.h"
#include "reduce.h"
#include "tiles.h"

namespace tpfused {

// The next peer's rows first and the own ones last: a finished part travels while the next is multiplied.
void matmul_reduce_scatter(Group& group, Tier tier, const MatmulReduceScatter& o, Workspace workspace,
                           cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  auto scatter = start_scatter(group, tier, o.rows, tiles.bytes(o.n), workspace, stream);
  char* staged = workspace.take(tiles.bytes(o.rows.total() * o.n));
  char* part = nullptr;
  for (int step = 1; step <= group.size; ++step) {
    int owner = (group.rank + step) % group.size;
    int64_t first = o.rows.first(owner);
    part = staged + tiles.bytes(first * o.n);
    auto x = static_cast<const char*>(o.x) + tiles.bytes(first * o.k);
    tiles.multiply(step, {matrix(x, o.k), o.w.matrix(), matrix(part, o.n), o.rows.count(owner), o.n, o.k});
    if (step < group.size) scatter->send(owner, part, tiles.stream_of(step));
  }
  tiles.join();
  auto parts = scatter->receive(part, stream);
  add_parts(o.y, parts.data(), group.size, o.bias, o.rows.count(group.rank), o.n, o.type, stream);
  scatter->finish(stream);
}

}  // namespace tpfused
