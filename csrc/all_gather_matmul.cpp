#include "check.h"
#include "tiles.h"

namespace tpfused {

// This rank's rows first, from where they are; then each peer's, when they have arrived.
void all_gather_matmul(Group& group, Tier tier, const AllGatherMatmul& o, Workspace workspace, cudaStream_t stream) {
  DeviceGuard guard(group.device);
  Tiles tiles(group, o.type, workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, false, workspace, stream);
  for (int step = 0; step < group.size; ++step) {
    int owner = (group.rank + step) % group.size;
    int64_t first = o.rows.first(owner), count = o.rows.count(owner);
    const void* x = step == 0 ? o.x : gather->arrive(owner, tiles.stream_of(step));
    auto rows = [&](void* base, int64_t width) { return static_cast<char*>(base) + tiles.bytes(first * width); };
    Product product{matrix(x, o.k), o.w.matrix(), matrix(rows(o.y, o.n), o.n), count, o.n, o.k};
    product.activation = o.activation;
    product.bias = o.bias;
    product.pre = o.pre ? rows(o.pre, o.n) : nullptr;
    tiles.multiply(step, product);
    if (o.gathered && count > 0) {
      check(cudaMemcpyAsync(rows(o.gathered, o.k), x, tiles.bytes(count * o.k), cudaMemcpyDeviceToDevice,
                            tiles.stream_of(step)),
            "cudaMemcpyAsync");
    }
  }
  tiles.join();
  gather->finish(stream);
}

}  // namespace tpfused
