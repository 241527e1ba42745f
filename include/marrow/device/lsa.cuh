// SPDX-License-Identifier: Apache-2.0
// Lsa: plain loads and stores to peers' windows. Order them with signals, barriers, or publish/observe.
#pragma once

#include "marrow/device/detail/operation.cuh"
#include "marrow/device/platform.cuh"
#include "marrow/device/team.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

class Lsa {
 public:
  MARROW_DEVICE explicit Lsa(const DeviceCommunicator& comm) : comm_(comm) {}

  /// Address of the peer's window at byte `offset`, for loads and stores of ours.
  /// @param peer  world rank
  /// @return null when the peer is not load/store reachable, the rank or the offset is out of range
  template <class T>
  MARROW_DEVICE T* pointer(const WindowHandle& window, std::uint64_t offset, int peer) const {
    if (static_cast<unsigned>(peer) >= static_cast<unsigned>(comm_.nranks) ||
        offset > window.bytes || !window.lsa) {
      return nullptr;
    }
    const std::uint64_t base = detail::lsa_base(comm_, window, peer);
    return base ? reinterpret_cast<T*>(base + offset) : nullptr;
  }

  MARROW_DEVICE Team team() const { return team_lsa(comm_); }

 private:
  const DeviceCommunicator& comm_;
};

}  // namespace cpu_device / gpu_device
}  // namespace marrow
