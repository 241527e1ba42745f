// SPDX-License-Identifier: Apache-2.0
// What every device operation returns. No wait is unbounded, so each can end in one of five ways.
#pragma once

#include "marrow/abi/abi.h"

namespace marrow {

/// Result of a device operation. Larger is worse: a group's result is the maximum of its threads'.
enum class Status : std::uint32_t {
  ok = 0,  ///< done, with the meaning the operation documents
  timeout =
      1,  ///< the deadline passed. From put: nothing was posted. From a wait or flush: the operation is still outstanding
  peer_failed = 2,  ///< the peer's process or connection ended, or its queue is in error
  aborted = 3,      ///< the communicator was revoked
  invalid = 4,      ///< bad argument or another ABI; Communicator::check() has the sentence
};

/// Stable lower-case name, e.g. "timeout".
MARROW_HOST_DEVICE constexpr const char* name(Status status) {
  switch (status) {
    case Status::ok: return "ok";
    case Status::timeout: return "timeout";
    case Status::peer_failed: return "peer_failed";
    case Status::aborted: return "aborted";
    case Status::invalid: return "invalid";
  }
  return "unknown";
}

/// How long a device operation may wait, in nanoseconds of the global timer (never cycles).
/// 0 means the communicator's default, MARROW_WAIT_TIMEOUT. There is no "for ever".
struct Deadline {
  std::uint64_t ns = 0;
};

/// The worse of two results.
MARROW_HOST_DEVICE constexpr Status worse(Status a, Status b) { return a < b ? b : a; }

}  // namespace marrow
