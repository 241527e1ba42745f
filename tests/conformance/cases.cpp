// SPDX-License-Identifier: Apache-2.0
// The cases as kernels of the CPU device.
#include "conformance/kernels/bulk.cuh"
#include "conformance/kernels/completion.cuh"
#include "conformance/kernels/meet.cuh"
#include "conformance/kernels/prepare.cuh"
#include "conformance/kernels/put.cuh"
#include "conformance/kernels/refuse.cuh"
#include "conformance/kernels/selftest.cuh"
#include "conformance/kernels/words.cuh"
