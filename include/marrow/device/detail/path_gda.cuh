// SPDX-License-Identifier: Apache-2.0
// Not connected yet: every operation is invalid.
#pragma once

#include "marrow/device/detail/operation.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

struct PathGda {
  static constexpr Path kPath = Path::gda;
  static MARROW_DEVICE Status put(const DeviceCommunicator&, int, const PutOp&, const Then&, const Knobs&) { return Status::invalid; }
  static MARROW_DEVICE Status put_value(const DeviceCommunicator&, int, int, const WindowHandle&, std::uint64_t, const void*,
                                        std::uint32_t, const Then&, const Knobs&) { return Status::invalid; }
  static MARROW_DEVICE Status get(const DeviceCommunicator&, int, const GetOp&, const Knobs&) { return Status::invalid; }
  static MARROW_DEVICE Status add(const DeviceCommunicator&, int, int, const Then&, const Knobs&) { return Status::invalid; }
  static MARROW_DEVICE Status fetch(const DeviceCommunicator&, int, int, const FetchOp&, std::uint64_t*, const Knobs&) { return Status::invalid; }
  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator&, int, int) { return 0; }
  static MARROW_DEVICE Status test(const DeviceCommunicator&, int, int, Ticket) { return Status::invalid; }
  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator&, int, int, const Knobs&) { return Status::invalid; }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
