// SPDX-License-Identifier: Apache-2.0
#include "core/stream.hpp"

#include "core/stream_kernels.cuh"
#include "marrow/error.hpp"

namespace marrow::core {
namespace {

void put(const Place& place, const DeviceCommunicator& comm, int peer, const WindowHandle& window,
         std::uint64_t offset, const LocalBufferHandle& source, std::uint64_t source_offset,
         std::uint64_t bytes) {
  launch(place, 1, 1, 0, put_kernel, comm, peer, window, offset, source, source_offset, bytes);
}
void signal(const Place& place, const DeviceCommunicator& comm, int peer, int id, std::uint64_t n) {
  launch(place, 1, 1, 0, signal_kernel, comm, peer, id, n);
}
void wait(const Place& place, const DeviceCommunicator& comm, int id, std::uint64_t at_least) {
  launch(place, 1, 1, 0, wait_kernel, comm, id, at_least);
}

}  // namespace

const StreamOperations& stream_operations(const Place& place) {
  static constexpr StreamOperations kCpu{put, signal, wait};
  if (!place.on_gpu()) return kCpu;
#if MARROW_WITH_CUDA
  return gpu_stream_operations();
#else
  throw Error(Code::unsupported,
              "put, signal or wait on a GPU stream: this library was built without nvcc",
              "build it with MARROW_CUDA=ON, or call Gin from a kernel of yours on that stream");
#endif
}

}  // namespace marrow::core
