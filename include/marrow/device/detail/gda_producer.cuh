// SPDX-License-Identifier: Apache-2.0
// The producer half of a gda queue: reserve entries, let the caller write them, publish them with one
// release and one doorbell.
//
// A queue of one thread at a time uses no atomics. A shared one:
//   reserve   lanes that are here together for the same queue take one range with one compare-and-swap,
//             which succeeds only if the ring has room: a wait for room holds nothing, so it may time out
//   write     each lane its own entries
//   publish   in the order of the ranges: whoever sees ready_index at its own start rings the doorbell,
//             or leaves it to the next in line (owed_index) if one has reserved already, and moves
//             ready_index on. Between reserve and publish is straight-line code only.
// The scope of the release before a doorbell is the queue's (GdaRelease): it follows the reader.
#pragma once

#include "marrow/device/detail/gda_completion.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail::gda {

/// What a post needs to know beside its entries.
struct PostKnobs {
  Deadline deadline;
  bool now = true;
};

template <Sharing kSharing>
struct Producer : Consumer<kSharing> {
  using Base = Consumer<kSharing>;
  using Base::kExclusive;
  using Base::kScope;

  /// Posts n entries: build(q, first index) writes them.
  /// @param n      1 .. depth / 2
  /// @param first  if not null: the index of the first entry
  /// @return not ok: nothing was posted
  template <class Build>
  static MARROW_DEVICE Status post(WaitWords comm, int peer, GdaQueue& q, std::uint32_t n,
                                   const PostKnobs& knobs, Build&& build,
                                   std::uint64_t* first = nullptr) {
    if constexpr (kExclusive) {
      std::uint64_t at = 0;
      const Status status = reserve(comm, peer, q, n, knobs.deadline, &at);
      if (status != Status::ok) return status;
      if (first) *first = at;
      build(q, at);
      publish(comm, q, at, at + n, knobs.now);
      return Status::ok;
    } else {
      return post_together(comm, peer, q, n, knobs, build, first);
    }
  }

  /// Takes n entries for the calling thread alone; publish() must follow, with nothing but the writing
  /// of the entries in between.
  /// @param watch  a queue whose failure ends the wait, or null
  static MARROW_DEVICE Status reserve(WaitWords comm, int peer, GdaQueue& q, std::uint32_t n,
                                      Deadline deadline, std::uint64_t* first,
                                      GdaQueue* watch = nullptr) {
    if constexpr (kExclusive) {
      const std::uint64_t at = q.reserved_index;
      if (!has_room(q, at + n)) {
        const std::int64_t got = room(comm, peer, q, n, deadline, watch);
        if (got < 0) return static_cast<Status>(-got);
      }
      *first = at;
      q.reserved_index = at + n;
      return Status::ok;
    } else {
      std::uint64_t at = load_relaxed<kScope>(&q.reserved_index);
      while (has_room(q, at + n)) {
        const std::uint64_t old = compare_swap_relaxed<kScope>(&q.reserved_index, at, at + n);
        if (old == at) {
          *first = at;
          return Status::ok;
        }
        at = old;  // somebody else took it, so the loop as a whole advances
      }
      const std::int64_t got = room(comm, peer, q, n, deadline, watch);
      if (got < 0) return static_cast<Status>(-got);
      *first = static_cast<std::uint64_t>(got);
      return Status::ok;
    }
  }

  /// Makes entries [begin, end), which are written, known to the NIC.
  static MARROW_DEVICE void publish(WaitWords comm, GdaQueue& q, std::uint64_t begin,
                                    std::uint64_t end, bool now) {
    if constexpr (kExclusive) {
      (void)comm;
      if (now || end - q.posted_index >= many(q)) {
        ring(q, end);
        q.posted_index = end;
      }
    } else {
      publish_shared(2 * comm.wait_ns, q, begin, end, now);
    }
  }

  /// Everything posted so far is below this index.
  static MARROW_DEVICE std::uint64_t end(const GdaQueue& q) {
    return kExclusive ? q.reserved_index : observe<kScope>(&q.ready_index);
  }

  /// Rings for deferred entries below `end`. In a shared queue nobody may ring outside of his turn, so a
  /// NOP takes one; if there is no room for it, whatever makes room completes first and test tries again.
  static MARROW_DEVICE void ring_deferred(WaitWords comm, GdaQueue& q, std::uint64_t end) {
    if constexpr (kExclusive) {
      if (q.posted_index < end) {
        ring(q, q.reserved_index);
        q.posted_index = q.reserved_index;
      }
    } else {
      if (load_relaxed<kScope>(&q.posted_index) >= end) return;
      std::uint64_t at = load_relaxed<kScope>(&q.reserved_index);
      while (has_room(q, at + 1)) {
        const std::uint64_t old = compare_swap_relaxed<kScope>(&q.reserved_index, at, at + 1);
        if (old == at) {
          Wqe(q, at).nop();
          publish(comm, q, at, at + 1, true);
          return;
        }
        at = old;
      }
      (void)Base::poll(q, at + 1 - (q.mask + 1));  // raises completed_index once there is room
    }
  }

 private:
  /// A ring half full of deferred entries would leave no room for the one that rings.
  static MARROW_DEVICE std::uint64_t many(const GdaQueue& q) { return (q.mask + 1) >> 1; }

  /// Not inlined: with three sharing modes it would be most of a kernel's code.
  static MARROW_DEVICE_COLD void publish_shared(std::uint64_t turn_ns, GdaQueue& q,
                                                std::uint64_t begin, std::uint64_t end, bool now) {
    if (!wait_for_turn(turn_ns, q, begin)) return;
    const std::uint64_t posted = load_relaxed<kScope>(&q.posted_index);
    const bool full = end - posted >= many(q);
    if (now || full || q.owed_index > posted) {
      if (!full && load_relaxed<kScope>(&q.reserved_index) != end) {
        q.owed_index = end;  // the next in line rings for us
      } else {
        ring(q, end);
        store_relaxed<kScope>(&q.posted_index, end);
      }
    }
    // Publishes our entries, and our stores to record and doorbell, to the next in line: it acquires
    // ready_index before its own release, which so covers them.
    marrow::publish<kScope>(Store{&q.ready_index, end});
  }

  static MARROW_DEVICE bool has_room(const GdaQueue& q, std::uint64_t end) {
    return static_cast<std::int64_t>(Base::completed(q) + q.mask + 1 - end) >= 0;
  }

  /// Waits until n entries fit; a shared queue's are then reserved.
  /// @return the first index, or minus the Status
  static MARROW_DEVICE std::int64_t room(WaitWords comm, int peer, GdaQueue& q, std::uint32_t n,
                                         Deadline deadline, GdaQueue* watch) {
    if (deadline.ns) comm.wait_ns = deadline.ns;
    return watch ? wait_for_room_watching(comm, peer, q, n, *watch)
                 : wait_for_room(comm, peer, q, n);
  }
  // Few arguments and one result, all in registers: a kernel needs no stack for a call it hardly ever makes.
  static MARROW_DEVICE_COLD std::int64_t wait_for_room(WaitWords comm, int peer, GdaQueue& q,
                                                       std::uint32_t n) {
    return wait_for_room_or(comm, peer, q, n, [] { return Status::timeout; });
  }
  static MARROW_DEVICE_COLD std::int64_t wait_for_room_watching(WaitWords comm, int peer,
                                                                GdaQueue& q, std::uint32_t n,
                                                                GdaQueue& watch) {
    return wait_for_room_or(comm, peer, q, n,
                            [&] { return Base::poll(watch, Base::completed(watch) + 1); });
  }
  /// @param failure  > Status::timeout ends the wait with it
  template <class Failure>
  static MARROW_DEVICE std::int64_t wait_for_room_or(WaitWords comm, int peer, GdaQueue& q,
                                                     std::uint32_t n, Failure&& failure) {
    Status seen = Status::ok;
    std::uint64_t at = 0;
    const Status waited = wait_until(
        comm, Deadline{},
        [&] {
          seen = failure();
          if (seen > Status::timeout) return true;
          at = kExclusive ? q.reserved_index : load_relaxed<kScope>(&q.reserved_index);
          if (!has_room(q, at + n)) {
            seen = Base::poll(q, at + n - (q.mask + 1));
            if (seen == Status::timeout) return false;
            if (seen != Status::ok) return true;
          }
          seen = Status::ok;
          return kExclusive || compare_swap_relaxed<kScope>(&q.reserved_index, at, at + n) == at;
        },
        peer);
    const Status status = waited == Status::ok ? seen : waited;
    return status == Status::ok ? static_cast<std::int64_t>(at)
                                : -static_cast<std::int64_t>(status);
  }

  /// Waits for those who reserved before us. They run straight-line code (the counted form waits for
  /// room in between, bounded by its own deadline), so only a thread that died can end this in false.
  static MARROW_DEVICE bool wait_for_turn(std::uint64_t limit, const GdaQueue& q,
                                          std::uint64_t begin) {
    std::uint64_t start = 0;
    // Meets publish(ready_index) of the one before us.
    for (std::uint32_t spins = 0; observe<kScope>(&q.ready_index) != begin; ++spins) {
      relax(spins);
      // Not wait_until: an abort must not leave a hole in the queue.
      if ((spins & 1023) != 1023) continue;
      if (start == 0) start = now_ns();
      if (now_ns() - start > limit) return false;
    }
    return true;
  }

  /// One release for all entries below `end`, then record, then doorbell. It meets the NIC's read of the
  /// record or the doorbell (softnic: acquire loads). Those two stores are relaxed on a GPU.
  static MARROW_DEVICE void ring(const GdaQueue& q, std::uint64_t end) {
    // Pointers first: behind the release they would be loads that the doorbell waits for.
    std::uint32_t* const record = q.record;
    std::uint64_t* const doorbell = q.doorbell;
    const std::uint32_t index = mlx5::record_word(static_cast<std::uint16_t>(end));
    const std::uint64_t bell =
        std::uint64_t{q.qpn} << 32 | mlx5::to_big32(static_cast<std::uint32_t>(end & 0xffff) << 8);
    if (q.release == static_cast<std::uint8_t>(GdaRelease::device)) {
      Publication<Scope::device> out;
      out.store(record, index);
      out.template store<Scope::system>(doorbell, bell);
    } else {
      Publication<Scope::system> out;
      out.store(record, index);
      out.store(doorbell, bell);
    }
  }

  template <class Build>
  static MARROW_DEVICE Status post_together(WaitWords comm, int peer, GdaQueue& q, std::uint32_t n,
                                            const PostKnobs& knobs, Build&& build,
                                            std::uint64_t* first) {
    // Lanes that came here together and want the same queue and count.
    const std::uint32_t self = 1u << lane_index();
    std::uint32_t group = converged_lanes();
    if (group != self) {
      const auto queue = reinterpret_cast<std::uintptr_t>(&q);
      group = warp_match(group, static_cast<std::uint64_t>(queue) << 16 |
                                    n);  // n <= 16384; addresses have 48 bits
    }
    if (static_cast<std::uint32_t>(count_lanes(group)) * n > many(q)) group = self;
    const int leader = lowest_lane(group);
    const std::uint32_t total = static_cast<std::uint32_t>(count_lanes(group)) * n;
    std::uint64_t base = 0;
    Status status = Status::ok;
    if (lane_index() == leader) status = reserve(comm, peer, q, total, knobs.deadline, &base);
    bool now = knobs.now;
    if (group != self) {
      status = static_cast<Status>(warp_shuffle(group, static_cast<std::uint32_t>(status), leader));
      base = warp_shuffle(group, base, leader);
      now = warp_ballot(group, now) != 0;
    }
    if (status != Status::ok) return status;
    const std::uint64_t at = base + static_cast<std::uint32_t>(count_lanes(group & (self - 1))) * n;
    if (first) *first = at;
    build(q, at);
    if (group != self) warp_sync(group);  // the lanes' entries happen before the leader's release
    if (lane_index() == leader) publish(comm, q, base, base + total, now);
    if (group != self) warp_sync(group);  // ready_index covers our entries when we return
    return Status::ok;
  }
};

}  // namespace detail::gda
}  // namespace cpu_device / gpu_device
}  // namespace marrow
