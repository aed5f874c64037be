#include "blocks.h"
#include "check.h"
#include "small_rows.h"
#include "tiles.h"

namespace tpfused {
namespace {

struct Columns {
  Group& group;
  const MatmulAllGather& o;
  int64_t all = o.features.all();
  int64_t own = o.features.count(group.rank);

  int64_t bytes(int64_t entries) const { return entries * size_of(o.type); }

  // `width` entries of each of `rows` rows, between row-major matrices.
  void copy(void* to, int64_t to_leading, const void* from, int64_t from_leading, int64_t width, int64_t rows,
            cudaStream_t stream) const {
    if (width == 0 || rows == 0) return;
    check(cudaMemcpy2DAsync(to, bytes(to_leading), from, bytes(from_leading), bytes(width), rows,
                            cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpy2DAsync");
  }

  // Where a rank's features of a row begin, in a matrix of all of them.
  char* at(void* base, int owner, int64_t row) const {
    return static_cast<char*>(base) + bytes(row * all + o.features.first(owner));
  }

  // This rank's features of some rows, to `to`.
  Product product(int64_t first, int64_t rows, char* to, int64_t leading) const {
    auto x = static_cast<const char*>(o.x) + bytes(first * o.k);
    Product product{matrix(x, o.k), o.w.forward(), matrix(to, leading), rows, own, o.k};
    product.activation = o.activation;
    product.bias = o.bias;
    product.pre = o.pre ? static_cast<char*>(o.pre) + bytes(first * own) : nullptr;
    product.pre_leading = own;
    return product;
  }
};

void few_rows(const Columns& c, const Rows& gathered, Workspace& workspace, cudaStream_t stream) {
  char* of_matmul = workspace.take(workspace_bytes(c.o.type));
  char* own = workspace.take(c.bytes(c.o.m * c.own));
  c.group.matmul(c.o.type).run(c.product(0, c.o.m, own, c.own), stream, of_matmul);
  small_gather(c.group, gathered, size_of(c.o.type), own, c.o.y, stream);
}

// A finished block of rows is pushed into the peers' memory, and what arrives there is copied to its columns of y. The
// own ones are multiplied to where they belong or, for the same bits, to where `by_nccl` does it: columns of y may lie
// so that a matmul takes another algorithm.
void by_copies(const Columns& c, Tiles& tiles, Workspace& workspace, cudaStream_t stream) {
  Group& group = c.group;
  Blocks blocks(c.o.m, c.own, group.deterministic);
  const bool in_place = !group.deterministic;
  const int64_t leading = in_place ? c.all : c.o.features.count(0);
  char* staged = in_place ? nullptr : workspace.take(c.bytes(c.o.m * leading));
  auto use = group.next_use(c.bytes(c.o.m * c.all));
  auto arrivals = tiles.stream(Tiles::beside);
  group.wait_until_emptied(use);
  for (int block = 0; block < blocks.count; ++block) {
    int64_t first = blocks.first(block), rows = blocks.rows(block);
    char* own = in_place ? c.at(c.o.y, group.rank, first) : staged + c.bytes(first * leading);
    tiles.multiply(Tiles::caller, c.product(first, rows, own, leading));
    follow(group.transfers, stream);
    if (!in_place) c.copy(c.at(c.o.y, group.rank, first), c.all, own, leading, c.own, rows, stream);
    for (int step = 1; step < group.size; ++step) {
      int peer = (group.rank + step) % group.size;
      char* there = c.at(group.peers->slot(peer, use.slot), group.rank, first);
      c.copy(there, c.all, own, leading, c.own, rows, group.transfers);
      group.tell_arrived(use, peer, group.transfers, block + 1);
    }
  }
  // As they arrive: a block of every rank, before the next of any. All ranks' features come in as many blocks as their
  // owner's: the last rank may have fewer of both.
  for (int block = 0; block < Blocks::most; ++block) {
    for (int step = 1; step < group.size; ++step) {
      int from = (group.rank - step + group.size) % group.size;
      Blocks theirs(c.o.m, c.o.features.count(from), group.deterministic);
      if (block >= theirs.count) continue;
      int64_t first = theirs.first(block);
      group.wait_for_arrival(use, from, arrivals, block + 1);
      c.copy(c.at(c.o.y, from, first), c.all, c.at(group.peers->slot(group.rank, use.slot), from, first), c.all,
             c.o.features.count(from), theirs.rows(block), arrivals);
    }
  }
}

// NCCL gathers a finished block, all ranks' features padded to as many, and each rank's are copied to their columns.
void by_nccl(const Columns& c, Tiles& tiles, Workspace& workspace, cudaStream_t stream) {
  Group& group = c.group;
  const int64_t widest = c.o.features.count(0);
  Blocks blocks(c.o.m, widest, group.deterministic);
  char* staged = workspace.take(c.bytes(c.o.m * widest));
  char* gathered = workspace.take(c.bytes(group.size * c.o.m * widest));
  auto arrivals = tiles.stream(Tiles::beside);
  for (int block = 0; block < blocks.count; ++block) {
    int64_t first = blocks.first(block), rows = blocks.rows(block), bytes = c.bytes(rows * widest);
    char* own = staged + c.bytes(first * widest);
    char* all = gathered + c.bytes(group.size * first * widest);
    Product product = c.product(first, rows, own, widest);
    if (block > 0) product.spared = group.spared();
    tiles.multiply(Tiles::caller, product);
    follow(group.transfers, stream);
    check(ncclAllGather(own, all, bytes, ncclInt8, group.nccl, group.transfers), "ncclAllGather");
    follow(arrivals, group.transfers);
    for (int from = 0; from < group.size; ++from) {
      c.copy(c.at(c.o.y, from, first), c.all, all + from * bytes, widest, c.o.features.count(from), rows, arrivals);
    }
  }
}

}  // namespace

void matmul_all_gather(Group& group, Tier tier, const MatmulAllGather& o, Workspace workspace, cudaStream_t stream) {
  Columns columns{group, o};
  const Rows gathered{o.features.tokens, o.features.each, o.m, group.size};  // each row of x has all features
  if (is_small(group, tier, gathered, columns.bytes(1), most_features_gathered)) {
    return few_rows(columns, gathered, workspace, stream);
  }
  Tiles tiles(group, o.type, workspace, stream);
  if (tier == Tier::p2p) {
    by_copies(columns, tiles, workspace, stream);
  } else {
    by_nccl(columns, tiles, workspace, stream);
  }
  tiles.end();
}

}  // namespace tpfused
