// SPDX-License-Identifier: Apache-2.0
// Cases of bulk.cuh as kernels of the GPU: a file each, since nvcc takes its time.
#include "conformance/kernels/bulk.cuh"
