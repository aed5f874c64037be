#pragma once

#include <cuda_runtime_api.h>

namespace tpfused {

// Gives the architecture (90 for 9.0) of the machine code that `device` runs of this library's kernels: the nearest
// one it was compiled for. `features`: which architecture's their source could use, an older one's where the driver
// made that code from PTX. An error where there is none for this device, or no device at all.
cudaError_t kernel_architecture(int device, int* architecture, int* features = nullptr);

}  // namespace tpfused
