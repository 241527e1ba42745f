// SPDX-License-Identifier: Apache-2.0
// The data path of an mlx5 NIC as bytes: work-queue entries (WQE), completion entries (CQE),
// doorbell and doorbell record. The poster (GPU or CPU kernel), the software NIC and the tests all
// read these, so both sides agree by construction. Everything in memory is big endian; values
// convert with to_big/from_big, which cost one instruction on host and device.
// Source of layouts: the public mlx5 driver interface (rdma-core, Linux) and the ConnectX PRM.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/abi.h"

namespace marrow::mlx5 {

// --- byte order -------------------------------------------------------------------------------

MARROW_HOST_DEVICE constexpr std::uint16_t swap_bytes(std::uint16_t x) {
  return static_cast<std::uint16_t>((x >> 8) | (x << 8));
}
MARROW_HOST_DEVICE constexpr std::uint32_t swap_bytes(std::uint32_t x) {
#if defined(__CUDA_ARCH__)
  // nvcc does not see that the shifts below are one PRMT.
  if (!__builtin_is_constant_evaluated()) return __byte_perm(x, 0, 0x0123);
#endif
  return (x >> 24) | ((x >> 8) & 0xff00u) | ((x << 8) & 0xff0000u) | (x << 24);
}
MARROW_HOST_DEVICE constexpr std::uint64_t swap_bytes(std::uint64_t x) {
  return (static_cast<std::uint64_t>(swap_bytes(static_cast<std::uint32_t>(x))) << 32) |
         swap_bytes(static_cast<std::uint32_t>(x >> 32));
}

/// Host value to the big-endian value stored in memory. Marrow runs on little-endian machines only.
MARROW_HOST_DEVICE constexpr std::uint16_t to_big16(std::uint16_t x) { return swap_bytes(x); }
MARROW_HOST_DEVICE constexpr std::uint32_t to_big32(std::uint32_t x) { return swap_bytes(x); }
MARROW_HOST_DEVICE constexpr std::uint64_t to_big64(std::uint64_t x) { return swap_bytes(x); }
/// The reverse of to_big.
MARROW_HOST_DEVICE constexpr std::uint16_t from_big16(std::uint16_t x) { return swap_bytes(x); }
MARROW_HOST_DEVICE constexpr std::uint32_t from_big32(std::uint32_t x) { return swap_bytes(x); }
MARROW_HOST_DEVICE constexpr std::uint64_t from_big64(std::uint64_t x) { return swap_bytes(x); }

// --- work queue -------------------------------------------------------------------------------

/// A send queue is a power-of-two ring of 64-byte blocks (WQEBB); a WQE takes ceil(ds / 4) of them.
/// All indices count blocks, modulo 2^16; the slot of index i is i & (depth - 1).
inline constexpr std::uint32_t kBlockBytes = 64;
inline constexpr std::uint32_t kBlockShift = 6;
/// Unit of `ds`.
inline constexpr std::uint32_t kSegmentBytes = 16;
inline constexpr std::uint32_t kMaxSegments = 63;
/// Buffers of a receive: log_rq_stride ends at 2048 bytes.
inline constexpr std::uint32_t kMostReceiveSges = 128;
/// Largest queue: 2^15 blocks.
inline constexpr std::uint32_t kMaxLogQueue = 15;

enum Opcode : std::uint8_t {
  kNop = 0x00,
  kWrite = 0x08,
  kWriteImmediate = 0x09,
  kSend = 0x0a,
  kSendImmediate = 0x0b,
  kWait = 0x0f,
  kRead = 0x10,
  kCompareSwap = 0x11,
  kFetchAdd = 0x12,
  kMaskedCompareSwap = 0x14,
  kMaskedFetchAdd = 0x15,
  kDump = 0x23,
};

/// opmod of the masked (extended) atomics.
enum AtomicSize : std::uint8_t { kMasked4 = 0x08, kMasked8 = 0x09 };

/// fm_ce_se: when a completion entry is written.
enum CompletionMode : std::uint8_t {
  kCompletionOnError = 0u << 2,
  kCompletionOnFirstError = 1u << 2,
  kCompletionAlways = 2u << 2,
  kCompletionAndEvent = 3u << 2,
};
inline constexpr std::uint8_t kCompletionMask = 3u << 2;
inline constexpr std::uint8_t kSolicited = 1u << 1;

/// fm_ce_se: fence mode of this WQE against earlier ones of its queue.
enum FenceMode : std::uint8_t {
  kNoFence = 0u << 5,
  kSmallFence = 1u << 5,
  kFence = 2u << 5,  ///< waits for earlier READs and atomics
  kStrongOrdering = 3u << 5,
  kSmallFenceAndFence = 4u << 5,
};

/// First segment of every WQE.
struct ControlSegment {
  std::uint32_t opmod_index_opcode;  ///< BE: opmod << 24 | index(16) << 8 | opcode
  std::uint32_t qpn_ds;              ///< BE: qpn(24) << 8 | ds(6)
  std::uint8_t signature;
  std::uint8_t dci_stream_channel[2];
  std::uint8_t fm_ce_se;    ///< FenceMode | CompletionMode | kSolicited
  std::uint32_t immediate;  ///< BE; WRITE_IMM, SEND_IMM
};

/// Remote address of WRITE, READ and atomics.
struct RemoteSegment {
  std::uint64_t address;  ///< BE; in the rkey's address space (iova), not necessarily a pointer
  std::uint32_t rkey;     ///< BE
  std::uint32_t reserved;
};

/// One local buffer.
struct DataSegment {
  std::uint32_t byte_count;  ///< BE, 31 bits; 0 means 2^31
  std::uint32_t lkey;        ///< BE
  std::uint64_t address;     ///< BE; in the lkey's address space (iova)
};

/// Set in byte_count: the payload follows instead of lkey and address.
inline constexpr std::uint32_t kInlineFlag = 0x80000000u;
inline constexpr std::uint32_t kByteCountMask = 0x7fffffffu;
/// Payload that fits a WRITE of one block: 64 - 16 - 16 - 4.
inline constexpr std::uint32_t kMaxInlineOneBlock = 28;
/// An lkey no region has; ends a receive WQE's list.
inline constexpr std::uint32_t kInvalidLkey = 0x100;

struct InlineSegment {
  std::uint32_t byte_count;  ///< BE, with kInlineFlag
  std::uint8_t payload[12];  ///< continues into the following segments
};

/// FETCH_ADD, COMPARE_SWAP. The old value lands in the DataSegment that follows.
struct AtomicSegment {
  std::uint64_t swap_or_add;  ///< BE
  std::uint64_t compare;      ///< BE
};

/// Masked FETCH_ADD, 4 bytes (opmod kMasked4): a boundary bit stops the carry above it.
struct MaskedFetchAdd4Segment {
  std::uint32_t add;       ///< BE
  std::uint32_t boundary;  ///< BE
  std::uint64_t reserved;
};
/// Masked FETCH_ADD, 8 bytes (opmod kMasked8).
struct MaskedFetchAdd8Segment {
  std::uint64_t add;       ///< BE
  std::uint64_t boundary;  ///< BE
};
/// Masked COMPARE_SWAP, 4 bytes.
struct MaskedCompareSwap4Segment {
  std::uint32_t swap, compare, swap_mask, compare_mask;  ///< BE
};
/// Masked COMPARE_SWAP, 8 bytes: two segments, so ds = 5 and two blocks.
struct MaskedCompareSwap8Segment {
  std::uint64_t swap, compare, swap_mask, compare_mask;  ///< BE
};

/// WAIT: the queue stops until the completion queue's last completed index reaches max_index.
struct WaitSegment {
  std::uint64_t reserved;
  std::uint32_t max_index;  ///< BE; compared modulo 2^16
  std::uint32_t cqn;        ///< BE
};

/// A WQE of one block, as four 16-byte segments.
struct alignas(64) WqeBlock {
  unsigned char segment[4][16];
};

static_assert(sizeof(ControlSegment) == 16 && offsetof(ControlSegment, fm_ce_se) == 11 &&
              offsetof(ControlSegment, immediate) == 12);
static_assert(sizeof(RemoteSegment) == 16 && offsetof(RemoteSegment, rkey) == 8);
static_assert(sizeof(DataSegment) == 16 && offsetof(DataSegment, lkey) == 4 &&
              offsetof(DataSegment, address) == 8);
static_assert(sizeof(InlineSegment) == 16 && offsetof(InlineSegment, payload) == 4);
static_assert(sizeof(AtomicSegment) == 16 && sizeof(MaskedFetchAdd4Segment) == 16 &&
              sizeof(MaskedFetchAdd8Segment) == 16 && sizeof(MaskedCompareSwap4Segment) == 16 &&
              sizeof(MaskedCompareSwap8Segment) == 32);
static_assert(sizeof(WaitSegment) == 16 && offsetof(WaitSegment, max_index) == 8 &&
              offsetof(WaitSegment, cqn) == 12);
static_assert(sizeof(WqeBlock) == 64);

/// First word of the control segment, big endian.
MARROW_HOST_DEVICE constexpr std::uint32_t control_word(std::uint8_t opcode, std::uint16_t index,
                                                        std::uint8_t opmod = 0) {
  return to_big32((static_cast<std::uint32_t>(opmod) << 24) |
                  (static_cast<std::uint32_t>(index) << 8) | opcode);
}
/// Second word of the control segment, big endian.
/// @param ds  segments of 16 bytes, control included, 1..63
MARROW_HOST_DEVICE constexpr std::uint32_t qpn_ds_word(std::uint32_t qpn, std::uint32_t ds) {
  return to_big32((qpn << 8) | ds);
}
/// Blocks that a WQE of `ds` segments takes.
MARROW_HOST_DEVICE constexpr std::uint32_t blocks_of(std::uint32_t ds) { return (ds + 3) >> 2; }

// --- doorbell ---------------------------------------------------------------------------------

/// Two big-endian words in host or GPU memory, 8-byte aligned. Value: index of the next free block
/// (16 bits for send). Written before the doorbell: the NIC may read it at any time after.
struct alignas(8) DoorbellRecord {
  std::uint32_t receive;  ///< BE
  std::uint32_t send;     ///< BE
};
static_assert(sizeof(DoorbellRecord) == 8 && offsetof(DoorbellRecord, send) == 4);

/// Value of the record's send word for a producer index, big endian.
MARROW_HOST_DEVICE constexpr std::uint32_t record_word(std::uint16_t producer) {
  return to_big32(producer);
}
/// Where a queue pair without a record (send_record_mode 1) is rung: in the UAR's page, from its start.
inline constexpr std::uint32_t kNoRecordDoorbell = 0x600;
/// log2 of a BlueFlame register, which has two halves used in turn: the first block of a WQE stored there is
/// doorbell and WQE at once.
inline constexpr std::uint32_t kLogBlueFlameBytes = 9;

/// The 8-byte value stored to the UAR register in the "next index" convention:
/// {BE32(producer << 8), BE32(qpn << 8)} in address order.
/// The NIC also takes the first 8 bytes of the last posted WQE (ds != 0).
/// @param producer  index of the next free block
MARROW_HOST_DEVICE constexpr std::uint64_t doorbell_value(std::uint32_t qpn,
                                                          std::uint16_t producer) {
  return static_cast<std::uint64_t>(to_big32(static_cast<std::uint32_t>(producer) << 8)) |
         (static_cast<std::uint64_t>(to_big32(qpn << 8)) << 32);
}

// --- completion queue -------------------------------------------------------------------------

/// Second word of a completion queue's record, big endian: asks for one event.
inline constexpr std::uint32_t kArmSequenceShift = 28;  ///< 2 bits: a new sequence is a new request
inline constexpr std::uint32_t kArmSolicited = 1u << 24;   ///< solicited and error entries only
inline constexpr std::uint32_t kArmIndexMask = 0xffffffu;  ///< consumer index

enum CompletionOpcode : std::uint8_t {
  kRequester = 0,
  kResponderWriteImmediate = 1,
  kResponderSend = 2,
  kResponderSendImmediate = 3,
  kResponderSendInvalidate = 4,
  kSignatureError = 12,
  kRequesterError = 13,
  kResponderError = 14,
  kInvalidCompletion = 15,
};

enum Syndrome : std::uint8_t {
  kNoError = 0x00,
  kLocalLengthError = 0x01,
  kLocalQpOperationError = 0x02,
  kLocalProtectionError = 0x04,
  kFlushError = 0x05,
  kMemoryWindowBindError = 0x06,
  kBadResponseError = 0x10,
  kLocalAccessError = 0x11,
  kRemoteInvalidRequestError = 0x12,
  kRemoteAccessError = 0x13,
  kRemoteOperationError = 0x14,
  kTransportRetryExceeded = 0x15,
  kReceiverNotReadyRetryExceeded = 0x16,
  kRemoteAborted = 0x22,
};

/// Stable name of a syndrome for messages. Never null.
constexpr const char* syndrome_name(std::uint8_t syndrome) {
  switch (syndrome) {
    case kNoError: return "no error";
    case kLocalLengthError: return "local length error";
    case kLocalQpOperationError: return "local QP operation error";
    case kLocalProtectionError: return "local protection error";
    case kFlushError: return "flushed after an earlier error";
    case kMemoryWindowBindError: return "memory window bind error";
    case kBadResponseError: return "bad response";
    case kLocalAccessError: return "local access error";
    case kRemoteInvalidRequestError: return "remote invalid request";
    case kRemoteAccessError: return "remote access error";
    case kRemoteOperationError: return "remote operation error";
    case kTransportRetryExceeded: return "transport retry exceeded: the peer does not answer";
    case kReceiverNotReadyRetryExceeded: return "receiver not ready: no receive was posted";
    case kRemoteAborted: return "remote aborted";
  }
  return "unknown syndrome";
}

/// Completion entry of 64 bytes. The dword at 60 is written last and holds both validity marks: the
/// owner bit (ring) and wqe_counter (collapsed). Poll it as ONE aligned 32-bit load with acquire.
struct alignas(64) Cqe {
  std::uint8_t reserved0[24];
  std::uint32_t flags_rqpn;  ///< BE
  std::uint8_t reserved28[4];
  std::uint32_t srqn_user_index;  ///< BE
  std::uint32_t immediate;        ///< BE
  std::uint8_t reserved40[4];
  std::uint32_t byte_count;     ///< BE
  std::uint64_t timestamp;      ///< BE; on an error CQE bytes 52..55 are the syndromes
  std::uint32_t opcode_qpn;     ///< BE: send opcode << 24 | qpn
  std::uint32_t counter_owner;  ///< BE: wqe_counter << 16 | signature << 8 | op_own
};
static_assert(sizeof(Cqe) == 64 && offsetof(Cqe, flags_rqpn) == 24 &&
              offsetof(Cqe, srqn_user_index) == 32 && offsetof(Cqe, immediate) == 36 &&
              offsetof(Cqe, byte_count) == 44 && offsetof(Cqe, timestamp) == 48 &&
              offsetof(Cqe, opcode_qpn) == 56 && offsetof(Cqe, counter_owner) == 60);

/// Byte offsets inside an error CQE.
inline constexpr std::size_t kHardwareSyndromeOffset = 52;
inline constexpr std::size_t kVendorSyndromeOffset = 54;
inline constexpr std::size_t kSyndromeOffset = 55;
/// Initial op_own of a ring that nothing was written to: opcode invalid, owner bit set.
inline constexpr std::uint8_t kInitialOwner = 0xf1;
/// Initial dword at 60 in every entry of either kind of queue: no index completed, opcode invalid.
inline constexpr std::uint32_t kInitialCounterOwner = to_big32(0xffff00f1u);

/// The dword at 60, as loaded, taken apart.
MARROW_HOST_DEVICE constexpr std::uint16_t cqe_counter(std::uint32_t dword) {
  return static_cast<std::uint16_t>(from_big32(dword) >> 16);
}
MARROW_HOST_DEVICE constexpr std::uint8_t cqe_opcode(std::uint32_t dword) {
  return static_cast<std::uint8_t>((from_big32(dword) >> 4) & 0xfu);
}
MARROW_HOST_DEVICE constexpr std::uint8_t cqe_owner(std::uint32_t dword) {
  return static_cast<std::uint8_t>(from_big32(dword) & 1u);
}
/// Ring queue: is the entry at consumer index `index` of a ring of `entries` (power of two) valid?
MARROW_HOST_DEVICE constexpr bool cqe_valid(std::uint32_t dword, std::uint64_t index,
                                            std::uint32_t entries) {
  return cqe_opcode(dword) != kInvalidCompletion &&
         cqe_owner(dword) == ((index & entries) != 0 ? 1u : 0u);
}
/// Collapsed queue: has `wanted` (index of a WQE's first block) completed, given the counter of
/// the last completed WQE? Holds while at most 2^15 blocks are outstanding.
MARROW_HOST_DEVICE constexpr bool counter_reached(std::uint16_t counter, std::uint16_t wanted) {
  return static_cast<std::uint16_t>(counter - wanted) < 0x8000u;
}

}  // namespace marrow::mlx5
