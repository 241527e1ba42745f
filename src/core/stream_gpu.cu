// SPDX-License-Identifier: Apache-2.0
#include "core/stream.hpp"
#include "core/stream_kernels.cuh"

namespace marrow::core {
namespace {

void put(const Place& place, const DeviceCommunicator& comm, int peer, const WindowHandle& window,
         std::uint64_t offset, const LocalBufferHandle& source, std::uint64_t source_offset,
         std::uint64_t bytes) {
  launch(place, 1, 1024, 0, put_kernel, comm, peer, window, offset, source, source_offset, bytes);
}
void signal(const Place& place, const DeviceCommunicator& comm, int peer, int id, std::uint64_t n) {
  launch(place, 1, 1, 0, signal_kernel, comm, peer, id, n);
}
void wait(const Place& place, const DeviceCommunicator& comm, int id, std::uint64_t at_least) {
  launch(place, 1, 1, 0, wait_kernel, comm, id, at_least);
}

}  // namespace

const StreamOperations& gpu_stream_operations() {
  static constexpr StreamOperations kGpu{put, signal, wait};
  return kGpu;
}

}  // namespace marrow::core
