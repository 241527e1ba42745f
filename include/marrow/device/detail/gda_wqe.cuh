// SPDX-License-Identifier: Apache-2.0
// Work-queue entries in registers: each is built as 16-byte segments and stored as such, so that a
// post costs three or four wide stores. Keys arrive big endian; what is left to swap is one
// instruction a word. Layouts: abi/mlx5_wqe.h.
#pragma once

#include "marrow/abi/gda_queue.h"
#include "marrow/device/detail/operation.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail::gda {

/// Bytes one WQE moves: 31 bits of length exist, drivers chop at 2^30.
inline constexpr std::uint32_t kChunkShift = 30;
inline constexpr std::uint64_t kChunkBytes = std::uint64_t{1} << kChunkShift;

MARROW_DEVICE std::uint32_t high_big(std::uint64_t v) {
  return mlx5::to_big32(static_cast<std::uint32_t>(v >> 32));
}
MARROW_DEVICE std::uint32_t low_big(std::uint64_t v) {
  return mlx5::to_big32(static_cast<std::uint32_t>(v));
}

/// mlx5::record_word of the index's low 16 bits, and the low word of the doorbell that announces it; each is one
/// instruction on a GPU.
MARROW_DEVICE std::uint32_t record_word(std::uint32_t index) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(index, 0, 0x0144);
#else
  return mlx5::record_word(static_cast<std::uint16_t>(index));
#endif
}
MARROW_DEVICE std::uint32_t bell_word(std::uint32_t index) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(index, 0, 0x4014);
#else
  return mlx5::record_word(static_cast<std::uint16_t>(index)) >> 8;
#endif
}

/// The constants of a queue that its entries need, read with one load.
struct Hot {
  explicit MARROW_DEVICE Hot(const GdaQueue& q)
      : Hot(load_constant(reinterpret_cast<const Cell16*>(&q))) {}
  explicit MARROW_DEVICE Hot(const Cell16& words)
      : sq(reinterpret_cast<std::byte*>(words.low)),
        qpn(static_cast<std::uint32_t>(words.high)),
        rest(static_cast<std::uint32_t>(words.high >> 32)) {}
  MARROW_DEVICE std::uint32_t mask() const { return rest & 0xffff; }
  /// 0: a release of device scope will do; 1: system scope.
  MARROW_DEVICE std::uint32_t wide() const {
    return (rest >> 16 & 0xff) - static_cast<std::uint32_t>(GdaRelease::device);
  }

  std::byte* sq;
  std::uint32_t qpn;
  std::uint32_t rest;  ///< mask, release, collapsed
};
/// ... and those of its doorbell.
struct Bell {
  explicit MARROW_DEVICE Bell(const GdaQueue& q)
      : Bell(load_constant(reinterpret_cast<const Cell16*>(&q) + 1)) {}
  explicit MARROW_DEVICE Bell(const Cell16& words)
      : doorbell(reinterpret_cast<std::uint64_t*>(words.low)),
        record(reinterpret_cast<std::uint32_t*>(words.high)) {}
  std::uint64_t* doorbell;
  std::uint32_t* record;
};
static_assert(offsetof(GdaQueue, sq) == 0 && offsetof(GdaQueue, qpn) == 8 &&
              offsetof(GdaQueue, mask) == 12 && offsetof(GdaQueue, release) == 14 &&
              offsetof(GdaQueue, doorbell) == 16 && offsetof(GdaQueue, record) == 24);

/// The block of WQE `index`, being written. kIf: unless `sign` is negative, without a branch.
template <bool kIf>
class WqeWriter {
 public:
  MARROW_DEVICE WqeWriter(const Hot& q, std::uint64_t index, std::int32_t sign = 0)
      : block_(q.sq + ((static_cast<std::uint32_t>(index) & q.mask()) << mlx5::kBlockShift)),
        qpn_(q.qpn),
        index_(static_cast<std::uint16_t>(index)),
        sign_(sign) {}
  /// For `write` alone. @param qpn_ds  second word of the entry
  MARROW_DEVICE WqeWriter(std::byte* block, std::uint32_t qpn_ds)
      : block_(block), qpn_(qpn_ds), index_(0), sign_(0) {}

  MARROW_DEVICE void nop() const { control(mlx5::kNop, 1); }

  /// @param opcode  kWrite or kRead
  MARROW_DEVICE void transfer(std::uint8_t opcode, std::uint64_t remote, std::uint32_t rkey,
                              std::uint64_t local, std::uint32_t lkey, std::uint32_t bytes) const {
    // The control segment last: its words are made from what the doorbell needs too.
    address(remote, rkey);
    data(2, local, lkey, bytes);
    control(opcode, 3);
  }

  /// A WRITE whose first words are known.
  MARROW_DEVICE void write(std::uint32_t control, std::uint64_t remote, std::uint32_t rkey,
                           std::uint64_t local, std::uint32_t lkey, std::uint32_t bytes) const {
    segment(0, {{control, qpn_, std::uint32_t{mlx5::kCompletionAlways} << 24, 0}});
    data(2, local, lkey, bytes);
    address(remote, rkey);
  }

  /// A WRITE whose payload, 1 to 28 bytes in seven words, is part of the entry.
  MARROW_DEVICE void write_inline(std::uint64_t remote, std::uint32_t rkey,
                                  const std::uint32_t (&payload)[7], std::uint32_t bytes) const {
    control(mlx5::kWrite, bytes <= 12 ? 3 : 4);
    address(remote, rkey);
    segment(2, {{mlx5::to_big32(bytes | mlx5::kInlineFlag), payload[0], payload[1], payload[2]}});
    if (bytes > 12) segment(3, {{payload[3], payload[4], payload[5], payload[6]}});
  }

  /// The old value lands at `local`.
  MARROW_DEVICE void fetch_add(std::uint64_t remote, std::uint32_t rkey, std::uint64_t n,
                               std::uint64_t local, std::uint32_t lkey) const {
    control(mlx5::kFetchAdd, 4);
    address(remote, rkey);
    segment(2, {{high_big(n), low_big(n), 0, 0}});
    data(3, local, lkey, 8);
  }

  MARROW_DEVICE void compare_swap(std::uint64_t remote, std::uint32_t rkey, std::uint64_t desired,
                                  std::uint64_t expected, std::uint64_t local,
                                  std::uint32_t lkey) const {
    control(mlx5::kCompareSwap, 4);
    address(remote, rkey);
    segment(2, {{high_big(desired), low_big(desired), high_big(expected), low_big(expected)}});
    data(3, local, lkey, 8);
  }

  /// Stops this queue until completion queue `cqn` (big endian) has completed WQE `last`.
  MARROW_DEVICE void wait(std::uint32_t cqn, std::uint64_t last) const {
    control(mlx5::kWait, 2);
    segment(1, {{0, 0, mlx5::to_big32(static_cast<std::uint16_t>(last)), cqn}});
  }

 private:
  MARROW_DEVICE void segment(int i, const Words16& s) const {
    if constexpr (kIf) {
      store_wide_if(sign_, block_ + i * 16, s);
    } else {
      store_wide(block_ + i * 16, s);
    }
  }
  MARROW_DEVICE void control(std::uint8_t opcode, std::uint32_t ds) const {
    segment(0, {{mlx5::control_word(opcode, index_), qpn_ | ds << 24,
                 std::uint32_t{mlx5::kCompletionAlways} << 24, 0}});
  }
  MARROW_DEVICE void address(std::uint64_t remote, std::uint32_t rkey) const {
    segment(1, {{high_big(remote), low_big(remote), rkey, 0}});
  }
  MARROW_DEVICE void data(int i, std::uint64_t local, std::uint32_t lkey,
                          std::uint32_t bytes) const {
    segment(i, {{mlx5::to_big32(bytes), lkey, high_big(local), low_big(local)}});
  }

  std::byte* block_;
  std::uint32_t qpn_;
  std::uint16_t index_;
  std::int32_t sign_;
};
using Wqe = WqeWriter<false>;

}  // namespace detail::gda
}  // namespace cpu_device / gpu_device
}  // namespace marrow
