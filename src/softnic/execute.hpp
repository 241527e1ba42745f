// SPDX-License-Identifier: Apache-2.0
// One operation: every check a ConnectX makes, then the data. All buffers are checked before the first
// byte moves, and again whenever a long transfer is taken up, because keys may have become stale.
// Env is the engine around it: its memory accesses (Env::Access), keys, peers, faults (queue_machine.hpp).
#pragma once

#include <cstdint>

#include "softnic/queues.hpp"
#include "softnic/region.hpp"
#include "verbs/ibverbs_abi.h"

namespace marrow::softnic {

/// What became of an attempt to run a WQE.
struct Outcome {
  enum Step : std::uint8_t { done, more, copy, parked, failed };
  Step step = done;
  mlx5::Syndrome syndrome = mlx5::kNoError;
  Reason reason = Reason::none;
};

/// Bytes that the engine's driver has to move before the WQE goes on.
struct CopyPiece {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

template <class Env>
class Executor {
 public:
  using Access = typename Env::Access;

  explicit MARROW_NIC_CODE Executor(Env& env) : env_(env) {}

  /// Runs or goes on with `op`, the WQE of `qp` in line. At most kTurnBytes are moved in one call.
  /// @param piece  set when the outcome is `copy`: move it, then call again
  MARROW_NIC_CODE Outcome run(QueuePair& qp, const Operation& op, Nanoseconds now,
                              CopyPiece& piece) {
    switch (op.control.opcode) {
      case mlx5::kNop: return {};
      case mlx5::kDump: return dump(qp, op);
      case mlx5::kWrite:
      case mlx5::kWriteImmediate:
      case mlx5::kRead: return transfer(qp, op, now, piece);
      default: return atomic(qp, op, now);
    }
  }

  /// True if the peer can take requests of this queue; else `outcome` is set: parked while it may still
  /// come up, failed once it is gone or the retries are over.
  MARROW_NIC_CODE bool peer(QueuePair& qp, Nanoseconds now, PeerFacts& facts, Outcome& outcome) {
    facts = env_.peer(qp);
    switch (facts.answer) {
      case PeerFacts::connected: qp.give_up = 0; return true;
      case PeerFacts::missing:
        outcome = fail(mlx5::kTransportRetryExceeded, Reason::peer_missing);
        return false;
      case PeerFacts::gone:
        outcome = fail(mlx5::kTransportRetryExceeded, Reason::peer_gone);
        return false;
      default: break;
    }
    if (qp.give_up == 0) qp.give_up = now + retry_time(qp);
    if (now >= qp.give_up) {
      outcome = fail(mlx5::kTransportRetryExceeded, Reason::peer_not_connected);
    } else {
      outcome = parked();
    }
    return false;
  }

  /// Pointer to a local buffer, null (outcome set) unless the key allows it.
  MARROW_NIC_CODE std::byte* local_buffer(const QueuePair& qp, const Sge& sge, bool written,
                                          Outcome& outcome) {
    const Region* region = env_.local(sge.lkey);
    if (region == nullptr || region->pd != qp.pd) {
      outcome = fail(mlx5::kLocalProtectionError, Reason::bad_lkey);
      return nullptr;
    }
    if (written && (region->access & verbs::IBV_ACCESS_LOCAL_WRITE) == 0) {
      outcome = fail(mlx5::kLocalProtectionError, Reason::local_not_writable);
      return nullptr;
    }
    std::byte* at = region->at(sge.address, sge.bytes);
    if (at == nullptr) outcome = fail(mlx5::kLocalProtectionError, Reason::local_outside);
    return at;
  }

  /// The same for the buffer at the peer. Parked: the engine is still mapping the region.
  MARROW_NIC_CODE std::byte* remote_buffer(const PeerFacts& peer, const OperationFields& op,
                                           std::uint32_t access, std::uint64_t bytes,
                                           Outcome& outcome) {
    if ((peer.access & access) == 0) {
      outcome = fail(mlx5::kRemoteInvalidRequestError, Reason::peer_forbids);
      return nullptr;
    }
    bool later = false;
    const Region* region = env_.remote(op.rkey, later);
    if (region == nullptr && later) {
      outcome = parked();
      return nullptr;
    }
    if (region == nullptr || region->process != peer.process || region->pd != peer.pd) {
      outcome = fail(mlx5::kRemoteAccessError, Reason::bad_rkey);
      return nullptr;
    }
    if ((region->access & access) == 0) {
      outcome = fail(mlx5::kRemoteAccessError, Reason::remote_forbids);
      return nullptr;
    }
    std::byte* at = region->at(op.remote_address, bytes);
    if (at == nullptr) outcome = fail(mlx5::kRemoteAccessError, Reason::remote_outside);
    return at;
  }

  /// The atomic operation itself, on a word that was checked. @return the old value
  MARROW_NIC_CODE std::uint64_t apply(const OperationFields& op, std::byte* at) {
    return op.atomic_bytes == 8 ? update<std::uint64_t>(op, at) : update<std::uint32_t>(op, at);
  }

 private:
  static MARROW_NIC_CODE Outcome fail(mlx5::Syndrome syndrome, Reason reason) {
    return {Outcome::failed, syndrome, reason};
  }
  static MARROW_NIC_CODE Outcome parked() {
    return {Outcome::parked, mlx5::kNoError, Reason::none};
  }

  /// True when only the peer's engine can touch the memory, or is about to answer that it did.
  MARROW_NIC_CODE bool owner_does_it(const QueuePair& qp, const Operation& op) {
    return qp.stage == QueuePair::Stage::responder || (op.bytes != 0 && env_.asks_owner(op.rkey));
  }

  MARROW_NIC_CODE Nanoseconds retry_time(const QueuePair& qp) const {
    const Nanoseconds most = env_.retry_limit();
    if (qp.ack_timeout == 0) return most;
    const Nanoseconds wire = (Nanoseconds{4096} << qp.ack_timeout) * (qp.retry_count + 1);
    return wire < most ? wire : most;
  }

  MARROW_NIC_CODE Outcome dump(QueuePair& qp, const Operation& op) {
    Outcome outcome;
    for (std::uint32_t i = 0; i < op.sge_count; ++i) {
      if (local_buffer(qp, op.sges[i], false, outcome) == nullptr) return outcome;
    }
    return {};
  }

  MARROW_NIC_CODE Outcome transfer(QueuePair& qp, const Operation& op, Nanoseconds now,
                                   CopyPiece& piece) {
    const bool read = op.control.opcode == mlx5::kRead;
    Outcome outcome;
    for (std::uint32_t i = 0; i < op.sge_count; ++i) {
      if (local_buffer(qp, op.sges[i], read, outcome) == nullptr) return outcome;
    }
    if (owner_does_it(qp, op)) return env_.message(qp, op, now);
    PeerFacts facts;
    if (!peer(qp, now, facts, outcome)) return outcome;
    if (op.bytes == 0) return {};  // a message without payload checks no rkey
    std::byte* remote = remote_buffer(
        facts, op, read ? verbs::IBV_ACCESS_REMOTE_READ : verbs::IBV_ACCESS_REMOTE_WRITE, op.bytes,
        outcome);
    if (remote == nullptr) return outcome;
    if (op.inline_data != nullptr) {
      Access::place(remote, op.inline_data, op.bytes);
      qp.done_bytes = op.bytes;
    } else {
      outcome.step = move(qp, op, remote, read, piece);
      if (outcome.step != Outcome::done) return outcome;
    }
    if (!read && env_.corrupts_write()) {
      auto* payload = reinterpret_cast<std::uint8_t*>(remote);
      payload[env_.pick(op.bytes)] ^= static_cast<std::uint8_t>(1u << env_.pick(8));
    }
    return {};
  }

  /// Goes on where done_bytes stands, buffer by buffer.
  MARROW_NIC_CODE Outcome::Step move(QueuePair& qp, const Operation& op, std::byte* remote,
                                     bool read, CopyPiece& piece) {
    std::uint64_t budget = Access::kTurnBytes;
    std::uint64_t start = 0;  // of the buffer within the message
    for (std::uint32_t i = 0; i < op.sge_count; start += op.sges[i].bytes, ++i) {
      if (qp.done_bytes >= start + op.sges[i].bytes) continue;
      if (budget == 0) return Outcome::more;
      const std::uint64_t inside = qp.done_bytes - start;
      const std::uint64_t left = op.sges[i].bytes - inside;
      const std::uint64_t bytes = left < budget ? left : budget;
      Outcome unused;
      std::byte* mine = local_buffer(qp, op.sges[i], read, unused) + inside;
      std::byte* theirs = remote + qp.done_bytes;
      qp.done_bytes += bytes;
      budget -= bytes;
      piece = read ? CopyPiece{mine, theirs, bytes} : CopyPiece{theirs, mine, bytes};
      if (bytes > Access::kAlone) return Outcome::copy;
      Access::copy(piece.to, piece.from, piece.bytes);
      if (qp.done_bytes < start + op.sges[i].bytes) return Outcome::more;
    }
    return Outcome::done;
  }

  MARROW_NIC_CODE Outcome atomic(QueuePair& qp, const Operation& op, Nanoseconds now) {
    Outcome outcome;
    std::byte* result = local_buffer(qp, op.sges[0], true, outcome);
    if (result == nullptr) return outcome;
    if (owner_does_it(qp, op)) return env_.message(qp, op, now);
    PeerFacts facts;
    if (!peer(qp, now, facts, outcome)) return outcome;
    if (op.remote_address % op.atomic_bytes != 0) {
      return fail(mlx5::kRemoteInvalidRequestError, Reason::atomic_address);
    }
    std::byte* remote =
        remote_buffer(facts, op, verbs::IBV_ACCESS_REMOTE_ATOMIC, op.atomic_bytes, outcome);
    if (remote == nullptr) return outcome;
    // The key's address space may be shifted by less than a word; then the word itself is not aligned.
    if (reinterpret_cast<std::uintptr_t>(remote) % op.atomic_bytes != 0) {
      return fail(mlx5::kRemoteInvalidRequestError, Reason::atomic_word);
    }
    if (op.atomic_bytes == 8) {
      store_result<std::uint64_t>(result, update<std::uint64_t>(op, remote));
    } else {
      store_result<std::uint32_t>(result, update<std::uint32_t>(op, remote));
    }
    return {};
  }

  template <class Word>
  static MARROW_NIC_CODE void store_result(std::byte* at, Word old) {
    std::uint8_t bytes[sizeof(Word)];
    memcpy(bytes, &old, sizeof(Word));
    Access::place(at, bytes, sizeof(Word));
  }

  template <class Word>
  MARROW_NIC_CODE Word update(const OperationFields& op, std::byte* at) {
    const auto operand = static_cast<Word>(op.operand);
    const auto mask = static_cast<Word>(op.operand_mask);
    const bool swap =
        op.control.opcode == mlx5::kCompareSwap || op.control.opcode == mlx5::kMaskedCompareSwap;
    const auto next = [&](Word old) -> Word {
      if (!swap) {
        // A boundary bit keeps its own sum and loses its carry.
        return static_cast<Word>(((old & ~mask) + (operand & ~mask)) ^ ((old ^ operand) & mask));
      }
      if (((old ^ static_cast<Word>(op.compare)) & static_cast<Word>(op.compare_mask)) != 0) {
        return old;
      }
      return static_cast<Word>((old & ~mask) | (operand & mask));
    };
    // The two plain forms, which a GPU has an instruction for.
    if (!swap && mask == 0) return env_.template fetch_add<Word>(at, operand);
    if (swap && mask == static_cast<Word>(~Word{0}) &&
        static_cast<Word>(op.compare_mask) == static_cast<Word>(~Word{0})) {
      return env_.template compare_swap<Word>(at, static_cast<Word>(op.compare), operand);
    }
    return env_.template update<Word>(at, next);
  }

  Env& env_;
};

}  // namespace marrow::softnic
