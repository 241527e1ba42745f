// SPDX-License-Identifier: Apache-2.0
// Kernels of the host-initiated forms, compiled for the CPU device and, by nvcc, for GPUs. Each runs as
// one block and leaves its status in the control words, where Communicator::check() finds it.
#pragma once

#include "marrow/device.cuh"

namespace marrow::core {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

MARROW_DEVICE void report(const DeviceCommunicator& comm, Status status) {
  if (status == Status::ok || thread_index() != 0) return;
  fetch_max_relaxed<Scope::system>(&comm.control->stream_status,
                                   static_cast<std::uint64_t>(status));
}

MARROW_KERNEL put_kernel(DeviceCommunicator comm, int peer, WindowHandle window,
                         std::uint64_t offset, LocalBufferHandle source,
                         std::uint64_t source_offset, std::uint64_t bytes) {
  const Gin<> gin(comm, 0);
  report(comm, gin.put(peer, window, offset, source, source_offset, bytes, Block{}));
}

MARROW_KERNEL signal_kernel(DeviceCommunicator comm, int peer, int signal, std::uint64_t n) {
  const Gin<> gin(comm, 0);
  report(comm, gin.signal(peer, SignalAdd{signal, n}, Block{}));
}

MARROW_KERNEL wait_kernel(DeviceCommunicator comm, int signal, std::uint64_t at_least) {
  const Gin<> gin(comm, 0);
  report(comm, gin.wait_signal(signal, at_least, Block{}));
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::core
