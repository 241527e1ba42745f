// SPDX-License-Identifier: Apache-2.0
// The consumer half of a gda queue: who has completed, what failed. Any thread that needs to know
// polls; whoever sees progress raises completed_index for all. Completions of one RC queue come in
// order, so WQE i is done when its own entry (ring) or a later counter (collapsed) says so.
#pragma once

#include "marrow/device/detail/gda_wqe.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail::gda {

template <Sharing kSharing>
struct Consumer {
  static constexpr bool kExclusive = kSharing == Sharing::thread;
  /// Who shares the queue's indices.
  static constexpr Scope kScope = kSharing == Sharing::block ? Scope::block_global : Scope::device;

  /// For "may this slot be written again". Relaxed on a GPU: the write depends on the value, and an
  /// acquire would drop the L1 lines that the post needs next. On the CPU it meets publish_max in
  /// raise(): the NIC's read of the slot happens before our write.
  static MARROW_DEVICE std::uint64_t completed(const GdaQueue& q) {
    if constexpr (kExclusive) {
      return q.completed_index;
    } else if constexpr (kOnGpu) {
      return load_relaxed<kScope>(&q.completed_index);
    } else {
      return observe<kScope>(&q.completed_index);
    }
  }

  /// Whether all WQEs below `wanted` (which were posted, or are about to be) have completed; their data is
  /// then readable. timeout: not yet. Not inlined: it stands in every wait.
  static MARROW_DEVICE_COLD Status poll(GdaQueue& q, std::uint64_t wanted) {
    return poll_here(q, wanted);
  }
  static MARROW_DEVICE Status poll_here(GdaQueue& q, std::uint64_t wanted) {
    return poll_at(Ring(q), q, wanted);
  }
  /// The completion queue's constants. A wait reads them once: each look is an acquire, which empties the SM's L1,
  /// so that on a GPU each of them would be a trip to L2 every time.
  struct Ring {
    explicit MARROW_DEVICE Ring(const GdaQueue& q)
        : cq(q.cq), mask(q.mask), collapsed(q.collapsed) {}
    const std::uint32_t* cq;
    std::uint32_t mask;
    bool collapsed;
  };
  static MARROW_DEVICE Status poll_at(const Ring& ring, GdaQueue& q, std::uint64_t wanted) {
    return ring.collapsed ? poll_collapsed(ring, q, wanted) : poll_ring(ring, q, wanted);
  }

  static MARROW_DEVICE Status test(GdaQueue& q, std::uint64_t wanted) {
    // Acquire: meets publish_max in raise(), so that what another thread saw completed is readable here.
    const std::uint64_t done = kExclusive ? q.completed_index : observe<kScope>(&q.completed_index);
    return done >= wanted ? Status::ok : poll(q, wanted);
  }
  static MARROW_DEVICE Status test_at(const Ring& ring, GdaQueue& q, std::uint64_t wanted) {
    const std::uint64_t done = kExclusive ? q.completed_index : observe<kScope>(&q.completed_index);
    return done >= wanted ? Status::ok : poll_at(ring, q, wanted);
  }

 private:
  /// The word with owner bit and counter of entry `slot`. The acquire meets the NIC's write of that
  /// word, its last of the operation (softnic: a release store): get data, old values and the WQE's
  /// slot are ours afterwards.
  static MARROW_DEVICE std::uint32_t entry(const std::uint32_t* cq, std::uint32_t slot) {
#if defined(MARROW_PLANT_CQ_POLL)
    return load_relaxed<Scope::system>(cq + slot * 16);  // planted bug: the acquire is missing
#else
    return observe<Scope::system>(cq + slot * 16);
#endif
  }

  static MARROW_DEVICE bool is_error(std::uint32_t entry) {
    return mlx5::cqe_opcode(entry) == mlx5::kRequesterError ||
           mlx5::cqe_opcode(entry) == mlx5::kResponderError;
  }

  static MARROW_DEVICE void raise(GdaQueue& q, std::uint64_t done) {
    if constexpr (kExclusive) {
      if (done > q.completed_index) q.completed_index = done;
    } else {
      publish_max<kScope>(&q.completed_index, done);
    }
  }

  static MARROW_DEVICE Status poll_ring(const Ring& ring, GdaQueue& q, std::uint64_t wanted) {
    const std::uint64_t last = wanted - 1;
    const std::uint32_t word = entry(ring.cq, static_cast<std::uint32_t>(last) & ring.mask);
    if (!mlx5::cqe_valid(word, last, ring.mask + 1u)) return Status::timeout;
    if (is_error(word)) return fail_ring(q, wanted);
    raise(q, wanted);
    return Status::ok;
  }

  /// The counter has 16 bits; the distance from completed_index is at most the depth, provided that
  /// index did not move while we read the counter.
  static MARROW_DEVICE Status poll_collapsed(const Ring& ring, GdaQueue& q, std::uint64_t wanted) {
    const std::uint64_t before =
        kExclusive ? q.completed_index : observe<kScope>(&q.completed_index);
    const std::uint32_t word = entry(ring.cq, 0);
    if (mlx5::cqe_opcode(word) == mlx5::kInvalidCompletion) return Status::timeout;
    if (is_error(word)) return record(q, word, q.cq);
    if (!kExclusive && load_relaxed<kScope>(&q.completed_index) != before) return Status::timeout;
    const std::uint16_t ahead = static_cast<std::uint16_t>(mlx5::cqe_counter(word) + 1 -
                                                           static_cast<std::uint16_t>(before));
    if (ahead > ring.mask + 1u) return Status::timeout;
    raise(q, before + ahead);
    return before + ahead >= wanted ? Status::ok : Status::timeout;
  }

  /// WQE `wanted - 1` ended in error, or was flushed because an earlier one did: find the first. None of
  /// the entries from completed_index on can have been overwritten: the ring stops at a failure.
  static MARROW_DEVICE Status fail_ring(GdaQueue& q, std::uint64_t wanted) {
    for (std::uint64_t i = completed(q); i < wanted; ++i) {
      const std::uint32_t slot = static_cast<std::uint32_t>(i) & q.mask;
      const std::uint32_t word = entry(q.cq, slot);
      if (mlx5::cqe_valid(word, i, q.mask + 1u) && is_error(word))
        return record(q, word, q.cq + slot * 16);
    }
    return Status::timeout;  // the queue moved on meanwhile: look again
  }

  /// Keeps the first failure: for later calls in the queue, for the host in its own memory.
  static MARROW_DEVICE Status record(GdaQueue& q, std::uint32_t word, const std::uint32_t* at) {
    const std::uint32_t syndromes = mlx5::from_big32(load_relaxed<Scope::system>(at - 2));
    const std::uint32_t opcode = mlx5::from_big32(load_relaxed<Scope::system>(at - 1)) >> 24;
    const std::uint64_t seen = gda_error::pack(
        static_cast<std::uint8_t>(syndromes), static_cast<std::uint8_t>(syndromes >> 8),
        static_cast<std::uint8_t>(opcode), mlx5::cqe_counter(word));
    const std::uint64_t old =
        compare_swap_relaxed<Scope::device>(&q.failed, std::uint64_t{0}, seen);
    if (old == 0) store_relaxed<Scope::system>(q.error, seen);
    return gda_error::is_invalid(old ? old : seen) ? Status::invalid : Status::peer_failed;
  }
};

}  // namespace detail::gda
}  // namespace cpu_device / gpu_device
}  // namespace marrow
