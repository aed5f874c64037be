#include "blocks.h"
#include "check.h"
#include "multiply_and_push.h"
#include "parts.h"
#include "reduce.h"
#include "small_sums.h"

namespace tpfused {
namespace {

ncclDataType_t nccl_type(Type type) {
  switch (type) {
    case Type::float16:
      return ncclFloat16;
    case Type::bfloat16:
      return ncclBfloat16;
    default:
      return ncclFloat32;
  }
}

Product rows_of(const MatmulAllReduce& o, Tiles& tiles, int64_t first, int64_t count, char* to) {
  auto x = static_cast<const char*>(o.x) + tiles.bytes(first * o.k);
  return {matrix(x, o.k), o.w, matrix(to + tiles.bytes(first * o.n), o.n), count, o.n, o.k};
}

void multiply_wgrad(const MatmulAllReduce& o, Tiles& tiles, Tiles::Lane lane) {
  Product product = weight_gradient(o.x, o.whole_input, o.dw, o.k, o.n, o.m, o.w.transposed);
  tiles.multiply(lane, product, o.wants_dw);
}

// In each block every rank adds all parts of its share of the rows, and pushes the sums to the others.
class CopiedSum {
 public:
  CopiedSum(Group& group, const MatmulAllReduce& o, Tiles& tiles, Workspace& workspace, cudaStream_t stream)
      : group_(group),
        o_(o),
        tiles_(tiles),
        blocks_(o.m, o.n, group.deterministic),
        stream_(stream),
        parts_(group.next_use(place(group.rank, group.size, 0))),
        sums_(group.next_use(tiles.bytes(o.m * o.n))),
        staged_(workspace.take(tiles.bytes(o.m * o.n))) {
    group.wait_until_emptied(parts_);
  }

  void run() {
    for (int block = 0; block < blocks_.count; ++block) {
      multiply(block);
      if (block > 0) exchange(block - 1);
    }
    multiply_wgrad(o_, tiles_, Tiles::beside);
    exchange(blocks_.count - 1);
  }

 private:
  Rows shares(int block) const { return {blocks_.rows(block), 1, 1, group_.size}; }

  // Where in the owner's slot a rank's part of its share of a block lies: a rank's parts of all blocks together.
  int64_t place(int owner, int from, int block) const {
    int64_t before = 0, all = 0;
    for (int each = 0; each < blocks_.count; ++each) {
      if (each < block) before += shares(each).count(owner);
      all += shares(each).count(owner);
    }
    return tiles_.bytes((from * all + before) * o_.n);
  }

  void push(char* to, const char* from, int64_t rows) { copy(to, from, tiles_.bytes(rows * o_.n), group_.transfers); }

  void multiply(int block) {
    const int rank = group_.rank, size = group_.size;
    Rows share = shares(block);
    for (int step = 1; step <= size; ++step) {
      int owner = (rank + step) % size;
      int64_t first = blocks_.first(block) + share.first(owner), count = share.count(owner);
      tiles_.multiply(Tiles::beside, rows_of(o_, tiles_, first, count, staged_));
      if (owner == rank) continue;
      follow(group_.transfers, tiles_.stream(Tiles::beside));
      push(group_.peers->slot(owner, parts_.slot) + place(owner, rank, block), staged_ + tiles_.bytes(first * o_.n),
           count);
      group_.tell_arrived(parts_, owner, group_.transfers, block + 1);
    }
    group_.mark(block % 2, tiles_.stream(Tiles::beside));
  }

  void exchange(int block) {
    const int rank = group_.rank, size = group_.size;
    Rows share = shares(block);
    int64_t first = blocks_.first(block) + share.first(rank);
    char* own = static_cast<char*>(o_.y) + tiles_.bytes(first * o_.n);
    group_.wait_for_mark(block % 2, stream_);
    std::vector<const void*> parts(size);
    for (int from = 0; from < size; ++from) {
      parts[from] = from == rank ? staged_ + tiles_.bytes(first * o_.n)
                                 : group_.peers->slot(rank, parts_.slot) + place(rank, from, block);
      if (from != rank) group_.wait_for_arrival(parts_, from, stream_, block + 1);
    }
    add_parts(own, parts.data(), size, o_.bias, share.count(rank), o_.n, o_.type, stream_);

    follow(group_.transfers, stream_);
    if (block == 0) group_.wait_until_emptied(sums_);
    for (int step = 1; step < size; ++step) {
      int peer = (rank + step) % size;
      push(group_.peers->slot(peer, sums_.slot) + tiles_.bytes(first * o_.n), own, share.count(rank));
      group_.tell_arrived(sums_, peer, group_.transfers, block + 1);
    }
    for (int step = 1; step < size; ++step) {
      int from = (rank - step + size) % size;  // which has pushed here in its step of that number
      int64_t at = tiles_.bytes((blocks_.first(block) + share.first(from)) * o_.n);
      group_.wait_for_arrival(sums_, from, stream_, block + 1);
      copy(static_cast<char*>(o_.y) + at, group_.peers->slot(rank, sums_.slot) + at,
           tiles_.bytes(share.count(from) * o_.n), stream_);
    }
  }

  Group& group_;
  const MatmulAllReduce& o_;
  Tiles& tiles_;
  Blocks blocks_;
  cudaStream_t stream_;
  Group::Use parts_, sums_;
  char* staged_;
};

// NCCL's all-reduce of each block, in place. The first rank's part brings the bias.
void by_nccl(Group& group, const MatmulAllReduce& o, Tiles& tiles) {
  Blocks blocks(o.m, o.n, false);
  for (int block = 0; block < blocks.count; ++block) {
    int64_t first = blocks.first(block), count = blocks.rows(block);
    Product product = rows_of(o, tiles, first, count, static_cast<char*>(o.y));
    if (group.rank == 0) product.bias = o.bias;
    if (block > 0) product.spared = group.spared();
    tiles.multiply(Tiles::beside, product);
    follow(group.transfers, tiles.stream(Tiles::beside));
    check(ncclAllReduce(product.y.data, product.y.data, count * o.n, nccl_type(o.type), ncclSum, group.nccl,
                        group.transfers),
          "ncclAllReduce");
  }
  multiply_wgrad(o, tiles, Tiles::beside);
}

// The same matmuls and exchange as `CopiedSum`, by NCCL, so that the sums are rounded alike.
void by_nccl_in_order(Group& group, const MatmulAllReduce& o, Tiles& tiles, Workspace& workspace, cudaStream_t stream) {
  Rows rows{o.m, 1, 1, group.size};
  const int64_t own = rows.count(group.rank), row_bytes = tiles.bytes(o.n);
  char* sums = workspace.take(own * row_bytes);
  Parts parts(group, Tier::nccl, tiles, rows, {{o.x, o.w, o.k}}, o.n, workspace);
  parts.multiply_own();
  follow(group.transfers, stream);
  auto all = parts.scatter().receive(parts.own(), group.transfers);
  add_parts(sums, all.data(), group.size, o.bias, own, o.n, o.type, group.transfers);
  auto gather = start_gather(group, Tier::nccl, rows, row_bytes, sums, true, workspace);
  multiply_wgrad(o, tiles, Tiles::caller);
  for (int owner = 0; owner < group.size; ++owner) gather->arrive(owner, stream);
  copy(o.y, gather->all(), o.m * row_bytes, stream);
}

// One matmul and one kernel, on the caller's stream alone.
void small(Group& group, const MatmulAllReduce& o, Workspace& workspace, cudaStream_t stream) {
  char* own_workspace = workspace.take(workspace_bytes(o.type));
  char* part = workspace.take(o.m * o.n * size_of(o.type));
  PushedProduct product{o.m, o.n, o.k, o.type, o.x, o.w.data, o.w.leading};
  bool pushed = o.w.transposed && can_push(product);
  if (pushed) {
    multiply_and_push(group, product, stream);
  } else {
    group.matmul(o.type).run({matrix(o.x, o.k), o.w, matrix(part, o.n), o.m, o.n, o.k}, stream, own_workspace);
  }
  small_all_reduce(group, {o.m, o.n, o.type, part, o.bias, o.y, o.norm, pushed}, stream);
}

}  // namespace

void matmul_all_reduce(Group& group, Tier tier, const MatmulAllReduce& o, Workspace workspace, cudaStream_t stream) {
  const int64_t row_bytes = o.n * size_of(o.type);
  if (o.norm && (row_bytes % 16 || row_bytes > most_normalized)) {
    throw std::runtime_error("rows of an AddNorm have up to 32 KiB, in multiples of 16 bytes");
  }
  // Whether a rank wants the norm as well, its peers need not: what is exchanged is the same.
  auto fits = [&] { return is_tiny_sum(o.m, o.n, o.type) || (!o.norm && is_small_sum(group, o.m, o.n, o.type)); };
  // Deterministic, each rank's rows are multiplied apart, as by NCCL: together they may give other bits.
  const bool may_be_small = tier == Tier::p2p && o.wants_dw == Dw::none && !group.deterministic;
  if (may_be_small && fits()) return small(group, o, workspace, stream);
  if (o.norm) {
    MatmulAllReduce sum = o;
    sum.norm = nullptr;
    sum.y = workspace.take(o.m * o.n * size_of(o.type));
    matmul_all_reduce(group, tier, sum, workspace, stream);
    return add_and_normalize(*o.norm, sum.y, o.m, o.n, o.type, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  if (tier == Tier::p2p) {
    CopiedSum(group, o, tiles, workspace, stream).run();
  } else if (group.deterministic) {
    by_nccl_in_order(group, o, tiles, workspace, stream);
  } else {
    by_nccl(group, o, tiles);
  }
  tiles.end();
}

}  // namespace tpfused
