// SPDX-License-Identifier: Apache-2.0
// What Gin hands to a path. Every path body (path_lsa, path_gda, path_proxy) is a struct of static
// functions over these, so that Gin and the conformance suite treat the three alike:
//
//   Status put(comm, context, PutOp, Then, Knobs[, coop])       bytes may be 0; chops what the queue cannot take at once
//   Status put_value(comm, context, peer, window, offset, value, bytes, Then, Knobs)   1..24 bytes
//   Status get(comm, context, GetOp, Knobs[, coop])
//   Status add(comm, context, peer, Then, Knobs)                signal or add
//   Status fetch(comm, context, peer, FetchOp, &old, Knobs)     waits for the old value
//   Ticket ticket(comm, context, peer)                          covers every operation posted so far; rings deferred doorbells
//   Status test(comm, context, peer, ticket)                    ok: their sources are reusable, gets readable; timeout: not yet
//   Status flush_remote(comm, context, peer, Knobs)             the peer can see them
//
// lsa copies with the whole group; gda and proxy post from one thread (Gin calls them from rank 0).
#pragma once

#include "marrow/device/signal.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

/// Address of the peer's part of a window; 0: not load/store reachable. peer: a rank of the job.
MARROW_DEVICE std::uint64_t lsa_base(const DeviceCommunicator& comm, const WindowHandle& window,
                                     int peer) {
  const auto place = static_cast<unsigned>(peer - comm.lsa_first);
  const std::uint64_t near = place < static_cast<unsigned>(kNear) ? window.near[place] : 0;
  return near ? near : load_cached(window.lsa + peer);
}

struct PutOp {
  int peer;
  const WindowHandle& window;
  std::uint64_t offset;
  const Region& source;
  std::uint64_t source_offset;
  std::uint64_t bytes;
};

struct GetOp {
  int peer;
  const WindowHandle& window;
  std::uint64_t offset;
  const Region& target;
  std::uint64_t target_offset;
  std::uint64_t bytes;
};

/// An add that follows an operation, or stands alone: signals are words of the path's sync window.
/// window == nullptr: none.
struct Then {
  const WindowHandle* window = nullptr;
  std::uint64_t offset = 0;
  std::uint64_t n = 0;
  bool strong = true;
};

struct FetchOp {
  const WindowHandle& window;
  std::uint64_t offset;
  bool swap;              ///< compare_swap, else fetch_add
  std::uint64_t operand;  ///< addend, or the desired value
  std::uint64_t compare;
};

struct Knobs {
  int counter = -1;
  Ordering ordering;
  Doorbell doorbell = Doorbell::now;
  Deadline deadline;
  Scratch scratch;
};

/// Byte offset of a packet slot in a sync window: slots follow the signal words, 16-byte aligned.
MARROW_DEVICE std::uint64_t packet_offset(const DeviceCommunicator& comm, int slot) {
  return (static_cast<std::uint64_t>(comm.signal_words) * 8 + 15) / 16 * 16 +
         static_cast<std::uint64_t>(slot) * 16;
}

/// Which queues, and who may use them at once: the communicator's Sharing, or a constant that the kernel's
/// author gave, so that code for the other modes is left out.
struct Context {
  int index;
  Sharing sharing;
  MARROW_DEVICE operator int() const { return index; }  // NOLINT: implicit by design
};

/// Position in one (context, peer) queue.
using Ticket = std::uint64_t;

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
