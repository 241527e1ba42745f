// SPDX-License-Identifier: Apache-2.0
// The cases as kernels of the CPU device.
#include "conformance/kernels/table.cuh"
