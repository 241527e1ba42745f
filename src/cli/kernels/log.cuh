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

/// All threads of the block. @param status   this thread's; the block's worst is kept
///                            @param awaited  the rank that this thread waited for when it failed; -1: none
MARROW_DEVICE void finish(const Log& log, Status status, int awaited = -1) {
  const Status own = status;
  status = Block{}.agree(status);
  if (status != Status::ok && own == status && awaited >= 0) {
    // Threads may have waited for different ranks: any of them will do.
    store_relaxed<Scope::device>(log.awaited + block_index(),
                                 static_cast<std::uint32_t>(awaited) + 1);
  }
  if (thread_index() == 0) {
    log.end[block_index()] = now_ns();
    // A failure stays, whatever the launches after it do before the host looks.
    if (status != Status::ok) log.status[block_index()] = static_cast<std::uint32_t>(status);
  }
}

/// After a flush that failed: a peer with operations outstanding, or -1.
template <class Gin>
MARROW_DEVICE int unflushed(const Gin& gin, int nranks) {
  for (int peer = 0; peer < nranks; ++peer) {
    if (gin.flush(peer, Deadline{1}) != Status::ok) return peer;
  }
  return -1;
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
