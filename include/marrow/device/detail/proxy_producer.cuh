// SPDX-License-Identifier: Apache-2.0
// How kernels take places in a ring of the proxy path, or in the ring of its staging slots, which is taken in the
// same way: credits first, then indices; lanes that are here together take both with one atomic each.
#pragma once

#include "marrow/abi/proxy_ring.h"
#include "marrow/device/detail/operation.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

struct ProxyProducer {
  template <class T>
  static MARROW_DEVICE T* fixed_pointer(bool valid, T* const* p) {
    return reinterpret_cast<T*>(load_fixed(valid, reinterpret_cast<const std::uint64_t*>(p)));
  }

  /// Where a lane's descriptors go, and whether it is the one to say how far its queue is.
  struct Place {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
    bool says_end = true;
  };

  /// A queue's ring. Loaded once; the rest where it is used, to save registers.
  struct Where {
    ProxyRing* ring;
    std::uint32_t number;  ///< of the ring
  };
  /// @param valid  else nothing is read: there is a proxy, and context and peer are in range
  static MARROW_DEVICE Where where(bool valid, const ProxyDevice* proxy, int context, int peer) {
    const std::uint32_t threads = load_fixed(valid, &proxy->threads);
    const std::uint64_t magic = load_fixed(valid, &proxy->magic);
    const std::uint32_t number = static_cast<std::uint32_t>(context) * threads +
                                 proxy_thread_of(static_cast<std::uint32_t>(peer), threads, magic);
    return {fixed_pointer(valid, &proxy->rings) + number, number};
  }
  static MARROW_DEVICE std::uint64_t size_of(const ProxyRing& ring) {
    return std::uint64_t{1} << load_fixed(true, &ring.log_size);
  }

  /// One thread at a time: no atomics, and nothing that has to go to L2.
  template <class Words>
  static MARROW_DEVICE Status reserve_alone(const Words& comm, ProxyRing& ring, int count,
                                            Deadline deadline, int peer, Place* place) {
    const std::uint64_t at = load_data_ahead(&ring.producer);
    const std::uint64_t end = at + static_cast<std::uint64_t>(count);
    if (static_cast<std::int64_t>(load_data_ahead(&ring.limit) - end) < 0) {
      std::uint64_t limit = 0;
      const Status status = wait_until(
          comm, deadline,
          [&] {
            limit = look_at_consumed(ring) + size_of(ring);
            return static_cast<std::int64_t>(limit - end) >= 0;
          },
          peer);
      if (status != Status::ok) return status;
      store_plain(&ring.limit, limit);
    }
    store_plain(&ring.producer, end);
    place->first = at;
    place->end = end;
    return Status::ok;
  }

  /// The thread's index. It had read the slots below before it moved the index, on which our stores to
  /// them depend: that is all the order a GPU needs. On the CPU the language asks for an acquire.
  static MARROW_DEVICE std::uint64_t look_at_consumed(const ProxyRing& ring) {
    return kOnGpu ? load_relaxed<Scope::system>(ring.consumed)
                  : observe<Scope::system>(ring.consumed);
  }

  /// Lanes that are here together and post to one ring: the lowest takes for all.
  template <class Words>
  static MARROW_DEVICE Status reserve_together(const Words& comm, const Where& where, int count,
                                               Deadline deadline, int peer, Place* place) {
    ProxyRing& ring = *where.ring;
    // The ring's address, not its number: lanes may post on different device communicators.
    const std::uint32_t lanes =
        warp_match(converged_lanes(), reinterpret_cast<std::uintptr_t>(where.ring));
    const std::uint32_t twos = warp_ballot(lanes, count == 2);
    const int total = count_lanes(lanes) + count_lanes(twos);
    // A small ring: together we may never fit, one by one we do.
    if (total > 1 && static_cast<std::uint64_t>(total) * 2 > size_of(ring)) {
      const auto n = static_cast<std::uint64_t>(count);
      const Status status = take(comm, ring, n, deadline, peer, &place->first);
      place->end = place->first + n;
      return status;
    }
    const int leader = lowest_lane(lanes);
    std::uint64_t base = 0;
    std::uint32_t status = 0;
    if (lane_index() == leader) {
      status = static_cast<std::uint32_t>(
          take(comm, ring, static_cast<std::uint64_t>(total), deadline, peer, &base));
    }
    base = warp_shuffle(lanes, base, leader);
    status = warp_shuffle(lanes, status, leader);
    const bool same = peer == warp_shuffle(lanes, peer, leader);
    const std::uint32_t before = (1u << lane_index()) - 1;
    place->first =
        base + static_cast<std::uint64_t>(count_lanes(lanes & before) + count_lanes(twos & before));
    place->end = place->first + static_cast<std::uint64_t>(count);
    if (warp_ballot(lanes, same) == lanes) {  // one queue: one word to raise
      place->end = base + static_cast<std::uint64_t>(total);
      place->says_end = lane_index() == leader;
    }
    return static_cast<Status>(status);
  }

  /// Takes n credits, then n indices. Relaxed throughout: a slot's words are only ever stored and
  /// loaded whole, and the thread had read them before it moved `consumed`, on which our store depends.
  template <class Words>
  static MARROW_DEVICE Status take(const Words& comm, ProxyRing& ring, std::uint64_t n,
                                   Deadline deadline, int peer, std::uint64_t* first) {
    if (!take_credits(ring, n)) {
      const Status status = wait_until(
          comm, deadline,
          [&] {
            if (!has_credits(ring, n)) look_for_credits(ring);
            return has_credits(ring, n) && take_credits(ring, n);
          },
          peer);
      if (status != Status::ok) return status;
    }
    *first = fetch_add_relaxed<Scope::device>(&ring.producer, n);
    return Status::ok;
  }
  static MARROW_DEVICE bool has_credits(const ProxyRing& ring, std::uint64_t n) {
    return static_cast<std::int64_t>(load_relaxed<Scope::device>(&ring.credits)) >=
           static_cast<std::int64_t>(n);
  }
  static MARROW_DEVICE bool take_credits(ProxyRing& ring, std::uint64_t n) {
    const std::uint64_t had = fetch_add_relaxed<Scope::device>(&ring.credits, std::uint64_t{0} - n);
    if (static_cast<std::int64_t>(had) >= static_cast<std::int64_t>(n)) {
      // Meets the release below: on the CPU the thread's reads of the slots come before our stores.
      if (!kOnGpu) (void)observe<Scope::device>(&ring.credits);
      return true;
    }
    add_relaxed<Scope::device>(&ring.credits, n);  // somebody was faster
    return false;
  }
  /// One waiter at a time looks at the thread's index, over PCIe; the others watch the credits. (The
  /// maximum alone keeps the count right.)
  static MARROW_DEVICE void look_for_credits(ProxyRing& ring) {
    if (load_relaxed<Scope::device>(&ring.looking) != 0 ||
        compare_swap_relaxed<Scope::device>(&ring.looking, std::uint64_t{0}, std::uint64_t{1}) != 0)
      return;
    const std::uint64_t seen = look_at_consumed(ring);
    const std::uint64_t before = fetch_max_relaxed<Scope::device>(&ring.consumed_seen, seen);
    if (seen > before) {
      if (kOnGpu) {
        add_relaxed<Scope::device>(&ring.credits, seen - before);
      } else {
        publish_add<Scope::device>(&ring.credits, seen - before);
      }
    }
    store_relaxed<Scope::device>(&ring.looking, std::uint64_t{0});
  }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
