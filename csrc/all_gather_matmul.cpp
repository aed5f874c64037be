#include "small_rows.h"
#include "tiles.h"

namespace tpfused {
namespace {

constexpr int64_t wave = 132 * 128 * 256;  // entries that an H100's multiprocessors make at a time

// `count` rows of each of a batch of x, multiplied to their places from row `first` on.
Product product_of(const AllGatherMatmul& o, const Column& column, Matrix x, int64_t first, int64_t count,
                   int64_t batch) {
  auto rows = [&](void* base) { return static_cast<char*>(base) + first * column.n * size_of(o.type); };
  Product product{x, column.w.forward(), matrices(rows(column.y), column.n, o.rows.all()), count, column.n, o.k, batch};
  product.activation = column.activation;
  product.bias = column.bias;
  product.pre = column.pre ? rows(column.pre) : nullptr;
  product.pre_leading = column.n;
  return product;
}

void few_rows(Group& group, const AllGatherMatmul& o, Workspace& workspace, cudaStream_t stream) {
  const int64_t row_bytes = o.k * size_of(o.type);
  char* of_matmul = workspace.take(workspace_bytes(o.type));
  void* all = o.all ? o.all : workspace.take(o.rows.total() * row_bytes);
  small_gather(group, o.rows, row_bytes, o.x, all, stream);
  for (const Column& column : o.columns) {
    group.matmul(o.type).run(product_of(o, column, matrix(all, o.k), 0, o.rows.total(), 1), stream, of_matmul);
  }
}

}  // namespace

// This rank's rows first, from where they are; then each peer's, when they have arrived, on the two lanes in turn.
void all_gather_matmul(Group& group, Tier tier, const AllGatherMatmul& o, Workspace workspace, cudaStream_t stream) {
  if (is_small(group, tier, o.rows, o.k * size_of(o.type), most_gathered)) {
    return few_rows(group, o, workspace, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, o.all != nullptr, workspace);
  for (int step = 0; step < group.size; ++step) {
    int owner = (group.rank + step) % group.size;
    auto lane = step % 2 ? Tiles::beside : Tiles::caller;
    int64_t first = o.rows.first(owner), count = o.rows.count(owner);
    const void* x = step == 0 ? o.x : gather->arrive(owner, tiles.stream(lane));
    for (const Column& column : o.columns) {
      Matrix of_owner = matrices(x, o.k, step == 0 ? count : o.rows.all());
      Product product = product_of(o, column, of_owner, first, count, o.rows.batch);
      // Blocks of less than two waves fill whole ones together if they have the tiles of the whole: 1.05 of its time in
      // place of 1.13 at 2 x 1024 rows. With more, each block's own algorithm is the faster by 1 %.
      if (o.rows.batch * count * column.n < 2 * wave) product.rows_of_all = o.rows.all();
      if (step + 1 < group.size) product.spared = gather->processors();  // the last peer's rows have arrived by then
      tiles.multiply(lane, product);
    }
  }
  if (o.all) {
    for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, group.transfers);
    copy(o.all, gather->all(), tiles.bytes(o.rows.total() * o.k), group.transfers);
  }
  tiles.end();
}

}  // namespace tpfused
