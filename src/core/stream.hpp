// SPDX-License-Identifier: Apache-2.0
// Host-initiated put, signal and wait: a kernel of one block in stream order. Failures are left in the
// control words (FaultBoard::throw_if_any).
#pragma once

#include "marrow/abi/device_communicator.h"
#include "marrow/place.hpp"

namespace marrow::core {

/// One executor's launches. The CPU device runs them at once, in the caller.
struct StreamOperations {
  void (*put)(const Place& place, const DeviceCommunicator& comm, int peer,
              const WindowHandle& window, std::uint64_t offset, const LocalBufferHandle& source,
              std::uint64_t source_offset, std::uint64_t bytes);
  void (*signal)(const Place& place, const DeviceCommunicator& comm, int peer, int id,
                 std::uint64_t n);
  void (*wait)(const Place& place, const DeviceCommunicator& comm, int id, std::uint64_t at_least);
};

/// @throws Error(unsupported) for a GPU when the library was built without nvcc
const StreamOperations& stream_operations(const Place& place);

/// Defined by stream_gpu.cu, in builds with CUDA.
const StreamOperations& gpu_stream_operations();

}  // namespace marrow::core
