#include "check.h"
#include "tiles.h"

namespace tpfused {

// This rank's rows first, from where they are; then each peer's, when they have arrived, on the two lanes in turn.
void all_gather_matmul(Group& group, Tier tier, const AllGatherMatmul& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, false, workspace, stream);
  for (int step = 0; step < group.size; ++step) {
    int owner = (group.rank + step) % group.size;
    auto lane = step % 2 ? Tiles::beside : Tiles::caller;
    int64_t first = o.rows.first(owner), count = o.rows.count(owner);
    const void* x = step == 0 ? o.x : gather->arrive(owner, tiles.stream(lane));
    auto rows = [&](void* base, int64_t width) { return static_cast<char*>(base) + tiles.bytes(first * width); };
    Product product{matrix(x, o.k), o.w.forward(), matrix(rows(o.y, o.n), o.n), count, o.n, o.k};
    product.activation = o.activation;
    product.bias = o.bias;
    product.pre = o.pre ? rows(o.pre, o.n) : nullptr;
    product.pre_leading = o.n;
    if (step + 1 < group.size) product.spared = gather->processors();  // the last peer's rows have arrived by then
    tiles.multiply(lane, product);
  }
  tiles.join(Tiles::caller, Tiles::beside);
  gather->finish(stream);
}

}  // namespace tpfused
