// SPDX-License-Identifier: Apache-2.0
// A block's entry and exit: when it ran and how it ended.
#pragma once

#include "cli/kernels/kernels.hpp"
#include "marrow/device.cuh"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

MARROW_DEVICE void begin(const Log& log) {
  if (thread_index() == 0) log.start[block_index()] = now_ns();
}

/// All threads of the block. @param status  this thread's; the block's worst is kept
MARROW_DEVICE void finish(const Log& log, Status status) {
  status = Block{}.agree(status);
  if (thread_index() == 0) {
    log.end[block_index()] = now_ns();
    log.status[block_index()] = static_cast<std::uint32_t>(status);
  }
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
