// SPDX-License-Identifier: Apache-2.0
// Only ever compiled; gda_registers_test.cpp reads what ptxas says.
#if defined(WITHOUT_MARROW)
namespace gda_probes {
__global__ void unrelated(float* to, const float* from, int n) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n;
       i += static_cast<int>(gridDim.x * blockDim.x))
    to[i] = from[i] * 2 + to[i];
}
}  // namespace gda_probes
#else
#include "gda/probe_kernels.cuh"
#endif
