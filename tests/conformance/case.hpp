// SPDX-License-Identifier: Apache-2.0
// What a conformance kernel gets, what it reports, and what a case is. Read by g++ and by nvcc.
#pragma once

#include <cstdint>
#include <vector>

#include "marrow/abi/device_communicator.h"
#include "marrow/place.hpp"

namespace marrow::conformance {

/// Which coop group calls the operations.
enum class Group : std::int32_t { thread, warp, block };

/// First failure of a rank; in memory that the host reads after the kernel.
struct Report {
  std::uint64_t errors = 0;
  std::int64_t line = 0;  ///< of the kernel's source file
  std::int64_t iteration = 0;
  std::int64_t peer = -1;
  std::int64_t index = 0;  ///< byte of the message, or what the case says
  std::uint64_t got = 0;
  std::uint64_t want = 0;
};

/// Every rank has an inbox and an outbox window of nranks slots each, one a peer. A slot is guard,
/// message, guard; what is not written must keep its poison. After the inbox's slots come kWords
/// 64-bit words for atomics.
struct Args {
  DeviceCommunicator comm;
  WindowHandle inbox;
  WindowHandle outbox;
  LocalBufferHandle local;  ///< laid out like the outbox
  Report* report = nullptr;
  std::uint64_t seed = 0;
  std::uint64_t bytes = 0;         ///< of a message
  std::uint64_t base = 0;          ///< where the inbox's slots begin (past 4 GiB in some rows)
  std::uint64_t target_shift = 0;  ///< misalignment of messages in the inbox
  std::uint64_t source_shift = 0;  ///< misalignment in the outbox or local buffer
  std::uint64_t count = 0;         ///< what the case says
  std::int32_t iterations = 1;
  std::int32_t context = 0;
  std::int32_t delay_ns = 0;  ///< random pauses of up to this between steps
  Group group = Group::block;
  bool use_local = false;  ///< sources of puts and targets of gets are in the local buffer
};

inline constexpr std::uint64_t kGuard = 64;
inline constexpr std::uint64_t kWords = 4096;
inline constexpr std::uint64_t kMaxShift = 63;

/// Bytes from one slot to the next.
MARROW_HOST_DEVICE constexpr std::uint64_t slot_stride(std::uint64_t bytes) {
  return (bytes + kMaxShift + 2 * kGuard + 63) / 64 * 64;
}

enum Trait : unsigned {
  kSized = 1,          ///< message size, alignment and kind of source matter
  kGrouped = 2,        ///< runs as thread, warp and block
  kTwoContexts = 4,    ///< needs at least two contexts
  kManyPosters = 8,    ///< all threads post at once, as far as the sharing mode allows
  kCheckThrows = 16,   ///< Communicator::check() must throw afterwards
  kCounted = 32,       ///< `count` is the row's --count
  kLsaOnly = 64,       ///< plain loads and stores: only on the lsa path
  kNotSelf = 128,      ///< needs a peer
  kReports = 256,      ///< a MARROW_CHECKED build reports violations, so that check() throws there
  kWindowWords = 512,  ///< adds to words of a window: not in every memory on GPUs
  kSelfTest = 1024,    ///< fails on purpose; only when it is named
};

struct Case {
  const char* name;
  const char* promise;  ///< what is violated when it fails
  void (*launch)(const Place&, int grid, int block, const Args&);
  unsigned traits = 0;
  std::uint64_t bytes = 256;  ///< message size of cases that are not kSized
  int iterations = 20;
};

/// All cases of this binary (CPU or GPU kernels).
const std::vector<Case>& cases();

/// Poisons a rank's inbox, outbox and local buffer; before the first case kernel.
void launch_prepare(const Place& place, const Args& args);

}  // namespace marrow::conformance
