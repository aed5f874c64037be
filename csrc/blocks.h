#pragma once

#include <algorithm>
#include <cstdint>

namespace tpfused {

// The rows of a matmul in up to four blocks: one is exchanged while the next is multiplied. Or `whole`: a block's
// matmul may take another algorithm than that of all rows.
struct Blocks {
  static constexpr int most = 4;
  // Of 128 x 256: with fewer, an H100's multiprocessors are idle. The same on any GPU, as all ranks make the same
  // blocks.
  static constexpr int64_t least_tiles = 2 * 132;

  int64_t m;
  int count;

  Blocks(int64_t m, int64_t n, bool whole) : m(m) {
    int64_t tiles = ((m + 127) / 128) * ((n + 255) / 256);
    count = whole ? 1 : static_cast<int>(std::clamp<int64_t>(tiles / least_tiles, 1, most));
  }
  int64_t first(int block) const { return m * block / count; }
  int64_t rows(int block) const { return first(block + 1) - first(block); }
};

}  // namespace tpfused
