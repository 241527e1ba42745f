// SPDX-License-Identifier: Apache-2.0
#include "softnic/messages.hpp"

#include <algorithm>
#include <cstring>

#include "base/memfd.hpp"
#include "marrow/error.hpp"
#include "softnic/host_env.hpp"

namespace marrow::softnic {
namespace {

/// Payload of one request. Larger than a packet on a wire: each costs a turn of two engines.
constexpr std::uint32_t kPieceBytes = 32u << 10;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

Outcome failure(mlx5::Syndrome syndrome, Reason reason) {
  return {Outcome::failed, syndrome, reason};
}
constexpr Outcome kParked{Outcome::parked, mlx5::kNoError, Reason::none};

bool is_send(std::uint8_t opcode) {
  return opcode == mlx5::kSend || opcode == mlx5::kSendImmediate;
}

Sge read_sge(const std::byte* at) {
  mlx5::DataSegment segment;
  HostAccess::read(&segment, at, sizeof segment);
  const std::uint32_t count = mlx5::from_big32(segment.byte_count) & mlx5::kByteCountMask;
  return {mlx5::from_big64(segment.address), count == 0 ? std::uint64_t{1} << 31 : count,
          mlx5::from_big32(segment.lkey)};
}

}  // namespace

// --- initiator ----------------------------------------------------------------------------------

bool Messages::make_packet(QueuePair& qp) {
  MessageState& state = *qp.message;
  if (state.packet_key != 0) return true;
  try {
    state.file = base::memfd("softnic-packet", kPieceBytes);
    state.packet = base::Mapping::of_fd(state.file.get(), kPieceBytes);
  } catch (const Error& error) {
    MARROW_WARN(softnic, "QP ", qp.qpn, ": ", error.what());
    return false;
  }
  // A region of no protection domain: its key is good for engines only.
  std::byte* at = state.packet.as<std::byte>();
  if (regions_.expose(at, kPieceBytes, state.file.get(), 0) != 0) return false;
  state.packet_key = regions_.add(at, kPieceBytes, 0, 0, kNoPd);
  regions_.withdraw(at);
  return state.packet_key != 0;
}

void Messages::forget(QueuePair& qp) {
  MessageState& state = *qp.message;
  if (state.packet_key != 0) regions_.remove(state.packet_key);
  state.packet_key = 0;
}

// A peer whose request vanishes asks again, and is answered when it has retried often enough or the
// connection stands again.
void Messages::withdraw(const Directory& directory, QueuePair& qp) {
  const auto drop = [](QpSlot& slot) {
    std::uint32_t expected = Inbox::kRequest;
    slot.inbox.state.compare_exchange_strong(expected, Inbox::kIdle, kRelaxed);
  };
  drop(*qp.slot);
  QpSlot& peer = directory.qp_slot(qp.remote_qpn);
  if ((qp.stage == QueuePair::Stage::responder || qp.stage == QueuePair::Stage::announce) &&
      peer.qpn.load(kAcquire) == qp.remote_qpn) {
    drop(peer);
  }
}

/// Moves the piece at done_bytes between the operation's buffers and the packet.
Outcome Messages::copy_piece(QueuePair& qp, const Operation& op, bool into_packet) {
  std::byte* packet = qp.message->packet.as<std::byte>();
  if (op.inline_data != nullptr) {
    std::memcpy(packet, op.inline_data + qp.done_bytes, qp.message->piece);
    return {};
  }
  std::uint64_t start = 0;  // of the buffer within the message
  std::uint64_t done = 0;   // of the piece
  for (std::uint32_t i = 0; i < op.sge_count && done < qp.message->piece; ++i) {
    const Sge& sge = op.sges[i];
    Outcome outcome;
    std::byte* mine = executor_.local_buffer(qp, sge, !into_packet, outcome);
    if (mine == nullptr) return outcome;
    const std::uint64_t position = qp.done_bytes + done;
    if (position < start + sge.bytes) {
      const std::uint64_t inside = position - start;
      const std::uint64_t bytes = std::min(sge.bytes - inside, qp.message->piece - done);
      if (into_packet) {
        HostAccess::copy(packet + done, mine + inside, bytes);
      } else {
        HostAccess::copy(mine + inside, packet + done, bytes);
      }
      done += bytes;
    }
    start += sge.bytes;
  }
  return {};
}

/// Puts the next piece into the peer's inbox.
Outcome Messages::ask(QueuePair& qp, const Operation& op) {
  const std::uint8_t opcode = op.control.opcode;
  const bool reads = opcode == mlx5::kRead;
  MessageState& state = *qp.message;
  Outcome outcome;
  for (std::uint32_t i = 0; i < op.sge_count; ++i) {
    const bool written = reads || op.atomic_bytes != 0;
    if (executor_.local_buffer(qp, op.sges[i], written, outcome) == nullptr) return outcome;
  }
  if (!make_packet(qp)) return failure(mlx5::kLocalQpOperationError, Reason::no_packet);
  state.piece =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(op.bytes - qp.done_bytes, kPieceBytes));
  if (!reads && op.atomic_bytes == 0) {
    outcome = copy_piece(qp, op, true);
    if (outcome.step != Outcome::done) return outcome;
  }
  QpSlot& slot = env_.peer_slot(qp);
  Inbox& inbox = slot.inbox;
  // WRITE_IMM's announcement is a request of its own, after the data.
  const std::uint8_t asked = opcode == mlx5::kWriteImmediate ? std::uint8_t{mlx5::kWrite} : opcode;
  inbox.opcode.store(asked, kRelaxed);
  inbox.immediate.store(op.control.immediate, kRelaxed);
  inbox.solicited.store((op.control.fm_ce_se & mlx5::kSolicited) != 0 ? 1 : 0, kRelaxed);
  inbox.bytes.store(state.piece, kRelaxed);
  inbox.offset.store(static_cast<std::uint32_t>(qp.done_bytes), kRelaxed);
  inbox.total.store(static_cast<std::uint32_t>(op.bytes), kRelaxed);
  inbox.source_qpn.store(qp.qpn, kRelaxed);
  inbox.packet_key.store(state.packet_key, kRelaxed);
  inbox.rkey.store(op.rkey, kRelaxed);
  inbox.address.store(op.remote_address + qp.done_bytes, kRelaxed);
  inbox.opmod.store(op.control.opmod, kRelaxed);
  inbox.atomic_bytes.store(op.atomic_bytes, kRelaxed);
  inbox.operand.store(op.operand, kRelaxed);
  inbox.compare.store(op.compare, kRelaxed);
  inbox.operand_mask.store(op.operand_mask, kRelaxed);
  inbox.compare_mask.store(op.compare_mask, kRelaxed);
  if (state.number == 0) state.number = qp.qpn << 10;  // other queue pairs used this inbox before
  inbox.number.store(++state.number, kRelaxed);
  qp.stage = QueuePair::Stage::responder;
  inbox.state.store(Inbox::kRequest, kRelease);  // publishes the request and the packet
  env_.ring(slot);
  return kParked;
}

Outcome Messages::advance(QueuePair& qp, const Operation& op, Nanoseconds now) {
  QpSlot& slot = env_.peer_slot(qp);
  Inbox& inbox = slot.inbox;
  const bool asked = qp.stage == QueuePair::Stage::responder;
  const std::uint32_t answer = asked ? inbox.state.load(kAcquire) : std::uint32_t{Inbox::kIdle};
  // An answer counts even if the peer has gone since: it is what an acknowledgement says.
  if ((answer != Inbox::kDone && answer != Inbox::kFailed) ||
      inbox.answered.load(kRelaxed) != qp.message->number) {
    Outcome outcome;
    PeerFacts facts;
    if (!executor_.peer(qp, now, facts, outcome)) return outcome;
  }
  if (!asked) return ask(qp, op);
  if (answer == Inbox::kIdle ||
      (answer != Inbox::kRequest && inbox.answered.load(kRelaxed) != qp.message->number)) {
    // The peer was reset meanwhile, or an old request's answer wiped ours out.
    inbox.state.store(Inbox::kRequest, kRelease);
    env_.ring(slot);
    return kParked;
  }
  switch (answer) {
    case Inbox::kDone: break;
    case Inbox::kFailed: {
      inbox.state.store(Inbox::kIdle, kRelaxed);
      const auto syndrome = static_cast<mlx5::Syndrome>(inbox.syndrome.load(kRelaxed));
      return failure(syndrome, Reason::peer_refused);
    }
    case Inbox::kNotReady:
      if (qp.rnr_retry != 7 && qp.rnr_attempts >= qp.rnr_retry) {
        inbox.state.store(Inbox::kIdle, kRelaxed);
        return failure(mlx5::kReceiverNotReadyRetryExceeded, Reason::no_receive);
      }
      ++qp.rnr_attempts;
      qp.not_before = now + kReceiverNotReadyPause;
      inbox.state.store(Inbox::kRequest, kRelease);
      env_.ring(slot);
      return kParked;
    default: return kParked;
  }
  inbox.state.store(Inbox::kIdle, kRelaxed);
  Outcome outcome;
  if (op.atomic_bytes != 0) {
    std::byte* result = executor_.local_buffer(qp, op.sges[0], true, outcome);
    if (result == nullptr) return outcome;
    const std::uint64_t old = inbox.operand.load(kRelaxed);
    HostAccess::place(result, reinterpret_cast<const std::uint8_t*>(&old), op.atomic_bytes);
    qp.done_bytes = op.bytes;
  } else {
    if (op.control.opcode == mlx5::kRead) {
      outcome = copy_piece(qp, op, false);
      if (outcome.step != Outcome::done) return outcome;
    }
    qp.done_bytes += qp.message->piece;
  }
  qp.stage = QueuePair::Stage::run;
  return {qp.done_bytes < op.bytes ? Outcome::more : Outcome::done, mlx5::kNoError, Reason::none};
}

// --- responder ----------------------------------------------------------------------------------

bool Messages::serve(QueuePair& qp) {
  Inbox& inbox = qp.slot->inbox;
  if (inbox.state.load(kAcquire) != Inbox::kRequest) return false;
  if (qp.state != mlx5::kReadyToReceive && qp.state != mlx5::kReadyToSend) return false;
  const auto opcode = static_cast<std::uint8_t>(inbox.opcode.load(kRelaxed));
  const std::uint32_t number = inbox.number.load(kRelaxed);
  const Answer answer = is_send(opcode)                   ? receive(qp, inbox)
                        : opcode == mlx5::kWriteImmediate ? receive_immediate(qp, inbox)
                                                          : touch(qp, inbox);
  inbox.answered.store(number, kRelaxed);
  inbox.syndrome.store(answer.syndrome, kRelaxed);
  inbox.state.store(answer.state, kRelease);
  return true;
}

/// The initiator's packet, null if it is gone or too small.
std::byte* Messages::packet_of(Inbox& inbox, std::uint64_t bytes) {
  const Region* region = regions_.remote(inbox.packet_key.load(kRelaxed));
  return region == nullptr || region->pd != kNoPd ? nullptr : region->at(0, bytes);
}

/// Consumes the next receive of the queue. @return false if none is posted
bool Messages::take_receive(QueuePair& qp) {
  MessageState& state = *qp.message;
  ReceiveQueue& queue = *state.receives;
  if (queue.depth == 0 || queue.record == nullptr) return false;
  const auto posted =
      static_cast<std::uint16_t>(mlx5::from_big32(HostAccess::load_acquire(queue.record)));
  const auto available = static_cast<std::uint16_t>(posted - queue.consumer);
  if (available == 0 || available > queue.depth) return false;
  const std::byte* at =
      queue.ring + (queue.consumer & (queue.depth - 1)) * std::size_t{queue.stride};
  const std::uint32_t most = std::min(queue.stride / mlx5::kSegmentBytes, mlx5::kMostReceiveSges);
  state.sge_count = 0;
  state.capacity = 0;
  for (std::uint32_t i = 0; i < most; ++i) {
    const Sge sge = read_sge(at + std::size_t{i} * mlx5::kSegmentBytes);
    if (sge.lkey == mlx5::kInvalidLkey) break;
    state.sges[state.sge_count++] = sge;
    state.capacity += sge.bytes;
  }
  state.index = queue.consumer++;
  return true;
}

bool Messages::complete(QueuePair& qp, mlx5::CompletionOpcode opcode, Inbox& inbox,
                        std::uint64_t bytes, mlx5::Syndrome syndrome) {
  Completion completion;
  completion.opcode = opcode;
  completion.qpn = qp.qpn;
  completion.user_index = qp.user_index;
  completion.counter = qp.message->index;
  completion.bytes = static_cast<std::uint32_t>(bytes);
  completion.immediate = inbox.immediate.load(kRelaxed);
  completion.solicited = inbox.solicited.load(kRelaxed) != 0;
  completion.syndrome = syndrome;
  return env_.post(*qp.receive_cq, completion);
}

/// Ends the connection: an error entry for the receive here, a syndrome for the initiator.
Messages::Answer Messages::refuse(QueuePair& qp, mlx5::Syndrome own, mlx5::Syndrome theirs) {
  complete(qp, mlx5::kResponderError, qp.slot->inbox, 0, own);
  qp.message->receiving = false;
  env_.set_state(qp, mlx5::kError);
  return {Inbox::kFailed, theirs};
}

Messages::Answer Messages::receive(QueuePair& qp, Inbox& inbox) {
  MessageState& state = *qp.message;
  const std::uint64_t offset = inbox.offset.load(kRelaxed);
  const std::uint64_t bytes = inbox.bytes.load(kRelaxed);
  const std::uint64_t total = inbox.total.load(kRelaxed);
  if (offset == 0) {
    if (!take_receive(qp)) return {Inbox::kNotReady};
    state.receiving = true;
    if (total > state.capacity) {
      return refuse(qp, mlx5::kLocalLengthError, mlx5::kRemoteInvalidRequestError);
    }
  }
  if (!state.receiving || offset + bytes > state.capacity) {
    return {Inbox::kFailed, mlx5::kRemoteInvalidRequestError};
  }
  const std::byte* packet = packet_of(inbox, bytes);
  if (packet == nullptr && bytes != 0) return {Inbox::kFailed, mlx5::kTransportRetryExceeded};
  std::uint64_t start = 0;
  std::uint64_t done = 0;
  for (std::uint32_t i = 0; i < state.sge_count && done < bytes;
       start += state.sges[i].bytes, ++i) {
    const Sge& sge = state.sges[i];
    if (offset + done >= start + sge.bytes) continue;
    Outcome outcome;
    std::byte* mine = executor_.local_buffer(qp, sge, true, outcome);
    if (mine == nullptr) {
      return refuse(qp, outcome.syndrome, mlx5::kRemoteOperationError);
    }
    const std::uint64_t inside = offset + done - start;
    const std::uint64_t piece = std::min(sge.bytes - inside, bytes - done);
    HostAccess::copy(mine + inside, packet + done, piece);
    done += piece;
  }
  if (offset + bytes < total) return {Inbox::kDone};
  state.receiving = false;
  const bool immediate = inbox.opcode.load(kRelaxed) == mlx5::kSendImmediate;
  const bool posted =
      complete(qp, immediate ? mlx5::kResponderSendImmediate : mlx5::kResponderSend, inbox, total);
  if (!posted) env_.set_state(qp, mlx5::kError);
  return {posted ? Inbox::kDone : Inbox::kFailed, mlx5::kRemoteOperationError};
}

Messages::Answer Messages::receive_immediate(QueuePair& qp, Inbox& inbox) {
  if (!take_receive(qp)) return {Inbox::kNotReady};
  const bool posted =
      complete(qp, mlx5::kResponderWriteImmediate, inbox, inbox.bytes.load(kRelaxed));
  if (!posted) env_.set_state(qp, mlx5::kError);
  return {posted ? Inbox::kDone : Inbox::kFailed, mlx5::kRemoteOperationError};
}

/// A one-sided operation on memory that only this process can reach.
Messages::Answer Messages::touch(QueuePair& qp, Inbox& inbox) {
  OperationFields op;
  op.control.opcode = static_cast<std::uint8_t>(inbox.opcode.load(kRelaxed));
  op.rkey = inbox.rkey.load(kRelaxed);
  op.remote_address = inbox.address.load(kRelaxed);
  op.bytes = inbox.bytes.load(kRelaxed);
  op.atomic_bytes = inbox.atomic_bytes.load(kRelaxed);
  op.operand = inbox.operand.load(kRelaxed);
  op.compare = inbox.compare.load(kRelaxed);
  op.operand_mask = inbox.operand_mask.load(kRelaxed);
  op.compare_mask = inbox.compare_mask.load(kRelaxed);
  PeerFacts self;
  self.answer = PeerFacts::connected;
  self.process = directory_.self();
  self.pd = qp.pd;
  self.access = qp.slot->access.load(kRelaxed);
  const bool reads = op.control.opcode == mlx5::kRead;
  const std::uint32_t access = op.atomic_bytes != 0 ? verbs::IBV_ACCESS_REMOTE_ATOMIC
                               : reads              ? verbs::IBV_ACCESS_REMOTE_READ
                                                    : verbs::IBV_ACCESS_REMOTE_WRITE;
  Outcome outcome;
  if (op.atomic_bytes != 0 && op.remote_address % op.atomic_bytes != 0) {
    return {Inbox::kFailed, mlx5::kRemoteInvalidRequestError};
  }
  std::byte* mine = executor_.remote_buffer(self, op, access, op.bytes, outcome);
  if (mine == nullptr) return {Inbox::kFailed, outcome.syndrome};
  if (op.atomic_bytes != 0) {
    if (reinterpret_cast<std::uintptr_t>(mine) % op.atomic_bytes != 0) {
      return {Inbox::kFailed, mlx5::kRemoteInvalidRequestError};
    }
    inbox.operand.store(executor_.apply(op, mine), kRelaxed);
    return {Inbox::kDone};
  }
  std::byte* packet = packet_of(inbox, op.bytes);
  if (packet == nullptr) return {Inbox::kFailed, mlx5::kTransportRetryExceeded};
  if (reads) {
    HostAccess::copy(packet, mine, op.bytes);
  } else {
    HostAccess::copy(mine, packet, op.bytes);
  }
  return {Inbox::kDone};
}

bool Messages::flush(QueuePair& qp) {
  MessageState& state = *qp.message;
  if (state.receives != &state.own) return false;  // a shared queue outlives its queue pairs
  bool worked = false;
  if (state.receiving) {
    complete(qp, mlx5::kResponderError, qp.slot->inbox, 0, mlx5::kFlushError);
    state.receiving = false;
    worked = true;
  }
  while (take_receive(qp)) {
    complete(qp, mlx5::kResponderError, qp.slot->inbox, 0, mlx5::kFlushError);
    worked = true;
  }
  return worked;
}

}  // namespace marrow::softnic
