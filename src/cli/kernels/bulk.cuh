// SPDX-License-Identifier: Apache-2.0
// Bandwidth and rate, get latency, barrier latency.
#pragma once

#include "cli/kernels/log.cuh"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Our block's share of a message, in 128-byte units: NVLink carries whole lines best.
struct Share {
  std::uint64_t offset;
  std::uint64_t bytes;
};
MARROW_DEVICE Share share_of(std::uint64_t bytes, int block, int blocks) {
  const std::uint64_t each = ((bytes + blocks - 1) / blocks + 127) / 128 * 128;
  const std::uint64_t first = each * static_cast<std::uint64_t>(block);
  if (first >= bytes) return {bytes, 0};
  return {first, bytes - first < each ? bytes - first : each};
}

/// Signal 1 at the target: one add a block and launch when its puts are done; signal 2 at the initiator:
/// the target has seen them all. A block's strong signal covers its own puts.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    stream_kernel(const MARROW_GRID_CONSTANT StreamArguments a) {
  begin(a.log);
  const Gin gin(a.comm, 0);
  Status status = Status::ok;
  if (a.initiator) {
    const Share mine = share_of(a.bytes, block_index(), grid_size());
    for (std::uint32_t i = 0; i < a.iterations && status == Status::ok && mine.bytes; ++i) {
      status =
          a.get ? gin.get(a.peer, a.window, mine.offset, a.local, mine.offset, mine.bytes, Block{})
                : gin.put(a.peer, a.window, mine.offset, a.local, mine.offset, mine.bytes, Block{});
    }
    if (a.get) {
      if (status == Status::ok) status = gin.flush(Block{});
    } else {
      if (status == Status::ok) status = gin.signal(a.peer, SignalAdd{1}, Block{});
      if (block_index() == 0 && status == Status::ok)
        status = gin.wait_signal(2, a.round + 1, Block{});
    }
  } else if (!a.get && block_index() == 0) {
    status = gin.wait_signal(1, (a.round + 1) * a.initiator_blocks, Block{});
    if (status == Status::ok) status = gin.signal(a.peer, SignalAdd{2}, Block{});
  }
  finish(a.log, status, a.peer);
}

MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024) get_kernel(const MARROW_GRID_CONSTANT GetArguments a) {
  begin(a.log);
  const Gin gin(a.comm, 0);
  Status status = Status::ok;
  for (std::uint32_t i = 0; i < a.iterations && status == Status::ok; ++i) {
    const std::uint64_t start = now_ns();
    status = gin.get(a.peer, a.window, 0, a.target, 0, a.bytes, Block{});
    if (status == Status::ok) status = gin.flush(Block{});
    if (thread_index() == 0) a.log.sample[i] = now_ns() - start;
  }
  finish(a.log, status, a.peer);
}

MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    barrier_kernel(const MARROW_GRID_CONSTANT BarrierArguments a) {
  begin(a.log);
  const Barrier barrier(a.comm, team_world(a.comm), 0);
  Status status = Status::ok;
  for (std::uint32_t i = 0; i < a.iterations && status == Status::ok; ++i) {
    const std::uint64_t start = now_ns();
    status = barrier.sync(Block{});
    if (thread_index() == 0) a.log.sample[i] = now_ns() - start;
  }
  finish(a.log, status, status == Status::timeout ? barrier.late() : -1);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
