#include "streams.h"

#include <cudaTypedefs.h>

#include <cstring>

#include "check.h"

namespace tpfused {
namespace {

// The driver's functions are looked up at first use, so that the library loads where there is no driver.
PFN_cuStreamBatchMemOp_v11070 batch_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 11070, cudaEnableDefault, &result),
          "looking for cuStreamBatchMemOp");
#else
    check(cudaGetDriverEntryPoint("cuStreamBatchMemOp", &found, cudaEnableDefault, &result),
          "looking for cuStreamBatchMemOp");
#endif
    if (found == nullptr) throw std::runtime_error("this CUDA driver has no cuStreamBatchMemOp");
    return reinterpret_cast<PFN_cuStreamBatchMemOp_v11070>(found);
  }();
  return function;
}

// A device's event for `follow`. A wait takes the event as it is at that moment, so one event serves any number of
// them.
cudaEvent_t event_of_current_device() {
  static thread_local std::vector<cudaEvent_t> events;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (events.size() <= static_cast<size_t>(device)) events.resize(device + 1, nullptr);
  if (events[device] == nullptr) {
    check(cudaEventCreateWithFlags(&events[device], cudaEventDisableTiming), "cudaEventCreate");
  }
  return events[device];
}

}  // namespace

void follow(std::initializer_list<cudaStream_t> later, cudaStream_t earlier) {
  cudaEvent_t event = event_of_current_device();
  check(cudaEventRecord(event, earlier), "cudaEventRecord");
  for (cudaStream_t stream : later) check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

void follow(cudaStream_t later, cudaStream_t earlier) { follow({later}, earlier); }

void MemoryOperations::wait(const uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams operation;
  std::memset(&operation, 0, sizeof operation);
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = reinterpret_cast<CUdeviceptr>(word);
  operation.waitValue.value = value;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  operations_.push_back(operation);
}

void MemoryOperations::write(uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams operation;
  std::memset(&operation, 0, sizeof operation);
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after all earlier writes, for other GPUs too
  operations_.push_back(operation);
}

void MemoryOperations::enqueue(cudaStream_t stream) {
  if (operations_.empty()) return;
  check(batch_function()(stream, static_cast<unsigned>(operations_.size()), operations_.data(), 0),
        "cuStreamBatchMemOp");
  operations_.clear();
}

}  // namespace tpfused
