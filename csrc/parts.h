#pragma once

#include "tiles.h"

namespace tpfused {

// x [all rows, k] @ w, each rank's rows of it sent to their owner: the peers' parts one after the other on the lane
// that the GPU starts first, and this rank's own on the caller's, to fill the gaps.
class Parts {
 public:
  Parts(Group& group, Tier tier, Tiles& tiles, Rows rows, const void* x, Matrix w, int64_t k, int64_t n,
        Workspace& workspace)
      : group_(group),
        tiles_(tiles),
        rows_(rows),
        x_(static_cast<const char*>(x)),
        w_(w),
        k_(k),
        n_(n),
        staged_(workspace.take(tiles.bytes(rows.total() * n))),
        scatter_(start_scatter(group, tier, rows, tiles.bytes(n), workspace)) {
    // The caller's lane waits for this point of the other, so that the first part is started before the own one.
    tiles.join(Tiles::caller, Tiles::beside);
    for (int step = 1; step < group.size; ++step) {
      int owner = (group.rank + step) % group.size;
      Product product = product_of(rows.first(owner), rows.count(owner));
      if (step > 1) product.spared = scatter_->processors();
      tiles.multiply(Tiles::beside, product);
      scatter_->send(owner, static_cast<const char*>(product.y.data), tiles.stream(Tiles::beside));
    }
  }

  // This rank's own part of `count` of its rows from the `from`th, to where `own` says.
  Product own_product(int64_t from, int64_t count) {
    Product product = product_of(rows_.first(group_.rank) + from, count);
    product.spared = scatter_->processors();
    return product;
  }
  const char* own() const { return staged_ + tiles_.bytes(rows_.first(group_.rank) * n_); }

  Scatter& scatter() { return *scatter_; }

 private:
  Product product_of(int64_t first, int64_t count) {
    return {
        matrix(x_ + tiles_.bytes(first * k_), k_), w_, matrix(staged_ + tiles_.bytes(first * n_), n_), count, n_, k_};
  }

  Group& group_;
  Tiles& tiles_;
  Rows rows_;
  const char* x_;
  Matrix w_;
  int64_t k_, n_;
  char* staged_;
  std::unique_ptr<Scatter> scatter_;
};

}  // namespace tpfused
