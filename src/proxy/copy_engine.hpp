// SPDX-License-Identifier: Apache-2.0
// How CPU threads move bytes of device memory: the GPU's copy engine, on a stream of its own. core
// gives one to the transport of a communicator on a GPU; on the CPU device there is none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace marrow::proxy {

/// Used by one progress thread. No call may synchronise with the device: kernels wait for us.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  /// Called once by the thread that will use it, e.g. to set its CUDA device.
  virtual void attach_thread() = 0;

  /// Enqueues a copy between any two addresses of host (pinned) and device memory. Copies of one
  /// engine finish in the order of the calls. A host source of at most 64 bytes is taken before
  /// the call returns and may be any memory.
  /// @return a ticket for done(); tickets grow
  /// @throws Error(cuda)
  virtual std::uint64_t copy(void* to, const void* from, std::size_t bytes) = 0;

  /// Whether that copy and all before it have finished. @throws Error(cuda)
  virtual bool done(std::uint64_t ticket) = 0;

  /// Maps another process's device memory (its CUDA VMM descriptor). This and unmap may be called by any
  /// thread at any time. @throws Error
  virtual void* map(int fd, std::uint64_t fd_offset, std::size_t bytes) = 0;
  virtual void unmap(void* address, std::size_t bytes) = 0;
};

}  // namespace marrow::proxy
