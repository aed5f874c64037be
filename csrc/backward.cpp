#include "parts.h"
#include "reduce.h"
#include "small_rows.h"

namespace tpfused {
namespace {

Product wgrad(const ColumnBackward& o, const ColumnGradient& column, const void* x) {
  return weight_gradient(column.dpre, x, column.dw, column.n, o.k, o.rows.total(), column.w.transposed);
}

Product wgrad(const RowBackward& o, const void* dy) {
  return weight_gradient(dy, o.x, o.dw, o.n, o.k, o.rows.total(), o.w.transposed);
}

void few_rows(Group& group, const ColumnBackward& o, Workspace& workspace, cudaStream_t stream) {
  const int64_t row_bytes = o.k * size_of(o.type), rows = o.rows.total();
  Matmul& matmul = group.matmul(o.type);
  char* of_matmul = workspace.take(workspace_bytes(o.type));
  if (o.wants_dx) {
    char* part = workspace.take(rows * row_bytes);
    for (const ColumnGradient& column : o.columns) {
      Product product{matrix(column.dpre, column.n), column.w.backward(), matrix(part, o.k), rows, o.k, column.n};
      if (&column != &o.columns.front()) product.add = part;
      matmul.run(product, stream, of_matmul);
    }
    small_scatter(group, o.rows, o.k, o.type, part, nullptr, nullptr, o.dx, stream);
  }
  if (o.wants_dw == Dw::none) return;
  const void* x = o.x;
  if (!o.whole) {
    char* all = workspace.take(rows * row_bytes);
    small_gather(group, o.rows, row_bytes, o.x, all, stream);
    x = all;
  }
  for (const ColumnGradient& column : o.columns) {
    matmul.run(as_wanted(wgrad(o, column, x), o.wants_dw), stream, of_matmul);
  }
}

void few_rows(Group& group, const RowBackward& o, Workspace& workspace, cudaStream_t stream) {
  const int64_t row_bytes = o.n * size_of(o.type), rows = o.rows.total();
  Matmul& matmul = group.matmul(o.type);
  char* of_matmul = workspace.take(workspace_bytes(o.type));
  char* all = workspace.take(rows * row_bytes);
  small_gather(group, o.rows, row_bytes, o.dy, all, stream);
  if (o.wants_dx) {
    matmul.run({matrix(all, o.n), o.w.backward(), matrix(o.dx, o.k), rows, o.k, o.n}, stream, of_matmul);
  }
  if (o.wants_dw != Dw::none) matmul.run(as_wanted(wgrad(o, all), o.wants_dw), stream, of_matmul);
}

}  // namespace

void column_backward(Group& group, Tier tier, const ColumnBackward& o, Workspace workspace, cudaStream_t stream) {
  if (is_small(group, tier, o.rows, o.k * size_of(o.type), most_gathered)) {
    return few_rows(group, o, workspace, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  std::unique_ptr<Gather> gather;
  const bool wants_dw = o.wants_dw != Dw::none;
  if (wants_dw && !o.whole) gather = start_gather(group, tier, o.rows, tiles.bytes(o.k), o.x, true, workspace);

  const int64_t own = o.rows.by_rank().count(group.rank);
  std::unique_ptr<Parts> parts;
  if (o.wants_dx) {
    std::vector<Parts::Term> terms;
    for (const ColumnGradient& column : o.columns) terms.push_back({column.dpre, column.w.backward(), column.n});
    parts = std::make_unique<Parts>(group, tier, tiles, o.rows, std::move(terms), o.k, workspace,
                                    gather ? gather->processors() : 0);
    parts->multiply_own();
    follow(group.transfers, stream);
  }
  if (wants_dw) {
    for (int owner = 0; gather && owner < group.size; ++owner) gather->arrive(owner, stream);
    const void* x = gather ? gather->all() : o.x;
    for (const ColumnGradient& column : o.columns) tiles.multiply(Tiles::caller, wgrad(o, column, x), o.wants_dw);
  }
  if (o.wants_dx) {  // on the stream of the exchange, beside those
    auto all = parts->scatter().receive(parts->own(), group.transfers);
    add_parts(o.dx, all.data(), group.size, nullptr, own, o.k, o.type, group.transfers);
  }
  tiles.end();
}

void row_backward(Group& group, Tier tier, const RowBackward& o, Workspace workspace, cudaStream_t stream) {
  if (is_small(group, tier, o.rows, o.n * size_of(o.type), most_gathered)) {
    return few_rows(group, o, workspace, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  const bool wants_dw = o.wants_dw != Dw::none;
  auto gather = start_gather(group, tier, o.rows, tiles.bytes(o.n), o.dy, wants_dw, workspace);
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
  if (o.wants_dx) tiles.join();
  if (wants_dw) {
    for (int owner = 0; owner < group.size; ++owner) {
      if (owner == group.rank || !o.wants_dx) gather->arrive(owner, stream);  // for the others, dx has waited
    }
    tiles.multiply(Tiles::caller, wgrad(o, gather->all()), o.wants_dw);
  }
  tiles.end();
}

}  // namespace tpfused
