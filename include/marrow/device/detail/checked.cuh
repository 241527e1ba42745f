// SPDX-License-Identifier: Apache-2.0
// MARROW_CHECKED: a violated precondition is written, with file and line of the caller, where
// Communicator::check() finds it. Peer, signal and context numbers are always compared; bounds and
// alignment only in checked builds.
#pragma once

#include "marrow/device/signal.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

#if defined(MARROW_CHECKED)
inline constexpr bool kChecked = true;
#else
inline constexpr bool kChecked = false;
#endif

#if defined(MARROW_CHECKED)
template <int kSize>
MARROW_DEVICE void copy_text(char (&to)[kSize], const char* from) {
  int length = 0;
  while (from[length]) ++length;
  if (length >= kSize) from += length - kSize + 1;  // the end of a path says more than its start
  int i = 0;
  for (; i < kSize - 1 && from[i]; ++i) to[i] = from[i];
  to[i] = 0;
}
#endif

/// Records a violation (checked builds) and returns Status::invalid.
MARROW_DEVICE Status violation(const DeviceCommunicator& comm, [[maybe_unused]] const Index& at,
                               [[maybe_unused]] const char* operation,
                               [[maybe_unused]] CheckedWhat what,
                               [[maybe_unused]] std::uint64_t value,
                               [[maybe_unused]] std::uint64_t limit) {
#if defined(MARROW_CHECKED)
  // The count is published after the report's words by the reserve being first and `line` last:
  // the host shows a report only when its line is not 0.
  const std::uint64_t slot = fetch_add_relaxed<Scope::system>(&comm.control->reports, 1);
  if (slot < kCheckedReports) {
    CheckedReport& report = comm.control->report[slot];
    copy_text(report.operation, operation);
    copy_text(report.file, at.file);
    report.block = block_index();
    report.thread = thread_index();
    report.what = static_cast<std::uint32_t>(what);
    report.value = value;
    report.limit = limit;
    publish<Scope::system>(Store{&report.line, at.line});
  }
#else
  (void)comm;
#endif
  return Status::invalid;
}

/// Whether [offset, offset + bytes) lies in a region of `limit` bytes; never wraps.
MARROW_DEVICE bool inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t limit) {
  return offset <= limit && bytes <= limit - offset;
}

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
