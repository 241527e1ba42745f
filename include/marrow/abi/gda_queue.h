// SPDX-License-Identifier: Apache-2.0
// The gda path's queues as a kernel sees them: one GdaQueue per (context, peer), and behind the
// peers' queues, when there are counters, one companion queue each. The host fills them in once
// (src/gda/connection.cpp); afterwards only kernels write them, except that a NIC writes what `cq`,
// `result` and the sink point at.
// Indices are 64-bit counts of work-queue entries (WQE) and never wrap; the NIC sees their low 16 bits.
// Every WQE takes one block and asks for a completion, so a CQE's index is its WQE's.
#pragma once

#include "marrow/abi/abi.h"
#include "marrow/abi/mlx5_wqe.h"

namespace marrow {

/// Scope of the one release before a doorbell. It follows the reader of work-queue entries, records
/// and payload.
enum class GdaRelease : std::uint8_t {
  device = 1,  ///< all of them are in this GPU's memory
  system =
      2,  ///< some of them are in host memory, or another processor than the NIC's DMA reads them
};

/// Why the scope is what it is.
enum class GdaReleaseReason : std::uint8_t {
  cpu_engine = 1,   ///< a CPU thread (softnic) executes the queues
  host_memory = 2,  ///< queues or windows lie in host memory
  gpu_memory =
      3,  ///< everything is in this GPU's memory: device scope suffices (vendor practice, outside the PTX model)
};

/// Result slots of a queue: this many fetch_add or compare_swap calls may wait at once.
inline constexpr int kGdaResults = 16;
/// A result slot that a live thread waits for. Other values: 0 free, else the index + 1 of an
/// abandoned operation (its wait timed out), reusable once that has completed.
inline constexpr std::uint64_t kGdaResultBusy = ~std::uint64_t{0};

/// One send queue and its completion queue. 512 bytes.
struct alignas(128) GdaQueue {
  // What every post reads: 16 bytes for its entries (detail::gda::Hot), 16 for its doorbell.
  std::byte* sq = nullptr;  ///< ring of 64-byte blocks
  std::uint32_t qpn = 0;    ///< BE32(qpn << 8): or-ed with BE32(ds) it is the WQE's second word
  std::uint16_t mask = 0;   ///< depth - 1; depth is a power of two, 32 .. 32768
  std::uint8_t release = static_cast<std::uint8_t>(GdaRelease::system);
  std::uint8_t collapsed = 0;  ///< 1: the completion queue is one entry that the NIC rewrites
  std::uint64_t* doorbell = nullptr;  ///< the NIC's 8-byte register
  std::uint32_t* record = nullptr;    ///< send word of the doorbell record

  // Constants that waits and atomics read.
  const std::uint32_t* cq = nullptr;  ///< word at byte 60 of completion entry 0
  std::uint64_t* result =
      nullptr;  ///< [kGdaResults] where old values land, as an address of the executor
  std::uint64_t* error = nullptr;  ///< host memory: GdaError of the first failure, for check()
  std::uint64_t sink = 0;  ///< iova of the word that unwanted old values go to; results follow it
  std::uint32_t sink_lkey = 0;  ///< big endian
  std::uint32_t cqn = 0;        ///< BE32, for WAIT on the companion queue
  std::uint8_t release_reason = 0;
  std::uint8_t reserved0[7] = {};
  std::uint64_t reserved1[5] = {};
  /// Shared queues: where the last thread that left the line empty found it to end, in a form that only its
  /// own block can read. Not a constant, but this is the one line of the queue that an SM's L1 keeps.
  std::uint64_t guess = 0;

  // Producer. reserved >= ready >= posted.
  std::uint64_t reserved_index = 0;  ///< next WQE nobody has taken
  std::uint64_t posted_index = 0;    ///< shared queues: the doorbell was rung for all below
  /// A queue of one thread: what reserved_index was after the last put that left its doorbell out. If it
  /// still is, that doorbell is owed.
  std::uint64_t deferred_index = ~std::uint64_t{0};
  std::uint64_t reserved2[5] = {};
  /// Shared queues: all WQEs below are written, in order; kGdaOwed is set when the last of them left its
  /// doorbell to the next in line.
  std::uint64_t ready_index = 0;
  std::uint64_t reserved3[7] = {};

  // Consumer.
  std::uint64_t completed_index =
      0;  ///< all below have completed without error; raised by whoever polls
  std::uint64_t fenced_index = 0;  ///< all below are visible at the peer (flush_remote)
  std::uint64_t failed = 0;        ///< GdaError, 0: none
  std::uint64_t reserved4[13] = {};
  std::uint64_t result_state[kGdaResults] = {};  ///< 0, kGdaResultBusy, or an abandoned operation
};
static_assert(sizeof(GdaQueue) == 512);
static_assert(offsetof(GdaQueue, cq) == 32 && offsetof(GdaQueue, guess) == 120 &&
              offsetof(GdaQueue, reserved_index) == 128 && offsetof(GdaQueue, ready_index) == 192 &&
              offsetof(GdaQueue, completed_index) == 256 &&
              offsetof(GdaQueue, result_state) == 384);

/// In GdaQueue::ready_index.
inline constexpr std::uint64_t kGdaOwed = std::uint64_t{1} << 63;

/// What DeviceCommunicator::gda points at; the queues follow it in memory: queue of (context, peer) at
/// context * nranks + peer, companions `companion` further. 128 bytes.
struct alignas(128) GdaDevice {
  std::uint32_t queues = 0;        ///< in all
  std::uint32_t companion = 0;     ///< offset of a queue's companion in queues; 0: there are none
  std::uint64_t counter_base = 0;  ///< iova of counter 0 (DeviceCommunicator::counter[1])
  std::uint32_t counter_rkey = 0;  ///< big endian
  std::uint32_t reserved0 = 0;
  /// [nranks] a word of each rank in its device (0) and host (1) memory, for flush_remote's READ: what
  /// reaches one memory says nothing of the other. Null when the NIC uses host memory only; then a word of
  /// the peer's sync window serves.
  const std::uint64_t* fence_base[2] = {};
  const std::uint32_t* fence_rkey[2] = {};
  std::uint64_t reserved1[9] = {};
};
static_assert(sizeof(GdaDevice) == 128);

/// A failure in one word, so that recording it needs no order: the first one recorded counts.
namespace gda_error {
inline constexpr std::uint64_t kValid = std::uint64_t{1} << 63;
MARROW_HOST_DEVICE constexpr std::uint64_t pack(std::uint8_t syndrome, std::uint8_t vendor,
                                                std::uint8_t opcode, std::uint16_t wqe_index) {
  return kValid | std::uint64_t{wqe_index} << 32 | std::uint64_t{opcode} << 16 |
         std::uint64_t{vendor} << 8 | syndrome;
}
MARROW_HOST_DEVICE constexpr std::uint8_t syndrome(std::uint64_t e) {
  return static_cast<std::uint8_t>(e);
}
MARROW_HOST_DEVICE constexpr std::uint8_t vendor(std::uint64_t e) {
  return static_cast<std::uint8_t>(e >> 8);
}
MARROW_HOST_DEVICE constexpr std::uint8_t opcode(std::uint64_t e) {
  return static_cast<std::uint8_t>(e >> 16);
}
MARROW_HOST_DEVICE constexpr std::uint16_t wqe_index(std::uint64_t e) {
  return static_cast<std::uint16_t>(e >> 32);
}
/// Whether the operation itself was wrong (bad key, bounds, alignment, malformed WQE): Status::invalid.
/// Otherwise the peer or the way to it failed: Status::peer_failed.
MARROW_HOST_DEVICE constexpr bool is_invalid(std::uint64_t e) {
  switch (syndrome(e)) {
    case mlx5::kLocalLengthError:
    case mlx5::kLocalQpOperationError:
    case mlx5::kLocalProtectionError:
    case mlx5::kMemoryWindowBindError:
    case mlx5::kLocalAccessError:
    case mlx5::kRemoteInvalidRequestError:
    case mlx5::kRemoteAccessError: return true;
    default: return false;
  }
}
}  // namespace gda_error

}  // namespace marrow
