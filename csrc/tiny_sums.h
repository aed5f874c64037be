#pragma once

#include "small_sums.h"

namespace tpfused {

// All-reduce of what fits a few thousand words: what a rank writes to its peers are words of four bytes, each beside
// the sum's number, eight bytes that arrive together (the "LL" protocol of NCCL). Who adds them looks at the words
// themselves until they have that number, and nobody waits for a fence or a flag.
//
// What follows the matmul of a decoding step. Areas are used in turn, as by other small sums, and by nothing else: a
// number is never met by chance.
bool is_tiny_sum(int64_t rows, int64_t n, Type type);
void tiny_all_reduce(Group& group, const SmallSum& sum, cudaStream_t stream);

}  // namespace tpfused
