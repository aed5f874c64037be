#include "build_info.h"

namespace tpfused {
namespace {

// Does nothing; compiled for the same architectures as every other kernel, it tells which of them a device takes.
__global__ void probe() {}

}  // namespace

cudaError_t kernel_architecture(int device, int* architecture, int* features) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error != cudaSuccess) return error;
  error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;

  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, probe);
  cudaSetDevice(previous);
  if (error != cudaSuccess) return error;
  *architecture = attributes.binaryVersion;
  if (features) *features = attributes.ptxVersion;
  return cudaSuccess;
}

}  // namespace tpfused
