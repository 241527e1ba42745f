// SPDX-License-Identifier: Apache-2.0
// Takes the bytes of one WQE apart. Pure: no queue, no memory behind keys; so it is tested and fuzzed
// alone, and runs on any processor (header only: g++ and nvcc). What it accepts is what a ConnectX accepts; anything else is
// the syndrome that a ConnectX reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "marrow/abi/mlx5_wqe.h"

namespace marrow::softnic {

struct Sge {
  std::uint64_t address;  ///< in the key's address space
  std::uint64_t bytes;    ///< 1..2^31
  std::uint32_t lkey;
};

inline constexpr std::uint32_t kMaxSges = mlx5::kMaxSegments - 1;
inline constexpr std::uint32_t kMaxWqeBytes = mlx5::kMaxSegments * mlx5::kSegmentBytes;
/// log2 of the largest message, as QUERY_HCA_CAP and query_port say.
inline constexpr std::uint32_t kLogMaxMessage = 30;

/// Fields of the control segment, before its opcode is looked at.
struct Control {
  std::uint8_t opcode = 0;
  std::uint8_t opmod = 0;
  std::uint8_t fm_ce_se = 0;
  std::uint16_t index = 0;
  std::uint32_t qpn = 0;
  std::uint32_t ds = 0;
  std::uint32_t immediate = 0;  ///< big endian, as posted
};

struct OperationFields {
  Control control;
  std::uint64_t remote_address = 0;
  std::uint32_t rkey = 0;
  bool has_remote = false;
  std::uint32_t sge_count = 0;
  const std::uint8_t* inline_data = nullptr;  ///< into the WQE bytes given to decode
  std::uint64_t bytes = 0;                    ///< payload of all buffers
  std::uint32_t atomic_bytes = 0;             ///< 4 or 8
  std::uint64_t operand = 0;                  ///< add or swap
  std::uint64_t compare = 0;
  std::uint64_t operand_mask = 0;  ///< swap mask, or carry boundary of an add
  std::uint64_t compare_mask = 0;
  std::uint16_t wait_index = 0;
  std::uint32_t wait_cqn = 0;
};

struct Operation : OperationFields {
  Sge sges[kMaxSges];  ///< the first sge_count are set
};
/// Room for WQEs of one block.
struct SmallOperation : OperationFields {
  Sge sges[mlx5::kBlockBytes / mlx5::kSegmentBytes - 1];
};

namespace decoding {

using enum mlx5::AtomicSize;
using enum mlx5::Opcode;
using enum mlx5::Syndrome;
using mlx5::from_big32;
using mlx5::from_big64;
using mlx5::kByteCountMask;
using mlx5::kInlineFlag;
using mlx5::kSegmentBytes;
using mlx5::Syndrome;

MARROW_HOST_DEVICE inline std::uint32_t big32(const std::uint8_t* p) {
  std::uint32_t raw;
  std::memcpy(&raw, p, 4);
  return from_big32(raw);
}
MARROW_HOST_DEVICE inline std::uint64_t big64(const std::uint8_t* p) {
  std::uint64_t raw;
  std::memcpy(&raw, p, 8);
  return from_big64(raw);
}

/// The segments behind the control segment, consumed in order.
class Segments {
 public:
  MARROW_HOST_DEVICE Segments(const std::uint8_t* wqe, std::uint32_t ds)
      : next_(wqe + kSegmentBytes), end_(wqe + ds * kSegmentBytes) {}
  MARROW_HOST_DEVICE std::uint32_t left() const {
    return static_cast<std::uint32_t>(end_ - next_) / kSegmentBytes;
  }
  MARROW_HOST_DEVICE std::uint32_t bytes_left() const {
    return static_cast<std::uint32_t>(end_ - next_);
  }
  MARROW_HOST_DEVICE const std::uint8_t* take(std::uint32_t count = 1) {
    const std::uint8_t* segment = next_;
    next_ += count * kSegmentBytes;
    return segment;
  }
  MARROW_HOST_DEVICE const std::uint8_t* peek() const { return next_; }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

MARROW_HOST_DEVICE inline bool take_remote(Segments& segments, OperationFields& op) {
  if (segments.left() < 1) return false;
  const std::uint8_t* p = segments.take();
  op.remote_address = big64(p);
  op.rkey = big32(p + 8);
  op.has_remote = true;
  return true;
}

template <class Op>
MARROW_HOST_DEVICE void take_sge(Segments& segments, Op& op) {
  const std::uint8_t* p = segments.take();
  const std::uint32_t count = big32(p) & kByteCountMask;
  Sge& sge = op.sges[op.sge_count++];
  sge.bytes = count == 0 ? std::uint64_t{1} << 31 : count;
  sge.lkey = big32(p + 4);
  sge.address = big64(p + 8);
  op.bytes += sge.bytes;
}

/// Either one inline piece or data segments up to the end.
template <class Op>
MARROW_HOST_DEVICE Syndrome take_payload(Segments& segments, Op& op) {
  if (segments.left() > 0 && (big32(segments.peek()) & kInlineFlag) != 0) {
    op.bytes = big32(segments.peek()) & kByteCountMask;
    if (op.bytes + 4 > segments.bytes_left()) return kLocalQpOperationError;
    // What follows the padded payload would be a second list, which we do not take.
    if (segments.bytes_left() - (op.bytes + 4) >= kSegmentBytes) return kLocalQpOperationError;
    op.inline_data = segments.peek() + 4;
    return kNoError;
  }
  while (segments.left() > 0) {
    if ((big32(segments.peek()) & kInlineFlag) != 0) return kLocalQpOperationError;
    take_sge(segments, op);
  }
  return op.bytes > (std::uint64_t{1} << kLogMaxMessage) ? kLocalLengthError : kNoError;
}

template <class Op>
MARROW_HOST_DEVICE Syndrome take_atomic(Segments& segments, Op& op) {
  const bool swap = op.control.opcode == kCompareSwap || op.control.opcode == kMaskedCompareSwap;
  const bool masked =
      op.control.opcode == kMaskedCompareSwap || op.control.opcode == kMaskedFetchAdd;
  if (masked && op.control.opmod != kMasked4 && op.control.opmod != kMasked8) {
    return kLocalQpOperationError;
  }
  op.atomic_bytes = masked && op.control.opmod == kMasked4 ? 4 : 8;
  const std::uint32_t operands = masked && swap && op.atomic_bytes == 8 ? 2 : 1;
  if (segments.left() != 1 + operands + 1) return kLocalQpOperationError;
  take_remote(segments, op);
  const std::uint8_t* p = segments.take(operands);
  op.compare_mask = ~std::uint64_t{0};
  op.operand_mask = swap ? ~std::uint64_t{0} : 0;
  if (!masked) {
    op.operand = big64(p);
    op.compare = big64(p + 8);
  } else if (op.atomic_bytes == 4) {
    op.operand = big32(p);
    if (swap) {
      op.compare = big32(p + 4);
      op.operand_mask = big32(p + 8);
      op.compare_mask = big32(p + 12);
    } else {
      op.operand_mask = big32(p + 4);
    }
  } else {
    op.operand = big64(p);
    if (swap) {
      op.compare = big64(p + 8);
      op.operand_mask = big64(p + 16);
      op.compare_mask = big64(p + 24);
    } else {
      op.operand_mask = big64(p + 8);
    }
  }
  if ((big32(segments.peek()) & kInlineFlag) != 0) return kLocalQpOperationError;
  take_sge(segments, op);
  return op.bytes == op.atomic_bytes ? kNoError : kLocalLengthError;
}

}  // namespace decoding

/// Reads the control segment at `wqe` (16 bytes).
MARROW_HOST_DEVICE inline Control decode_control(const std::uint8_t* wqe) {
  using decoding::big32;
  const std::uint32_t first = big32(wqe);
  const std::uint32_t second = big32(wqe + 4);
  Control control;
  control.opcode = static_cast<std::uint8_t>(first & 0xff);
  control.index = static_cast<std::uint16_t>(first >> 8);
  control.opmod = static_cast<std::uint8_t>(first >> 24);
  control.ds = second & 0x3f;
  control.qpn = second >> 8;
  control.fm_ce_se = wqe[11];
  std::memcpy(&control.immediate, wqe + 12, 4);
  return control;
}

/// Decodes a WQE whose ds segments lie contiguously at `wqe`. control.ds must be 1..63, and no more than
/// op has room for. @return mlx5::kNoError, or the syndrome with `op` partly filled
template <class Op>
MARROW_HOST_DEVICE mlx5::Syndrome decode(const std::uint8_t* wqe, const Control& control, Op& op) {
  using namespace decoding;  // NOLINT: its names stand for this file's
  static_cast<OperationFields&>(op) = {};
  op.control = control;
  Segments segments(wqe, control.ds);
  switch (control.opcode) {
    case kNop: return kNoError;
    case kWrite:
    case kWriteImmediate:
      if (!take_remote(segments, op)) return kLocalQpOperationError;
      return take_payload(segments, op);
    case kSend:
    case kSendImmediate: return take_payload(segments, op);
    case kRead:
      if (!take_remote(segments, op)) return kLocalQpOperationError;
      if (segments.left() > 2) return kLocalQpOperationError;
      if (segments.left() > 0 && (big32(segments.peek()) & kInlineFlag) != 0) {
        return kLocalQpOperationError;
      }
      return take_payload(segments, op);
    case kCompareSwap:
    case kFetchAdd:
    case kMaskedCompareSwap:
    case kMaskedFetchAdd: return take_atomic(segments, op);
    case kWait: {
      if (segments.left() != 1) return kLocalQpOperationError;
      const std::uint8_t* p = segments.take();
      op.wait_index = static_cast<std::uint16_t>(big32(p + 8));
      op.wait_cqn = big32(p + 12) & 0xffffff;
      return kNoError;
    }
    case kDump:
      if (segments.left() != 1 || (big32(segments.peek()) & kInlineFlag) != 0) {
        return kLocalQpOperationError;
      }
      return take_payload(segments, op);
    default: return kLocalQpOperationError;
  }
}

}  // namespace marrow::softnic
