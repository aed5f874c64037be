#pragma once

#include "tiles.h"

namespace tpfused {

// x [all rows, k] @ w, each rank's rows of it together and sent to their owner: the peers' parts one after the other,
// then this rank's own, all on the caller's lane. On two at the same time, whichever matmul starts first takes the
// multiprocessors, for all of its tiles, and a peer's part may come late.
class Parts {
 public:
  // x @ w is the sum of these.
  struct Term {
    const void* x;
    Matrix w;
    int64_t k;
  };

  // `spared`: the multiprocessors that something else has from the start, a gather by NCCL, say.
  Parts(Group& group, Tier tier, Tiles& tiles, Rows rows, std::vector<Term> terms, int64_t n, Workspace& workspace,
        int spared = 0)
      : group_(group),
        tiles_(tiles),
        rows_(rows),
        terms_(std::move(terms)),
        n_(n),
        staged_(workspace.take(tiles.bytes(rows.total() * n))),
        scatter_(start_scatter(group, tier, rows.by_rank(), tiles.bytes(n), workspace)) {
    for (int step = 1; step < group.size; ++step) {
      int owner = (group.rank + step) % group.size;
      multiply(owner, step > 1 ? scatter_->processors() : spared);
      scatter_->send(owner, part(owner), tiles.stream(Tiles::caller));
    }
  }

  void multiply_own() { multiply(group_.rank, scatter_->processors()); }
  // One term's product for the own rows.
  Product own_product(const Term& term) const {
    Product product = product_of(term, group_.rank);
    product.spared = scatter_->processors();
    return product;
  }
  const char* own() const { return part(group_.rank); }

  Scatter& scatter() { return *scatter_; }

 private:
  char* part(int owner) const { return staged_ + tiles_.bytes(rows_.by_rank().first(owner) * n_); }

  Product product_of(const Term& term, int owner) const {
    auto x = static_cast<const char*>(term.x) + tiles_.bytes(rows_.first(owner) * term.k);
    const int64_t count = rows_.count(owner);
    return {matrices(x, term.k, rows_.all()), term.w, matrices(part(owner), n_, count), count, n_, term.k, rows_.batch};
  }

  void multiply(int owner, int spared) {
    for (const Term& term : terms_) {
      Product product = product_of(term, owner);
      product.spared = spared;
      if (&term != &terms_.front()) product.add = product.y.data;
      tiles_.multiply(Tiles::caller, product);
    }
  }

  Group& group_;
  Tiles& tiles_;
  Rows rows_;
  std::vector<Term> terms_;
  int64_t n_;
  char* staged_;
  std::unique_ptr<Scatter> scatter_;
};

}  // namespace tpfused
