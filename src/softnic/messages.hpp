// SPDX-License-Identifier: Apache-2.0
// What the owner of the memory or of the receive queue must do itself: SEND needs a receive consumed
// and its completion posted, and memory without a descriptor can be touched in its own process only.
// The initiator puts pieces of a message into a packet buffer that is a region like any other, and
// asks through the peer's inbox; the peer's engine does the piece and answers. CPU engines only.
#pragma once

#include <cstdint>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "softnic/directory.hpp"
#include "softnic/execute.hpp"
#include "softnic/options.hpp"
#include "softnic/queues.hpp"
#include "softnic/receive.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class HostEnv;

/// A queue pair's part in messages, in both roles.
struct MessageState {
  // initiator: where the peer fetches and leaves payload; made with the first message
  base::Fd file;
  base::Mapping packet;
  std::uint32_t packet_key = 0;
  std::uint32_t piece = 0;   ///< bytes asked for in the request under way
  std::uint32_t number = 0;  ///< of that request

  // responder
  ReceiveQueue own;
  ReceiveQueue* receives = nullptr;  ///< own, or the shared one
  bool receiving = false;            ///< a SEND has consumed a receive and is not complete
  std::uint16_t index = 0;           ///< of that receive
  std::uint32_t sge_count = 0;
  std::uint64_t capacity = 0;
  Sge sges[mlx5::kMostReceiveSges];

  void reset() {
    receiving = false;
    if (receives == &own) own.consumer = 0;
  }
};

class Messages {
 public:
  Messages(Directory& directory, Regions& regions, HostEnv& env, Executor<HostEnv>& executor)
      : directory_(directory), regions_(regions), env_(env), executor_(executor) {}

  /// Initiator: one step of `op`. SEND, or anything one-sided.
  Outcome advance(QueuePair& qp, const Operation& op, Nanoseconds now);
  /// Responder: the request in the queue pair's inbox. @return true if there was one
  bool serve(QueuePair& qp);
  /// Completes the posted receives of a queue pair in error. @return true if there were any
  bool flush(QueuePair& qp);
  /// Before a reset: what was asked of the peer, and what the peer asked, is not to be done any more. Lock
  /// held.
  static void withdraw(const Directory& directory, QueuePair& qp);
  /// Gives the packet buffer's region back.
  void forget(QueuePair& qp);

 private:
  /// How the responder ends a piece: kDone, kNotReady, or kFailed with what the initiator reports.
  struct Answer {
    std::uint32_t state;
    mlx5::Syndrome syndrome = mlx5::kNoError;
  };
  bool make_packet(QueuePair& qp);
  Outcome ask(QueuePair& qp, const Operation& op);
  Outcome copy_piece(QueuePair& qp, const Operation& op, bool into_packet);
  Answer receive(QueuePair& qp, Inbox& inbox);
  Answer receive_immediate(QueuePair& qp, Inbox& inbox);
  Answer touch(QueuePair& qp, Inbox& inbox);
  Answer refuse(QueuePair& qp, mlx5::Syndrome own, mlx5::Syndrome theirs);
  bool take_receive(QueuePair& qp);
  std::byte* packet_of(Inbox& inbox, std::uint64_t bytes);
  bool complete(QueuePair& qp, mlx5::CompletionOpcode opcode, Inbox& inbox, std::uint64_t bytes,
                mlx5::Syndrome syndrome = mlx5::kNoError);

  Directory& directory_;
  Regions& regions_;
  HostEnv& env_;
  Executor<HostEnv>& executor_;
};

}  // namespace marrow::softnic
