// SPDX-License-Identifier: Apache-2.0
// What a NIC does for one queue pair, one step at a time: fetch, decode, run, complete, fail, flush,
// answer the peer. One source for every engine: no containers, locks or system calls, so it compiles for a CPU
// thread (engine.cpp) and for a warp of the GPU block (gpu_engine.cuh). One thread at a time steps a queue.
//
// Env, the engine around it, provides
//   Access                      how memory is touched (host_access.hpp)
//   Work& work(qp)              room for the WQE in execution
//   const Region* local(key)    a region of this process, null if there is none
//   const Region* remote(key, later)   of any process; null and later = true: ask again soon
//   PeerFacts peer(qp)          the queue pair at the other end
//   bool asks_owner(key)        only the owner of the region can touch it; Outcome message(qp, op, now): has it do so,
//                               and SEND; one step a call
//   QpSlot& peer_slot(qp)       its shared slot, while it is connected;  void ring(slot): tells its owner
//   CompletionQueue* completion_queue(cqn)     null if there is none
//   bool post(cq, completion)   post_completion, against other threads of the engine if need be
//   Word update<Word>(at, next) the atomic operation; fetch_add<Word>(at, n), compare_swap<Word>(at, expected,
//                               desired): its plain forms
//   void set_state(qp, state)   also in the shared directory
//   Fate next_wqe(); Nanoseconds delay(); bool corrupts_write(); pick(bound); retry_limit()    faults
//   void stall(now); bool stalled();
//   void failed(qp, control, syndrome); void overran(qp)     for the log
#pragma once

#include <cstdint>

#include "softnic/execute.hpp"
#include "softnic/queues.hpp"

namespace marrow::softnic {

/// What happens to a WQE on purpose.
enum class Fate : std::uint8_t { normal, dropped, failed, stalled };

/// How far a step came.
enum class Turn : std::uint8_t {
  idle,    ///< nothing to do now
  worked,  ///< call again
  more,    ///< a long transfer: let other queues in, then call again
  copy     ///< move the piece, then call again
};

/// How soon a receiver that was not ready is asked again.
inline constexpr Nanoseconds kReceiverNotReadyPause = 200'000;

template <class Env>
class QueueMachine {
 public:
  using Access = typename Env::Access;

  explicit MARROW_NIC_CODE QueueMachine(Env& env) : env_(env), executor_(env) {}

  /// Takes notice of doorbell and record. @return false if the queue was stopped for an overrun
  MARROW_NIC_CODE bool notice(QueuePair& qp, const Hints& hints) {
    if (update_producer(qp, hints) || qp.state != mlx5::kReadyToSend) return true;
    stop_overrun(qp);
    return false;
  }
  MARROW_NIC_CODE void stop_overrun(QueuePair& qp) {
    qp.producer = qp.consumer;  // nothing in the ring can be trusted
    fail(qp, {}, mlx5::kLocalQpOperationError, Reason::overrun);
  }

  /// One step of the first WQE in line.
  MARROW_NIC_CODE Turn advance(QueuePair& qp, Nanoseconds now, CopyPiece& piece) {
    if (qp.consumer == qp.producer) return Turn::idle;
    if (qp.state != mlx5::kReadyToSend) {
      if (qp.state != mlx5::kError) return Turn::idle;
      flush(qp);
      return Turn::worked;
    }
    if (qp.not_before > now) return Turn::idle;
    if (qp.stage == QueuePair::Stage::fetch) {
      if (!fetch(qp, now)) return env_.stalled() ? Turn::idle : Turn::worked;
    } else if (!reload(qp)) {
      return Turn::worked;
    }
    Work& work = env_.work(qp);
    const Outcome outcome = step(qp, work.operation, now, piece);
    switch (outcome.step) {
      case Outcome::parked: return Turn::idle;
      case Outcome::more: return Turn::more;
      case Outcome::copy: return Turn::copy;
      case Outcome::failed:
        fail(qp, work.operation.control, outcome.syndrome, outcome.reason);
        return Turn::worked;
      default: complete(qp, work.operation); return Turn::worked;
    }
  }

  /// Serves a request of the remote queue pair. @return true if there was one
  MARROW_NIC_CODE bool serve_inbox(QueuePair& qp) {
    Inbox& inbox = qp.slot->inbox;
    if (Access::load_acquire(word(inbox.state)) != Inbox::kRequest) return false;
    if (qp.state != mlx5::kReadyToReceive && qp.state != mlx5::kReadyToSend) return false;
    if (Access::load_relaxed(word(inbox.opcode)) != mlx5::kWriteImmediate) {
      // Messages are for CPU engines (messages.hpp).
      Access::store_relaxed(word(inbox.answered), Access::load_relaxed(word(inbox.number)));
      Access::store_relaxed(word(inbox.syndrome), std::uint32_t{mlx5::kRemoteInvalidRequestError});
      Access::store_release(word(inbox.state), std::uint32_t{Inbox::kFailed});
      return true;
    }
    std::uint16_t posted = qp.rq_consumer;
    if (qp.rq_depth != 0 && qp.record != nullptr) {
      posted =
          static_cast<std::uint16_t>(mlx5::from_big32(Access::load_acquire(&qp.record->receive)));
    }
    const auto available = static_cast<std::uint16_t>(posted - qp.rq_consumer);
    if (available == 0 || available > qp.rq_depth) {
      Access::store_release(word(inbox.state), Inbox::kNotReady);
      return true;
    }
    Completion completion;
    completion.opcode = mlx5::kResponderWriteImmediate;
    completion.qpn = qp.qpn;
    completion.user_index = qp.user_index;
    completion.counter = qp.rq_consumer;
    completion.bytes = Access::load_relaxed(word(inbox.bytes));
    completion.immediate = Access::load_relaxed(word(inbox.immediate));
    completion.solicited = Access::load_relaxed(word(inbox.solicited)) != 0;
    ++qp.rq_consumer;
    const bool posted_one = env_.post(*qp.receive_cq, completion);
    Access::store_release(word(inbox.state), posted_one ? Inbox::kDone : Inbox::kFailed);
    if (!posted_one) env_.set_state(qp, mlx5::kError);
    return true;
  }

  MARROW_NIC_CODE Executor<Env>& executor() { return executor_; }

  /// The successful end of the WQE at the queue's head.
  MARROW_NIC_CODE void complete(QueuePair& qp, const OperationFields& op) {
    const std::uint8_t mode = op.control.fm_ce_se & mlx5::kCompletionMask;
    const std::uint16_t index = qp.consumer;
    retire(qp, mlx5::blocks_of(op.control.ds));
    if (mode != mlx5::kCompletionAlways && mode != mlx5::kCompletionAndEvent) return;
    Completion completion;
    completion.qpn = qp.qpn;
    completion.user_index = qp.user_index;
    completion.counter = index;
    completion.send_opcode = op.control.opcode;
    const bool returns_data = op.control.opcode == mlx5::kRead || op.atomic_bytes != 0;
    completion.bytes = returns_data ? static_cast<std::uint32_t>(op.bytes) : 0;
    if (!env_.post(*qp.send_cq, completion)) {
      env_.overran(qp);
      env_.set_state(qp, mlx5::kError);
    }
  }

  static MARROW_NIC_CODE void retire(QueuePair& qp, std::uint32_t blocks) {
    qp.consumer = static_cast<std::uint16_t>(qp.consumer + blocks);
    qp.stage = QueuePair::Stage::fetch;
  }

  /// What is wrong with a control segment at the queue's head, none if nothing.
  template <class Queue>
  static MARROW_NIC_CODE Reason misplaced(const Queue& qp, const Control& control,
                                          std::uint16_t index) {
    const auto announced = static_cast<std::uint16_t>(qp.producer - index);
    if (control.ds == 0) return Reason::ds_is_zero;
    if (mlx5::blocks_of(control.ds) > announced) return Reason::longer_than_announced;
    if (control.index != index) return Reason::wrong_index;
    if (control.qpn != qp.qpn) return Reason::wrong_queue;
    return Reason::none;
  }

 private:
  static MARROW_NIC_CODE const std::byte* block(const QueuePair& qp, std::uint32_t i) {
    return qp.sq + ((qp.consumer + i) & (qp.depth - 1)) * std::size_t{mlx5::kBlockBytes};
  }

  /// Reads and decodes the next WQE. @return true if it may run now
  MARROW_NIC_CODE bool fetch(QueuePair& qp, Nanoseconds now) {
    Work& work = env_.work(qp);
    const Control control = read_head(qp, work);
    const Reason reason = misplaced(qp, control, qp.consumer);
    if (reason != Reason::none) {
      fail(qp, control, mlx5::kLocalQpOperationError, reason);
      return false;
    }
    const Fate fate = env_.next_wqe();
    if (fate == Fate::stalled) {
      env_.stall(now);
      return false;
    }
    if (!read_rest(qp, work, control)) return false;
    if (fate == Fate::dropped) {
      fail(qp, control, mlx5::kTransportRetryExceeded, Reason::dropped);
      return false;
    }
    if (fate == Fate::failed) {
      fail(qp, control, mlx5::kRemoteOperationError, Reason::failed_on_request);
      return false;
    }
    qp.stage = QueuePair::Stage::run;
    qp.done_bytes = 0;
    qp.rnr_attempts = 0;
    qp.give_up = 0;
    const Nanoseconds delay = env_.delay();
    if (delay != 0) {
      qp.not_before = now + delay;
      return false;
    }
    return true;
  }

  MARROW_NIC_CODE Control read_head(const QueuePair& qp, Work& work) {
    work.qpn = 0;
    Access::read(work.wqe, block(qp, 0), mlx5::kBlockBytes);
    Control control = decode_control(work.wqe);
    if (qp.blue_flame && !is_head(qp, control)) {
      // Not in the ring: a driver that leaves the WQE in the register only. A driver that also wrote
      // the ring is served from there, since a register is filled piece by piece.
      if (take_from_register(qp, qp.doorbell, work) ||
          take_from_register(qp, qp.other_doorbell, work)) {
        control = decode_control(work.wqe);
      }
    }
    work.operation.control = control;
    return control;
  }

  static MARROW_NIC_CODE bool is_head(const QueuePair& qp, const Control& control) {
    return control.index == qp.consumer && control.qpn == qp.qpn && control.ds != 0;
  }

  /// @return true if the register holds the WQE at the queue's head, whole and of one block
  MARROW_NIC_CODE bool take_from_register(const QueuePair& qp, const std::uint64_t* from,
                                          Work& work) {
    alignas(16) std::uint8_t before[mlx5::kBlockBytes];
    const auto* bytes = reinterpret_cast<const std::byte*>(from);
    Access::read(before, bytes, sizeof before);
    const Control control = decode_control(before);
    if (!is_head(qp, control) || mlx5::blocks_of(control.ds) != 1) return false;
    for (int looks = 0; looks < 64; ++looks) {  // until it stands still
      Access::read(work.wqe, bytes, mlx5::kBlockBytes);
      bool same = true;
      for (std::uint32_t i = 0; i < mlx5::kBlockBytes; ++i) same &= before[i] == work.wqe[i];
      if (same) return true;
      for (std::uint32_t i = 0; i < mlx5::kBlockBytes; ++i) before[i] = work.wqe[i];
    }
    return false;
  }

  /// @return false if the WQE is malformed; then it has failed
  MARROW_NIC_CODE bool read_rest(QueuePair& qp, Work& work, const Control& control) {
    for (std::uint32_t i = 1; i < mlx5::blocks_of(control.ds); ++i) {
      const std::uint32_t room = kMaxWqeBytes - i * mlx5::kBlockBytes;
      Access::read(work.wqe + i * std::size_t{mlx5::kBlockBytes}, block(qp, i),
                   room < mlx5::kBlockBytes ? room : mlx5::kBlockBytes);
    }
    const mlx5::Syndrome syndrome = decode(work.wqe, control, work.operation);
    if (syndrome != mlx5::kNoError) {
      fail(qp, control, syndrome, Reason::bad_segments);
      return false;
    }
    work.qpn = qp.qpn;
    work.index = qp.consumer;
    return true;
  }

  /// Has the WQE in execution at hand, also if the room for it served another queue meanwhile.
  MARROW_NIC_CODE bool reload(QueuePair& qp) {
    Work& work = env_.work(qp);
    if (work.qpn == qp.qpn && work.index == qp.consumer) return true;
    const Control control = read_head(qp, work);
    const Reason reason = misplaced(qp, control, qp.consumer);
    if (reason == Reason::none) return read_rest(qp, work, control);
    fail(qp, control, mlx5::kLocalQpOperationError, reason);  // overwritten in mid-flight
    return false;
  }

  MARROW_NIC_CODE Outcome step(QueuePair& qp, const Operation& op, Nanoseconds now,
                               CopyPiece& piece) {
    if (op.control.opcode == mlx5::kWait) return wait_for_completions(op);
    const std::uint8_t opcode = op.control.opcode;
    if (opcode == mlx5::kSend || opcode == mlx5::kSendImmediate) return env_.message(qp, op, now);
    if (opcode != mlx5::kWriteImmediate) return executor_.run(qp, op, now, piece);
    if (qp.stage != QueuePair::Stage::announce) {
      const Outcome outcome = executor_.run(qp, op, now, piece);
      if (outcome.step != Outcome::done) return outcome;
    }
    return ask_responder(qp, op, now);
  }

  // Errors do not count: a counter behind this WAIT then says only what really arrived.
  MARROW_NIC_CODE Outcome wait_for_completions(const Operation& op) {
    const CompletionQueue* found = env_.completion_queue(op.wait_cqn);
    if (found == nullptr) {
      return {Outcome::failed, mlx5::kLocalQpOperationError, Reason::wait_without_queue};
    }
    // Acquire: the engine's thread that serves the other queue released what these completions say.
    const auto last = static_cast<std::uint16_t>(Access::load_acquire(&found->good) - 1);
    return {mlx5::counter_reached(last, op.wait_index) ? Outcome::done : Outcome::parked,
            mlx5::kNoError, Reason::none};
  }

  /// WRITE_IMM after its data: the peer's engine must consume a receive and write its completion.
  MARROW_NIC_CODE Outcome ask_responder(QueuePair& qp, const Operation& op, Nanoseconds now) {
    constexpr Outcome parked{Outcome::parked, mlx5::kNoError, Reason::none};
    QpSlot& slot = env_.peer_slot(qp);
    Inbox& inbox = slot.inbox;
    // An answer counts even if the peer has gone since: it is what an acknowledgement says.
    const bool answered = qp.stage == QueuePair::Stage::announce &&
                          Access::load_acquire(word(inbox.state)) == Inbox::kDone;
    Outcome outcome;
    PeerFacts facts;
    if (!answered && !executor_.peer(qp, now, facts, outcome)) return outcome;
    if (qp.stage != QueuePair::Stage::announce) {
      qp.stage = QueuePair::Stage::announce;
      Access::store_relaxed(word(inbox.opcode), op.control.opcode);
      Access::store_relaxed(word(inbox.immediate), op.control.immediate);
      Access::store_relaxed(word(inbox.bytes), static_cast<std::uint32_t>(op.bytes));
      Access::store_relaxed(word(inbox.source_qpn), qp.qpn);
      Access::store_relaxed(word(inbox.solicited),
                            std::uint32_t{(op.control.fm_ce_se & mlx5::kSolicited) != 0});
      Access::store_release(word(inbox.state), Inbox::kRequest);
      env_.ring(slot);
      return parked;
    }
    switch (Access::load_acquire(word(inbox.state))) {
      case Inbox::kDone: Access::store_relaxed(word(inbox.state), Inbox::kIdle); return {};
      case Inbox::kFailed:
        Access::store_relaxed(word(inbox.state), Inbox::kIdle);
        return {Outcome::failed, mlx5::kRemoteOperationError, Reason::peer_completion};
      case Inbox::kNotReady:
        if (qp.rnr_retry != 7 && qp.rnr_attempts >= qp.rnr_retry) {
          Access::store_relaxed(word(inbox.state), Inbox::kIdle);
          return {Outcome::failed, mlx5::kReceiverNotReadyRetryExceeded, Reason::no_receive};
        }
        ++qp.rnr_attempts;
        qp.not_before = now + kReceiverNotReadyPause;
        [[fallthrough]];
      case Inbox::kIdle:  // the peer was reset and is connected again
        Access::store_release(word(inbox.state), Inbox::kRequest);
        env_.ring(slot);
        return parked;
      default: return parked;
    }
  }

  /// An error always writes an entry and stops the queue pair; what follows is flushed.
  MARROW_NIC_CODE void fail(QueuePair& qp, const Control& control, mlx5::Syndrome syndrome,
                            Reason reason) {
    qp.reason = reason;
    env_.failed(qp, control, syndrome);
    error_entry(qp, control, syndrome);
    qp.not_before = 0;
    env_.set_state(qp, mlx5::kError);
  }

  MARROW_NIC_CODE void flush(QueuePair& qp) {
    alignas(16) std::uint8_t head[mlx5::kSegmentBytes];
    Access::read(head, block(qp, 0), sizeof head);
    error_entry(qp, decode_control(head), mlx5::kFlushError);
  }

  MARROW_NIC_CODE void error_entry(QueuePair& qp, const Control& control, mlx5::Syndrome syndrome) {
    Completion completion;
    completion.opcode = mlx5::kRequesterError;
    completion.qpn = qp.qpn;
    completion.user_index = qp.user_index;
    completion.counter = qp.consumer;
    completion.send_opcode = control.opcode;
    completion.syndrome = syndrome;
    env_.post(*qp.send_cq, completion);
    const auto announced = static_cast<std::uint16_t>(qp.producer - qp.consumer);
    const std::uint32_t blocks = control.ds == 0 ? 1 : mlx5::blocks_of(control.ds);
    retire(qp, blocks < announced ? blocks : announced);
  }

  Env& env_;
  Executor<Env> executor_;
};

}  // namespace marrow::softnic
