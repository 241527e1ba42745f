// SPDX-License-Identifier: Apache-2.0
// Multimem: one element at every member of the lsa team. The form here loops over the peers; NVLink
// SHARP (multicast objects) can put a host's GPUs out of service, so that form is not in
// this version; MARROW_MULTIMEM is the name kept for it.
#pragma once

#include "marrow/device/lsa.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

class Multimem {
 public:
  MARROW_DEVICE explicit Multimem(const DeviceCommunicator& comm)
      : lsa_(comm), team_(team_lsa(comm)) {}

  /// Sum over the lsa team of the element at byte `offset` of each member's window. Orders nothing:
  /// barrier before, as for any plain load. A member whose memory is not mapped (it had failed before the
  /// window was made) is left out, here and below.
  /// @tparam T  std::uint32_t or std::uint64_t, float, double
  template <class T>
  MARROW_DEVICE T load_reduce(const WindowHandle& window, std::uint64_t offset) const {
    T sum{};
    for (int i = 0; i < team_.size; ++i) {
      if (const T* element = lsa_.pointer<const T>(window, offset, team_.world_rank(i)))
        sum += *element;
    }
    return sum;
  }

  /// Adds n to the 64-bit word at `offset` of each member's window; relaxed, system scope. Only on
  /// windows whose atomic path is lsa, and not on host memory of GPUs (Gin::add says why).
  MARROW_DEVICE Status reduce_add(const WindowHandle& window, std::uint64_t offset,
                                  std::uint64_t n) const {
    if (window.atomic_path != Path::lsa || window.no_atomics) return Status::invalid;
    for (int i = 0; i < team_.size; ++i) {
      auto* word = lsa_.pointer<std::uint64_t>(window, offset, team_.world_rank(i));
      if (word) add_relaxed<Scope::system>(word, n);
    }
    return Status::ok;
  }

  /// Stores the value at `offset` of each member's window.
  template <class T>
  MARROW_DEVICE void broadcast_store(const WindowHandle& window, std::uint64_t offset,
                                     T value) const {
    for (int i = 0; i < team_.size; ++i) {
      if (T* element = lsa_.pointer<T>(window, offset, team_.world_rank(i))) *element = value;
    }
  }

 private:
  Lsa lsa_;
  Team team_;
};

}  // namespace cpu_device / gpu_device
}  // namespace marrow
