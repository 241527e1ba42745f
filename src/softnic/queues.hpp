// SPDX-License-Identifier: Apache-2.0
// The queues as an engine sees them: where the rings lie, how far they are done, and what the first
// WQE in line is doing. Plain data, so that it can lie where the engine runs: filled in by the control
// path, then touched by the engine alone (CPU: under the job's mutex; GPU: between commands).
#pragma once

#include <cstdint>

#include "marrow/abi/mlx5_prm.h"
#include "marrow/abi/mlx5_wqe.h"
#include "softnic/decode.hpp"
#include "softnic/reasons.hpp"
#include "softnic/shared_layout.hpp"

/// Marks what runs for each queue: compiled by g++ for the CPU engine, by nvcc for the GPU engine.
#if defined(__CUDACC__)
#define MARROW_NIC_CODE __device__
#else
#define MARROW_NIC_CODE inline
#endif

namespace marrow::softnic {

class GpuEngine;

/// A moment on the engine's clock, or a length of time; 0: none.
using Nanoseconds = std::uint64_t;

/// The WQE that an engine is busy with. Its bytes can be read again while it is not completed, so it need
/// not be kept when an engine turns to another queue.
struct Work {
  std::uint32_t qpn = 0;  ///< 0: holds nothing
  std::uint16_t index = 0;
  Operation operation;
  alignas(16) std::uint8_t wqe[kMaxWqeBytes];
};

struct MessageState;  // messages.hpp
struct Events;        // events.hpp

/// What is known of the queue pair at the other end.
struct alignas(8) PeerFacts {
  enum Answer : std::uint32_t { connected, not_connected, missing, gone };
  Answer answer = missing;
  std::uint32_t process = 0;
  std::uint32_t pd = 0;
  std::uint32_t access = 0;  ///< IBV_ACCESS_REMOTE_*
};

struct CompletionQueue {
  std::uint32_t cqn = 0;
  mlx5::Cqe* ring = nullptr;
  std::uint32_t entries = 0;  ///< power of two
  bool collapsed = false;     ///< every entry goes to slot 0; its counter tells which WQE
  bool overrun_ignored = true;
  const std::uint32_t* record =
      nullptr;                 ///< consumer index, big endian; only without overrun_ignored
  std::uint32_t produced = 0;  ///< entries written since the start index
  std::uint32_t good = 0;      ///< the same, but frozen at the first error: what WAIT sees
  bool failed = false;         ///< an error entry was written
  bool overrun = false;        ///< dead: no entry can be written any more
  std::uint32_t users = 0;     ///< queue pairs attached
  Events* events = nullptr;    ///< CPU engine: who wants to hear of entries; null: nobody
  // GPU engine
  std::uint32_t first_user = 0;  ///< QPN
  std::uint32_t shared = 0;      ///< several queue pairs post here: under `lock`
  std::uint32_t lock = 0;
};

struct QueuePair {
  // identity and rings
  std::uint32_t qpn = 0;
  std::uint32_t pd = 0;
  QpSlot* slot = nullptr;
  mlx5::QpState state = mlx5::kReset;
  CompletionQueue* send_cq = nullptr;
  CompletionQueue* receive_cq = nullptr;
  const std::byte* sq = nullptr;
  std::uint32_t depth = 0;  ///< blocks, power of two; 0 = no send queue
  const std::byte* rq = nullptr;
  std::uint32_t rq_depth = 0;
  std::uint32_t rq_stride = 0;
  const mlx5::DoorbellRecord* record = nullptr;  ///< null without record (send_record_mode 1)
  std::uint64_t* doorbell = nullptr;             ///< this queue's cell of the UAR page
  std::uint64_t* other_doorbell = nullptr;       ///< a second one: BlueFlame's other half
  bool blue_flame = false;                       ///< a cell holds the whole first block of a WQE
  std::uint32_t user_index = 0;
  Work* work = nullptr;             ///< CPU engine: this queue's own
  MessageState* message = nullptr;  ///< CPU engine: this queue's part in messages
  QpSlot* peer_slot = nullptr;      ///< GPU engine
  PeerFacts peer;                   ///< GPU engine: kept by its host thread
  GpuEngine* gpu = nullptr;         ///< null: the CPU engine serves it
  std::uint32_t gpu_index = 0;      ///< GPU engine: its number of this queue pair
  std::uint32_t send_index = 0;     ///< GPU engine: its numbers of the completion queues
  std::uint32_t receive_index = 0;

  // connection
  std::uint32_t remote_qpn = 0;
  std::uint32_t remote_lid = 0;
  std::uint32_t retry_count = 0;
  std::uint32_t rnr_retry = 0;
  std::uint32_t ack_timeout = 0;

  // progress; 16-bit indices wrap
  std::uint16_t start = 0;  ///< first index, 0 on a real NIC
  std::uint16_t producer = 0;
  std::uint16_t consumer = 0;
  std::uint32_t last_record = 0;  ///< raw words seen last: only a change means something
  std::uint64_t last_doorbell = 0;
  std::uint64_t last_other_doorbell = 0;
  std::uint16_t rq_consumer = 0;

  // the WQE in execution
  /// run: the data; responder: a piece of it lies with the peer's engine; announce: WRITE_IMM's completion does
  enum class Stage : std::uint8_t { fetch, run, responder, announce };
  Stage stage = Stage::fetch;
  Reason reason = Reason::none;  ///< of the last failure, for the log
  std::uint32_t rnr_attempts = 0;
  std::uint64_t done_bytes = 0;
  Nanoseconds not_before = 0;  ///< parked until then
  Nanoseconds give_up = 0;     ///< end of transport retries, 0 when the peer answers
};

/// The words of a queue that its poster writes to ask for attention, as they stand in memory.
struct Hints {
  std::uint64_t doorbell = 0;
  std::uint64_t other_doorbell = 0;
  std::uint32_t record = 0;
};
template <class Access>
MARROW_NIC_CODE Hints load_hints(const QueuePair& qp) {
  Hints hints;
  hints.doorbell = qp.doorbell == nullptr ? 0 : Access::load_acquire(qp.doorbell);
  hints.other_doorbell = qp.other_doorbell == nullptr ? 0 : Access::load_acquire(qp.other_doorbell);
  hints.record = qp.record == nullptr ? 0 : Access::load_acquire(&qp.record->send);
  return hints;
}

/// Advances `producer` from the doorbell cell and the record. Both are hints that may be stale, come
/// in any order or twice; both index conventions are taken; only changes count.
/// @param qp  a QueuePair, or what of it is needed here
/// @return false on overrun: more WQEs announced than the ring holds
template <class Queue>
MARROW_NIC_CODE bool update_producer(Queue& qp, const Hints& hints) {
  bool good = true;
  const auto advance = [&](std::uint16_t index) {
    const auto ahead = static_cast<std::uint16_t>(index - qp.consumer);
    const auto known = static_cast<std::uint16_t>(qp.producer - qp.consumer);
    if (ahead > 0x8000u || ahead <= known) return;  // behind, or nothing new
    if (ahead > qp.depth) {
      good = false;
      return;
    }
    qp.producer = index;
  };
  const auto ring = [&](std::uint64_t value, std::uint64_t& last) {
    if (value == last) return;
    last = value;
    const std::uint32_t first = mlx5::from_big32(static_cast<std::uint32_t>(value));
    const std::uint32_t second = mlx5::from_big32(static_cast<std::uint32_t>(value >> 32));
    if (second >> 8 == qp.qpn) {  // a cell may be shared by queues; then records decide
      const std::uint32_t ds = second & 0x3f;
      advance(static_cast<std::uint16_t>((first >> 8) + mlx5::blocks_of(ds)));
    }
  };
  if (qp.doorbell != nullptr) ring(hints.doorbell, qp.last_doorbell);
  if (qp.other_doorbell != nullptr) ring(hints.other_doorbell, qp.last_other_doorbell);
  if (qp.record != nullptr && hints.record != qp.last_record) {
    qp.last_record = hints.record;
    advance(static_cast<std::uint16_t>(mlx5::from_big32(hints.record)));
  }
  return good;
}

/// What goes into one completion entry.
struct Completion {
  mlx5::CompletionOpcode opcode = mlx5::kRequester;
  std::uint32_t qpn = 0;
  std::uint32_t user_index = 0;
  std::uint16_t counter = 0;
  std::uint8_t send_opcode = 0;
  std::uint32_t bytes = 0;
  std::uint32_t immediate = 0;  ///< big endian
  bool solicited = false;
  mlx5::Syndrome syndrome = mlx5::kNoError;
  std::uint8_t vendor = 0;
};

/// Writes one entry; the dword with owner bit and counter goes last and publishes everything the
/// engine did before. @return false if the ring is full and overrun matters
template <class Access>
MARROW_NIC_CODE bool post_completion(CompletionQueue& cq, const Completion& c) {
  if (cq.overrun) return false;
  if (!cq.overrun_ignored && !cq.collapsed && cq.record != nullptr) {
    const std::uint32_t consumed = mlx5::from_big32(Access::load_acquire(cq.record)) & 0xffffff;
    if (((cq.produced - consumed) & 0xffffff) >= cq.entries) {
      cq.overrun = true;
      return false;
    }
  }
  const bool error = c.opcode == mlx5::kRequesterError || c.opcode == mlx5::kResponderError;
  const std::uint32_t owner = cq.collapsed ? 0u : ((cq.produced & cq.entries) != 0 ? 1u : 0u);
  std::uint32_t words[16] = {};
  words[8] = mlx5::to_big32(c.user_index);
  words[9] = c.immediate;
  words[11] = mlx5::to_big32(c.bytes);
  if (error) {
    words[13] = mlx5::to_big32(static_cast<std::uint32_t>(c.vendor) << 8 | c.syndrome);
  }
  words[14] = mlx5::to_big32(static_cast<std::uint32_t>(c.send_opcode) << 24 | c.qpn);
  words[15] = mlx5::to_big32(static_cast<std::uint32_t>(c.counter) << 16 |
                             static_cast<std::uint32_t>(c.opcode) << 4 |
                             (c.solicited ? std::uint32_t{mlx5::kSolicited} : 0u) | owner);
  auto* slot =
      reinterpret_cast<std::uint32_t*>(&cq.ring[cq.collapsed ? 0 : cq.produced & (cq.entries - 1)]);
  Access::store_entry(slot, words);
  ++cq.produced;
  if (error) cq.failed = true;
  // Behind the entry: what WAIT sees on another of the engine's threads is as published as the entry.
  if (!cq.failed) Access::store_relaxed(&cq.good, cq.produced);
  return true;
}

}  // namespace marrow::softnic
