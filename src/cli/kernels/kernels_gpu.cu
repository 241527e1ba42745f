// SPDX-License-Identifier: Apache-2.0
// The same kernels for GPUs.
#include "cli/kernels/all_to_all.cuh"
#include "cli/kernels/builds.hpp"
#include "cli/kernels/bulk.cuh"
#include "cli/kernels/exchange.cuh"
#include "cli/kernels/ping_pong.cuh"

namespace marrow::cli::by_nvcc {
MARROW_CLI_KERNELS(MARROW_CLI_DEFINE)
}  // namespace marrow::cli::by_nvcc
