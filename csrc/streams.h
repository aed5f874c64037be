#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace tpfused {

// What one stream tells another, or another GPU: through events, and through 32-bit words in memory.

// Whatever is enqueued on `later` from now on runs after what is on `earlier` now.
void follow(cudaStream_t later, cudaStream_t earlier);
void follow(std::initializer_list<cudaStream_t> later, cudaStream_t earlier);

// Stream memory operations, gathered and enqueued as one call. A wait holds no multiprocessor.
class MemoryOperations {
 public:
  // The stream goes on when *word >= value, as numbers modulo 2**32.
  void wait(const uint32_t* word, uint32_t value);
  // *word = value, which may be a peer's memory, after all that is before it on the stream.
  void write(uint32_t* word, uint32_t value);
  void enqueue(cudaStream_t stream);

 private:
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace tpfused
