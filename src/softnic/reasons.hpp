// SPDX-License-Identifier: Apache-2.0
// Why a WQE failed, as a number that an engine on any processor can report and a sentence for the log.
#pragma once

#include <cstdint>

namespace marrow::softnic {

#define MARROW_SOFTNIC_REASONS(X)                                                \
  X(none, "")                                                                    \
  X(overrun, "more WQEs were announced than the ring holds")                     \
  X(ds_is_zero, "ds is 0")                                                       \
  X(longer_than_announced, "the WQE is longer than what the doorbell announced") \
  X(wrong_index, "the WQE's index is not its place in the queue")                \
  X(wrong_queue, "the WQE names another queue pair")                             \
  X(bad_segments, "the WQE's segments do not fit its opcode")                    \
  X(dropped, "dropped on request (drop=N)")                                      \
  X(failed_on_request, "failed on request (error_at=N)")                         \
  X(wait_without_queue, "WAIT names no completion queue")                        \
  X(peer_completion, "the peer could not post its completion")                   \
  X(no_receive, "the peer posted no receive")                                    \
  X(peer_refused, "the peer refused the message")                                \
  X(no_packet, "no memory for the packet buffer of a message")                   \
  X(not_on_this_engine, "this engine serves no messages")                        \
  X(peer_missing, "the peer's queue pair does not exist")                        \
  X(peer_gone, "the peer's process is gone")                                     \
  X(peer_not_connected, "the peer's queue pair is not connected to us")          \
  X(bad_lkey, "no region of this protection domain has the lkey")                \
  X(local_not_writable, "the local region is not writable")                      \
  X(local_outside, "the local buffer lies outside its region")                   \
  X(peer_forbids, "the peer's queue pair forbids this operation")                \
  X(bad_rkey, "the peer has no region with the rkey")                            \
  X(remote_forbids, "the remote region forbids this operation")                  \
  X(remote_outside, "the remote buffer lies outside its region")                 \
  X(atomic_address, "the atomic's address is not aligned")                       \
  X(atomic_word, "the atomic's word is not aligned in memory")

enum class Reason : std::uint8_t {
#define MARROW_SOFTNIC_REASON(name, text) name,
  MARROW_SOFTNIC_REASONS(MARROW_SOFTNIC_REASON)
#undef MARROW_SOFTNIC_REASON
};

inline const char* reason_text(Reason reason) {
  static constexpr const char* kTexts[] = {
#define MARROW_SOFTNIC_REASON(name, text) text,
      MARROW_SOFTNIC_REASONS(MARROW_SOFTNIC_REASON)
#undef MARROW_SOFTNIC_REASON
  };
  return kTexts[static_cast<int>(reason)];
}

}  // namespace marrow::softnic
