// SPDX-License-Identifier: Apache-2.0
// One operation: every check a ConnectX makes, then the data. All buffers are checked before the first
// byte moves, and again whenever a long transfer is taken up, because keys may have become stale.
// Access says how memory is touched (host_access.hpp).
#pragma once

#include <algorithm>
#include <cstdint>

#include "softnic/directory.hpp"
#include "softnic/faults.hpp"
#include "softnic/queues.hpp"
#include "softnic/regions.hpp"
#include "verbs/ibverbs_abi.h"

namespace marrow::softnic {

/// What became of an attempt to run a WQE.
struct Outcome {
  enum Step : std::uint8_t { done, more, parked, failed };
  Step step = done;
  mlx5::Syndrome syndrome = mlx5::kNoError;
  const char* reason = "";
};

template <class Access>
class Executor {
 public:
  Executor(Directory& directory, Regions& regions, Faults& faults, const Options& options)
      : directory_(directory), regions_(regions), faults_(faults), options_(options) {}

  /// Runs or goes on with qp.operation. At most kTurnBytes are moved in one call.
  Outcome run(QueuePair& qp, Clock::time_point now) {
    switch (qp.operation.control.opcode) {
      case mlx5::kNop: return {};
      case mlx5::kDump: return dump(qp);
      case mlx5::kWrite:
      case mlx5::kWriteImmediate:
      case mlx5::kRead: return transfer(qp, now);
      default: return atomic(qp, now);
    }
  }

  /// The peer's slot if it can take requests of this queue; else null with `outcome` set: parked
  /// while it may still come up, failed once it is gone or the retries are over.
  QpSlot* peer(QueuePair& qp, Clock::time_point now, Outcome& outcome) {
    QpSlot& slot = directory_.qp_slot(qp.remote_qpn);
    if (slot.qpn.load(std::memory_order_acquire) != qp.remote_qpn) {
      outcome = fail(mlx5::kTransportRetryExceeded, "the peer's queue pair does not exist");
      return nullptr;
    }
    const std::uint32_t process = slot.process.load(std::memory_order_relaxed);
    if (!directory_.alive(process)) {
      outcome = fail(mlx5::kTransportRetryExceeded, "the peer's process is gone");
      return nullptr;
    }
    const std::uint32_t state = slot.state.load(std::memory_order_acquire);
    const bool connected = (state == mlx5::kReadyToReceive || state == mlx5::kReadyToSend) &&
                           slot.remote_qpn.load(std::memory_order_relaxed) == qp.qpn &&
                           qp.remote_lid == process + 1;
    if (connected) {
      qp.give_up = {};
      return &slot;
    }
    if (qp.give_up == Clock::time_point{}) qp.give_up = now + retry_time(qp);
    if (now >= qp.give_up) {
      outcome = fail(mlx5::kTransportRetryExceeded, "the peer's queue pair is not connected to us");
    } else {
      outcome = {Outcome::parked, mlx5::kNoError, ""};
    }
    return nullptr;
  }

 private:
  static constexpr std::uint64_t kTurnBytes = std::uint64_t{1} << 20;

  static Outcome fail(mlx5::Syndrome syndrome, const char* reason) {
    return {Outcome::failed, syndrome, reason};
  }

  Clock::duration retry_time(const QueuePair& qp) const {
    if (qp.ack_timeout == 0) return options_.retry;
    const std::chrono::nanoseconds wire((std::uint64_t{4096} << qp.ack_timeout) *
                                        (qp.retry_count + 1));
    return std::min<Clock::duration>(wire, options_.retry);
  }

  /// Pointer to a local buffer, null (outcome set) unless the key allows it.
  std::byte* local_buffer(const QueuePair& qp, const Sge& sge, bool written, Outcome& outcome) {
    const Region* region = regions_.local(sge.lkey);
    if (region == nullptr || region->pd != qp.pd) {
      outcome =
          fail(mlx5::kLocalProtectionError, "no region of this protection domain has the lkey");
      return nullptr;
    }
    if (written && (region->access & verbs::IBV_ACCESS_LOCAL_WRITE) == 0) {
      outcome = fail(mlx5::kLocalProtectionError, "the local region is not writable");
      return nullptr;
    }
    std::byte* at = region->at(sge.address, sge.bytes);
    if (at == nullptr) {
      outcome = fail(mlx5::kLocalProtectionError, "the local buffer lies outside its region");
    }
    return at;
  }

  std::byte* remote_buffer(const QpSlot& slot, const Operation& op, std::uint32_t access,
                           std::uint64_t bytes, Outcome& outcome) {
    if ((slot.access.load(std::memory_order_relaxed) & access) == 0) {
      outcome =
          fail(mlx5::kRemoteInvalidRequestError, "the peer's queue pair forbids this operation");
      return nullptr;
    }
    const Region* region = regions_.remote(op.rkey);
    if (region == nullptr || region->process != slot.process.load(std::memory_order_relaxed) ||
        region->pd != slot.pd.load(std::memory_order_relaxed)) {
      outcome = fail(mlx5::kRemoteAccessError, "the peer has no region with the rkey");
      return nullptr;
    }
    if ((region->access & access) == 0) {
      outcome = fail(mlx5::kRemoteAccessError, "the remote region forbids this operation");
      return nullptr;
    }
    std::byte* at = region->at(op.remote_address, bytes);
    if (at == nullptr) {
      outcome = fail(mlx5::kRemoteAccessError, "the remote buffer lies outside its region");
    }
    return at;
  }

  Outcome dump(QueuePair& qp) {
    Outcome outcome;
    const Operation& op = qp.operation;
    for (std::uint32_t i = 0; i < op.sge_count; ++i) {
      if (local_buffer(qp, op.sges[i], false, outcome) == nullptr) return outcome;
    }
    return {};
  }

  Outcome transfer(QueuePair& qp, Clock::time_point now) {
    const Operation& op = qp.operation;
    const bool read = op.control.opcode == mlx5::kRead;
    Outcome outcome;
    std::byte* local[kMaxSges];
    for (std::uint32_t i = 0; i < op.sge_count; ++i) {
      local[i] = local_buffer(qp, op.sges[i], read, outcome);
      if (local[i] == nullptr) return outcome;
    }
    QpSlot* slot = peer(qp, now, outcome);
    if (slot == nullptr) return outcome;
    if (op.bytes == 0) return {};  // a message without payload checks no rkey
    std::byte* remote = remote_buffer(
        *slot, op, read ? verbs::IBV_ACCESS_REMOTE_READ : verbs::IBV_ACCESS_REMOTE_WRITE, op.bytes,
        outcome);
    if (remote == nullptr) return outcome;
    if (op.inline_data != nullptr) {
      Access::place(remote, op.inline_data, op.bytes);
      qp.done_bytes = op.bytes;
    } else {
      move(qp, local, remote, read);
    }
    if (qp.done_bytes < op.bytes) return {Outcome::more, mlx5::kNoError, ""};
    if (!read && faults_.corrupts_write()) {
      remote[faults_.pick(op.bytes)] ^= static_cast<std::byte>(1u << faults_.pick(8));
    }
    return {};
  }

  /// Goes on where done_bytes stands, buffer by buffer.
  void move(QueuePair& qp, std::byte* const* local, std::byte* remote, bool read) {
    const Operation& op = qp.operation;
    std::uint64_t budget = kTurnBytes;
    std::uint64_t start = 0;  // of the buffer within the message
    for (std::uint32_t i = 0; i < op.sge_count && budget > 0; start += op.sges[i].bytes, ++i) {
      if (qp.done_bytes >= start + op.sges[i].bytes) continue;
      const std::uint64_t inside = qp.done_bytes - start;
      const std::uint64_t bytes = std::min(op.sges[i].bytes - inside, budget);
      std::byte* mine = local[i] + inside;
      std::byte* theirs = remote + qp.done_bytes;
      if (read) {
        Access::copy(mine, theirs, bytes);
      } else {
        Access::copy(theirs, mine, bytes);
      }
      qp.done_bytes += bytes;
      budget -= bytes;
    }
  }

  Outcome atomic(QueuePair& qp, Clock::time_point now) {
    const Operation& op = qp.operation;
    Outcome outcome;
    std::byte* result = local_buffer(qp, op.sges[0], true, outcome);
    if (result == nullptr) return outcome;
    QpSlot* slot = peer(qp, now, outcome);
    if (slot == nullptr) return outcome;
    if (op.remote_address % op.atomic_bytes != 0) {
      return fail(mlx5::kRemoteInvalidRequestError, "the atomic's address is not aligned");
    }
    std::byte* remote =
        remote_buffer(*slot, op, verbs::IBV_ACCESS_REMOTE_ATOMIC, op.atomic_bytes, outcome);
    if (remote == nullptr) return outcome;
    // The key's address space may be shifted by less than a word; then the word itself is not aligned.
    if (reinterpret_cast<std::uintptr_t>(remote) % op.atomic_bytes != 0) {
      return fail(mlx5::kRemoteInvalidRequestError, "the atomic's word is not aligned in memory");
    }
    if (op.atomic_bytes == 8) {
      store_result<std::uint64_t>(result, update<std::uint64_t>(op, remote));
    } else {
      store_result<std::uint32_t>(result, update<std::uint32_t>(op, remote));
    }
    return {};
  }

  template <class Word>
  static void store_result(std::byte* at, Word old) {
    std::uint8_t bytes[sizeof(Word)];
    __builtin_memcpy(bytes, &old, sizeof(Word));
    Access::place(at, bytes, sizeof(Word));
  }

  template <class Word>
  Word update(const Operation& op, std::byte* at) {
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
    if (!options_.hca_atomics) return Access::template update<Word>(at, next);
    SharedLock lock(directory_.shared().atomics);
    return Access::template update_unlocked<Word>(at, next);
  }

  Directory& directory_;
  Regions& regions_;
  Faults& faults_;
  const Options& options_;
};

}  // namespace marrow::softnic
