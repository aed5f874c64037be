#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <stdexcept>
#include <string>

namespace tpfused {

// Each throws std::runtime_error, which the Python module turns into RuntimeError, where a call did not succeed; `what`
// names it. Only types and inline functions come from these headers: importing needs no libcuda.

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the thread's next kernel, also one of torch's, would be told to have failed by this
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void check(CUresult error, const char* what) {
  if (error != CUDA_SUCCESS)
    throw std::runtime_error(std::string(what) + ": CUDA driver error " + std::to_string(error));
}

inline void check(ncclResult_t error, const char* what) {
  if (error == ncclSuccess || error == ncclInProgress) return;
  throw std::runtime_error(std::string(what) + ": " + ncclGetErrorString(error) + " (" + ncclGetLastError(nullptr) +
                           ")");
}

inline void check(cublasStatus_t error, const char* what) {
  if (error != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(error));
  }
}

// Makes a device the current one, and the previous one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace tpfused
