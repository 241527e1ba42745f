// SPDX-License-Identifier: Apache-2.0
// The producer half of a gda queue: take entries, let the caller write them, publish them with one
// release and one doorbell.
//
// A queue of one thread at a time uses no atomics: its index is a plain word. A shared one:
//   take      lanes that are here together for the same queue take one range with one compare-and-swap,
//             which succeeds only if the ring has room: a wait for room holds nothing, so it may time out
//   write     each lane its own entries
//   publish   in the order of the ranges: whoever sees ready_index at its own start rings the doorbell,
//             or leaves it to the next in line (kGdaOwed) if one has taken entries already, and moves
//             ready_index on. Who has to wait for that has released its entries before, so the line moves
//             at the pace of one reduction. Between take and publish is straight-line code only.
// The scope of the release before a doorbell is the queue's (GdaRelease): it follows the reader.
//
// What a kernel hardly ever does, or shares between three forms, stands in functions that are not
// inlined, with few arguments and results in registers: a put of one thread's queue needs 24 registers.
#pragma once

#include "marrow/device/detail/gda_completion.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail::gda {

/// Entries that lanes hold between take and publish.
struct Range {
  std::uint64_t at = 0;     ///< the calling lane's first entry; kNoRoom: nothing is held
  std::uint32_t group = 0;  ///< the lanes that take part together
  std::uint32_t role = 0;   ///< kTurn | kLead | kAlone
};
inline constexpr std::uint32_t kTurn = 1;   ///< nobody is before us
inline constexpr std::uint32_t kLead = 2;   ///< the calling lane is the group's lowest
inline constexpr std::uint32_t kAlone = 4;  ///< the group is the calling lane
inline constexpr std::uint64_t kNoRoom = ~std::uint64_t{0};
/// A ring half full of deferred entries would leave no room for the one that rings, so whoever crosses
/// the middle or the end of the ring rings.
MARROW_DEVICE bool crosses(std::uint32_t mask, std::uint64_t begin, std::uint64_t end) {
  return ((static_cast<std::uint32_t>(begin) ^ static_cast<std::uint32_t>(end)) & ~(mask >> 1)) !=
         0;
}

/// One release for all entries below `end`, then record, then doorbell. It meets the NIC's read of the
/// record or the doorbell (softnic: acquire loads). Those two stores are relaxed on a GPU.
/// How the scope of the release is chosen. either: at run time, with little code. loop: at run time, quickly
/// on a GPU. device: it is known to be device scope.
enum class RingScope { either, loop, device };
template <RingScope kScope = RingScope::either>
MARROW_DEVICE void ring(const Hot& hot, const Bell& where, std::uint64_t end) {
  const std::uint32_t index = mlx5::record_word(static_cast<std::uint16_t>(end));
  const std::uint64_t bell = std::uint64_t{hot.qpn} << 32 | index >> 8;
  if constexpr (kScope == RingScope::loop) {
    Publication<Scope::system> out(hot.wide());
    out.store(where.record, index);
    out.store(where.doorbell, bell);
  } else if (kScope == RingScope::either && hot.wide()) {
    Publication<Scope::system> out;
    out.store(where.record, index);
    out.store(where.doorbell, bell);
  } else {
    Publication<Scope::device> out;
    out.template store<Scope::system>(where.record, index);
    out.template store<Scope::system>(where.doorbell, bell);
  }
}

template <Sharing kSharing>
struct Producer : Consumer<kSharing> {
  using Base = Consumer<kSharing>;
  using Base::kExclusive;
  using Base::kScope;

  /// Takes n entries for each lane that takes part. Not for queues of one thread.
  /// @param n      1 .. depth / 2
  /// @param lanes  that call together, for the same queue and n; 0: whoever happens to be here
  static MARROW_DEVICE_COLD Range take(GdaQueue& q, std::uint32_t n, std::uint32_t lanes) {
    const Guess guess(q);
    return take_here(q, Hot(q).mask(), guess, n, lanes);
  }

  /// What this block knows of the queue, from its SM's L1: the index behind the block's last thread that left
  /// the line empty, and an old completed_index. If the compare-and-swap takes that index, nobody has been in
  /// line since; so an acquire of block scope does, and our turn it is.
  struct Guess {
    explicit MARROW_DEVICE Guess(GdaQueue& q)
        : completed(load_relaxed<Scope::block_global>(&q.completed_index)),
          // Meets in_turn's store of it.
          index(observe<Scope::block_global>(&q.guess) ^ own_key()) {}
    std::uint64_t completed, index;
  };
  /// Makes the guess of another block useless, be it of this kernel or of one that runs beside it: its acquire
  /// would have to be of device scope.
  static MARROW_DEVICE std::uint64_t own_key() {
    return kScope == Scope::device ? (block_identity() + 1) * 0x9e3779b97f4a7c15u : 0;
  }
  static MARROW_DEVICE bool take_guess(GdaQueue& q, std::uint32_t mask, const Guess& guess,
                                       std::uint64_t total) {
    return fits(guess.completed, mask, guess.index + total) &&
           compare_swap_relaxed<kScope>(&q.reserved_index, guess.index, guess.index + total) ==
               guess.index;
  }
  static MARROW_DEVICE Range take_here(GdaQueue& q, std::uint32_t mask, const Guess& guess,
                                       std::uint32_t n, std::uint32_t lanes) {
    const std::uint32_t self = 1u << lane_index();
    std::uint32_t group = lanes;
    if (group == 0) {
      group = converged_lanes();
      if (group != self) {
        const auto queue = reinterpret_cast<std::uintptr_t>(&q);
        // n <= 16384; addresses have 48 bits.
        group = warp_match(group, static_cast<std::uint64_t>(queue) << 16 | n);
      }
    }
    if (static_cast<std::uint32_t>(count_lanes(group)) * n > (mask + 1) >> 1) group = self;
    const bool alone = group == self;
    Range range{0, group, (alone ? kAlone : 0u) | ((group & (self - 1)) == 0 ? kLead : 0u)};
    if (range.role & kLead) {
      const std::uint64_t total = static_cast<std::uint32_t>(count_lanes(group)) * n;
      range.at = guess.index;
      range.role |= kTurn;
      if (__builtin_expect(!take_guess(q, mask, guess, total), false)) {
        range.at = take_range(q, mask, total);
        range.role &= ~kTurn;
      }
    }
    if (!alone) range.at = share(group, range.at, n);
    return range;
  }
  /// @return the first index, or kNoRoom
  static MARROW_DEVICE_COLD std::uint64_t take_range(GdaQueue& q, std::uint32_t mask,
                                                     std::uint64_t total) {
    std::uint64_t at = load_relaxed<kScope>(&q.reserved_index);
    for (;;) {
      if (!has_room(q, mask, at + total)) return kNoRoom;
      const std::uint64_t old = compare_swap_relaxed<kScope>(&q.reserved_index, at, at + total);
      if (old == at) return at;
      at = old;  // somebody else took it, so the loop as a whole advances
    }
  }

  /// As take, of a group that found no room; waits for it.
  /// @return at == kNoRoom: role is the Status
  static MARROW_DEVICE_COLD Range take_waiting(WaitWords comm, int peer, GdaQueue& q,
                                               std::uint32_t n, std::uint32_t group) {
    const std::uint32_t self = 1u << lane_index();
    std::int64_t got = 0;
    if (lane_index() == lowest_lane(group))
      got = wait_for_room(comm, peer, q, static_cast<std::uint32_t>(count_lanes(group)) * n);
    if (group != self) got = warp_shuffle(group, got, lowest_lane(group));
    if (got < 0) return {kNoRoom, group, static_cast<std::uint32_t>(-got)};
    const std::uint32_t below = group & (self - 1);
    return {static_cast<std::uint64_t>(got) + static_cast<std::uint32_t>(count_lanes(below)) * n,
            group, (group == self ? kAlone : 0u) | (below == 0 ? kLead : 0u)};
  }

  /// Makes a range's entries, which are written, known to the NIC: all lanes of the group call.
  /// @param n         as in take
  /// @param now       ring, or see that somebody does
  /// @param patience  of waiting for one's turn, in units of 2^20 ns
  /// @return as in_line, the same for the whole group
  static MARROW_DEVICE_COLD Status publish(GdaQueue& q, std::uint64_t at, std::uint32_t n,
                                           std::uint32_t group, std::uint32_t role, bool now,
                                           std::uint32_t patience) {
    return publish_here(Hot(q), Bell(q), q, at, n, group, role, now, patience);
  }
  template <RingScope kRing = RingScope::either>
  static MARROW_DEVICE Status publish_here(const Hot& hot, const Bell& where, GdaQueue& q,
                                           std::uint64_t at, std::uint32_t n, std::uint32_t group,
                                           std::uint32_t role, bool now, std::uint32_t patience) {
    if (!(role & kAlone)) {
      now = warp_ballot(group, now) != 0;
      warp_sync(group);  // the lanes' entries happen before the leader's release
    }
    Status status = Status::ok;
    if (role & kLead) {
      const std::uint64_t end = at + static_cast<std::uint32_t>(count_lanes(group)) * n;
      if (__builtin_expect((role & kTurn) != 0, true)) {
        in_turn<kRing>(hot, where, q, at, end, now, false);
      } else {
        status = in_line(q, at, end, now, patience);
      }
    }
    if (!(role & kAlone)) {
      if (warp_ballot(group, status != Status::ok)) status = Status::timeout;
      warp_sync(group);  // ready_index covers our entries when we return
    }
    return status;
  }

  /// For one thread alone; n entries from range.at on.
  static MARROW_DEVICE Status publish_alone(GdaQueue& q, const Range& range, std::uint32_t n,
                                            bool now, std::uint32_t patience) {
    if constexpr (kExclusive) {
      (void)patience;
      publish_own(Hot(q), q, range.at, range.at + n, now);
      return Status::ok;
    } else {
      return publish(q, range.at, n, range.group, range.role, now, patience);
    }
  }
  /// @param watch  a queue whose failure ends the wait, or null
  static MARROW_DEVICE Status take_alone(WaitWords comm, int peer, GdaQueue& q, std::uint32_t n,
                                         Deadline deadline, Range* range,
                                         GdaQueue* watch = nullptr) {
    const std::uint32_t self = 1u << lane_index();
    if constexpr (kExclusive) {
      *range = {q.reserved_index, self, kAlone | kLead};
      if (has_room(q, Hot(q).mask(), range->at + n)) {
        q.reserved_index = range->at + n;
        return Status::ok;
      }
    } else {
      *range = take(q, n, self);
      if (range->at != kNoRoom) return Status::ok;
    }
    if (deadline.ns) comm.wait_ns = deadline.ns;
    const std::int64_t got =
        watch ? wait_for_room_watching(comm, peer, q, n, *watch) : wait_for_room(comm, peer, q, n);
    if (got < 0) return static_cast<Status>(-got);
    *range = {static_cast<std::uint64_t>(got), self, kAlone | kLead};
    if constexpr (kExclusive) q.reserved_index = range->at + n;
    return Status::ok;
  }

  /// A queue of one thread: the entries are written, its index may still be the old one.
  static MARROW_DEVICE void publish_own(const Hot& hot, GdaQueue& q, std::uint64_t begin,
                                        std::uint64_t end, bool now) {
    ring_own(hot, Bell(q), q, begin, end, now);
  }
  template <RingScope kRing = RingScope::either>
  static MARROW_DEVICE void ring_own(const Hot& hot, const Bell& where, GdaQueue& q,
                                     std::uint64_t begin, std::uint64_t end, bool now) {
    constexpr bool kLast = kRing == RingScope::device;  // the release need not wait for this store
    if constexpr (!kLast) q.reserved_index = end;
    if (__builtin_expect(now || crosses(hot.mask(), begin, end), true)) {
      ring<kRing>(hot, where, end);
    } else {
      q.deferred_index = end;
    }
    if constexpr (kLast) q.reserved_index = end;
  }

  /// Everything posted so far is below this index.
  static MARROW_DEVICE std::uint64_t end(const GdaQueue& q) {
    return kExclusive ? q.reserved_index : observe<kScope>(&q.ready_index) & ~kGdaOwed;
  }

  /// Rings for deferred entries below `end`. In a shared queue nobody may ring outside of his turn, so a
  /// NOP takes one; if there is no room for it, whatever makes room completes first and test tries again.
  static MARROW_DEVICE void ring_deferred(WaitWords comm, GdaQueue& q, std::uint64_t end) {
    if constexpr (kExclusive) {
      (void)end;
      if (q.deferred_index == q.reserved_index) {
        q.deferred_index = ~std::uint64_t{0};
        ring(Hot(q), Bell(q), q.reserved_index);
      }
    } else {
      if (load_relaxed<kScope>(&q.posted_index) < end) ring_deferred_shared(comm.wait_ns, q, end);
    }
  }

  static MARROW_DEVICE std::uint32_t patience(std::uint64_t wait_ns) {
    return static_cast<std::uint32_t>(wait_ns >> 19);  // twice as long
  }

  static MARROW_DEVICE bool has_room(const GdaQueue& q, std::uint32_t mask, std::uint64_t end) {
    return fits(Base::completed(q), mask, end);
  }
  static MARROW_DEVICE bool fits(std::uint64_t completed, std::uint32_t mask, std::uint64_t end) {
#if defined(MARROW_MEASURE_WITHOUT_ROOM_CHECK)
    return (void)completed, (void)mask, (void)end, true;  // bench/gda: what the check costs
#else
    return static_cast<std::int64_t>(completed + mask + 1 - end) >= 0;
#endif
  }

  /// A queue of one thread: waits until n entries fit. Inlined, since a call would cost registers, and
  /// wait_until in little: a short put pays for the registers of this loop.
  static MARROW_DEVICE Status wait_here(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                        std::uint32_t n, Deadline deadline) {
    const std::uint64_t start = now_ns();
    for (std::uint32_t spins = 0;; ++spins) {
      const Status seen =
          Base::poll_here(q, q.reserved_index + n - (static_cast<std::uint64_t>(q.mask) + 1));
      if (seen != Status::timeout) return seen;
      relax(spins);
      if ((spins & 31) != 31) continue;
      const Status stop = control_here(wait_words(comm), peer);
      if (stop != Status::ok) return stop;
      if (now_ns() - start >= (deadline.ns ? deadline.ns : comm.wait_ns)) return Status::timeout;
    }
  }

  /// Waits until n entries fit; a shared queue's are then taken, by the calling lane alone. Few arguments and
  /// one result, all in registers: a kernel needs no stack for a call it hardly ever makes.
  /// @return the first index, or minus the Status
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

  /// What is added to ready_index when it moves from begin to end.
  static MARROW_DEVICE std::uint64_t step(std::uint64_t begin, std::uint64_t end, bool was_owed,
                                          bool is_owed) {
    return end - begin + (was_owed == is_owed ? 0 : kGdaOwed);  // modulo 2^64: toggles the top bit
  }

  /// All before us is ready.
  template <RingScope kRing = RingScope::either>
  static MARROW_DEVICE void in_turn(const Hot& hot, const Bell& where, GdaQueue& q,
                                    std::uint64_t begin, std::uint64_t end, bool now, bool owed) {
    if (__builtin_expect(now | owed | crosses(hot.mask(), begin, end), true)) {
      ring<kRing>(hot, where, end);
      store_relaxed<kScope>(&q.posted_index, end);
    }
    // Publishes our entries, and our stores to record and doorbell, to the next in line: it acquires
    // ready_index before its own release, which so covers them.
    Publication<kScope> out;
    if constexpr (kScope == Scope::block_global) {
      out.store(&q.ready_index, end);
    } else {
      out.add(&q.ready_index, step(begin, end, owed, false));
    }
    out.template store<Scope::block_global>(&q.guess, end ^ own_key());
  }

  /// Others are before us. Our entries are released first; at our turn, if somebody is behind us already, we
  /// only count them in: the next in line acquires this reduction, and with it the chain of those before.
  /// @return timeout: our turn never came, our entries were not posted, and nothing will be behind them
  static MARROW_DEVICE_COLD Status in_line(GdaQueue& q, std::uint64_t begin, std::uint64_t end,
                                           bool now, std::uint32_t patience) {
    Publication<kScope> early;
    const Hot hot(q);
    std::uint64_t start = 0;
    std::uint64_t followed = 0;
    std::uint64_t ready = 0;
    for (std::uint32_t spins = 0;; ++spins) {
      if (followed == 0) followed = load_relaxed<kScope>(&q.reserved_index) - end;
      // Meets the store or reduction of the one before us.
      ready = observe<kScope>(&q.ready_index);
      if ((ready & ~kGdaOwed) == begin) break;
      relax(spins);
      // Not wait_until: an abort must not leave a hole in the queue. Those before us run straight-line code
      // (the counted form waits for room in between, for half of our patience at most), so only a thread
      // that died can end this.
      if ((spins & 1023) != 1023) continue;
      if (start == 0) start = now_ns();
      if ((now_ns() - start) >> 20 > patience) return Status::timeout;
    }
    const bool owed = (ready & kGdaOwed) != 0;
    const bool wanted = now | owed;
    if (crosses(hot.mask(), begin, end) || (wanted && followed == 0)) {
      in_turn(hot, Bell(q), q, begin, end, now, owed);
    } else if constexpr (kScope == Scope::block_global) {
      marrow::publish<kScope>(Store{&q.ready_index, wanted ? end | kGdaOwed : end});
    } else {
      early.add(&q.ready_index, step(begin, end, owed, wanted));
    }
    return Status::ok;
  }

 private:
  static MARROW_DEVICE Status control_here(WaitWords comm, int peer) {
    return control_status(comm, peer);
  }

  /// The lowest lane's index, and each lane's own part of the range.
  static MARROW_DEVICE std::uint64_t share(std::uint32_t group, std::uint64_t at, std::uint32_t n) {
    at = warp_shuffle(group, at, lowest_lane(group));
    const std::uint32_t below = group & ((1u << lane_index()) - 1);
    return at == kNoRoom ? at : at + static_cast<std::uint32_t>(count_lanes(below)) * n;
  }

  static MARROW_DEVICE_COLD void ring_deferred_shared(std::uint64_t wait_ns, GdaQueue& q,
                                                      std::uint64_t end) {
    if ((load_relaxed<kScope>(&q.ready_index) & ~kGdaOwed) < end) return;  // on its way
    const std::uint32_t self = 1u << lane_index();
    const Range range = take(q, 1, self);
    if (range.at != kNoRoom) {
      const Hot hot(q);
      Wqe(hot, range.at).nop();
      // A line that does not move ends the wait that called this.
      (void)publish(q, range.at, 1, self, range.role, true, patience(wait_ns));
    } else {
      // Raises completed_index once there is room.
      (void)Base::poll(q, load_relaxed<kScope>(&q.reserved_index) + 1 - (Hot(q).mask() + 1));
    }
  }

  /// @param failure  > Status::timeout ends the wait with it
  template <class Failure>
  static MARROW_DEVICE std::int64_t wait_for_room_or(WaitWords comm, int peer, GdaQueue& q,
                                                     std::uint32_t n, Failure&& failure) {
    Status seen = Status::ok;
    std::uint64_t at = 0;
    const std::uint32_t mask = Hot(q).mask();
    const Status waited = wait_until(
        comm, Deadline{},
        [&] {
          seen = failure();
          if (seen > Status::timeout) return true;
          at = kExclusive ? q.reserved_index : load_relaxed<kScope>(&q.reserved_index);
          if (!has_room(q, mask, at + n)) {
            seen = Base::poll(q, at + n - (mask + 1));
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
};

}  // namespace detail::gda
}  // namespace cpu_device / gpu_device
}  // namespace marrow
