// SPDX-License-Identifier: Apache-2.0
// The proxy path: a kernel writes one 64-byte descriptor into a ring of pinned host memory and a CPU
// thread executes it (layout: abi/proxy_ring.h). Posting takes credits, then ring indices: lanes that
// post together take both with one atomic each. The slot's lap bit publishes it, so an inline value
// or a signal needs no fence; a payload in memory needs one release at system scope, since its reader
// is a CPU thread or a NIC.
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

struct PathProxy {
  static constexpr Path kPath = Path::proxy;

  static MARROW_DEVICE Status put(const DeviceCommunicator& comm, int context, const PutOp& op,
                                  const Then& then, const Knobs& knobs) {
    ProxyOperation d =
        start(op.bytes ? ProxyOpcode::put : ProxyOpcode::add, op.peer, op.window, then, knobs);
    d.region = op.source.id;
    d.offset = op.offset;
    d.source_offset = op.source_offset;
    d.bytes = op.bytes;
    if (op.bytes) release_payload(knobs);
    return post(comm, context, op.peer, &d, 1, knobs);
  }

  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, int context, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs) {
    ProxyOperation d[2];
    const bool fits = !then.window || then.n <= kProxyMaxFusedAdd;
    d[0] = start(ProxyOpcode::put_value, peer, window, fits ? then : Then{}, knobs);
    d[0].offset = offset;
    d[0].bytes = bytes;
    const auto* from = static_cast<const unsigned char*>(value);
    for (std::uint32_t i = 0; i < bytes; ++i) {
      d[0].value[i / 8] |= static_cast<std::uint64_t>(from[i]) << (i % 8 * 8);
    }
    if (!fits) d[1] = start(ProxyOpcode::add, peer, window, then, Knobs{});
    return post(comm, context, peer, d, fits ? 1 : 2, knobs);
  }

  static MARROW_DEVICE Status get(const DeviceCommunicator& comm, int context, const GetOp& op,
                                  const Knobs& knobs) {
    ProxyOperation d = start(ProxyOpcode::get, op.peer, op.window, Then{}, knobs);
    d.region = op.target.id;
    d.offset = op.offset;
    d.source_offset = op.target_offset;
    d.bytes = op.bytes;
    // The thread writes the target: what we stored or loaded there before must not come after it.
    if (op.bytes) release_payload(knobs);
    return post(comm, context, op.peer, &d, 1, knobs);
  }

  /// A message: the peer's thread adds. Its order after earlier puts is the network's or the peer
  /// thread's business, so nothing is fenced here.
  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, int context, int peer,
                                  const Then& then, const Knobs& knobs) {
    const ProxyOperation d = start(ProxyOpcode::add, peer, *then.window, then, knobs);
    return post(comm, context, peer, &d, 1, knobs);
  }

  /// The old value comes through a result slot that belongs to us until we give it back. Results
  /// carry the slot's generation: one that comes after we stopped waiting matches nobody.
  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, int context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    if (!comm.proxy) return Status::invalid;
    ProxyRing& ring = ring_of(comm, context, peer);
    int slot = -1;
    Status status = wait_until(
        comm, knobs.deadline,
        [&] {
          slot = take_slot(ring);
          return slot >= 0;
        },
        peer);
    if (status != Status::ok) return status;
    ProxyOperation d = start(op.swap ? ProxyOpcode::compare_swap : ProxyOpcode::fetch_add, peer,
                             op.window, Then{}, knobs);
    d.offset = op.offset;
    d.operand = op.operand;
    d.compare = op.compare;
    d.result_slot = static_cast<std::uint32_t>(slot);
    d.generation = fetch_add_relaxed<Scope::device>(&ring.generation[slot], 1u) + 1;
    status = post(comm, context, peer, &d, 1, knobs);
    if (status == Status::ok) {
      Cell16 result{};
      status = wait_until(
          comm, knobs.deadline,
          [&] {
            result = load_cell(&ring.results[slot]);
            return static_cast<std::uint32_t>(result.high) == d.generation;
          },
          peer);
      if (status == Status::ok) {
        status = static_cast<Status>(result.high >> 32);
        *old = result.low;
      }
    }
    add_relaxed<Scope::device>(&ring.fetch_free[slot / 64], std::uint64_t{1} << (slot % 64));
    return status;
  }

  /// Ring index after the queue's last operation.
  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator& comm, int context, int peer) {
    return comm.proxy
               ? load_relaxed<Scope::device>(&comm.proxy->posted[queue_of(comm, context, peer)])
               : 0;
  }

  static MARROW_DEVICE Status test(const DeviceCommunicator& comm, int context, int peer,
                                   Ticket ticket) {
    if (!comm.proxy) return Status::invalid;
    const ProxyCompletion& queue = comm.proxy->completion[queue_of(comm, context, peer)];
    const std::uint64_t completed = observe<Scope::system>(&queue.completed);
    if (static_cast<std::int64_t>(completed - ticket) < 0) return Status::timeout;
    return static_cast<Status>(load_relaxed<Scope::system>(&queue.status));
  }

  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator& comm, int context, int peer,
                                           const Knobs& knobs) {
    ProxyOperation d;
    d.opcode = ProxyOpcode::flush_remote;
    d.peer = static_cast<std::uint16_t>(peer);
    const Status posted = post(comm, context, peer, &d, 1, knobs);
    if (posted != Status::ok) return posted;
    const Ticket last = ticket(comm, context, peer);
    Status seen = Status::timeout;
    const Status waited = wait_until(
        comm, knobs.deadline,
        [&] {
          seen = test(comm, context, peer, last);
          return seen != Status::timeout;
        },
        peer);
    return waited == Status::ok ? seen : waited;
  }

 private:
  static MARROW_DEVICE std::uint64_t queue_of(const DeviceCommunicator& comm, int context,
                                              int peer) {
    return static_cast<std::uint64_t>(context) * comm.nranks + peer;
  }

  static MARROW_DEVICE ProxyRing& ring_of(const DeviceCommunicator& comm, int context, int peer) {
    const std::uint32_t threads = comm.proxy->threads;
    return comm.proxy->rings[static_cast<std::uint32_t>(context) * threads +
                             static_cast<std::uint32_t>(peer) % threads];
  }

  static MARROW_DEVICE ProxyOperation start(ProxyOpcode opcode, int peer,
                                            const WindowHandle& window, const Then& then,
                                            const Knobs& knobs) {
    ProxyOperation d;
    d.opcode = opcode;
    d.peer = static_cast<std::uint16_t>(peer);
    d.counter = knobs.counter;
    d.window = window.id;
    d.strong = then.strong;
    if (then.window) {
      d.has_add = true;
      d.add_window = then.window->id;
      d.add_offset = then.offset;
      d.add_n = then.n;
    }
    return d;
  }

  /// Publishes the payload to the thread; meets its acquire of the descriptor's cells. On the CPU
  /// device the cells' own release does it.
  static MARROW_DEVICE void release_payload(const Knobs& knobs) {
#if !defined(MARROW_PLANT_RING_PUBLISH)
    if (kOnGpu && knobs.ordering.released != Ordering::Released::system)
      Publication<Scope::system>{};
#else
    (void)knobs;  // planted bug: the release is missing
#endif
  }

  static MARROW_DEVICE void store_descriptor(ProxyRing& ring, std::uint64_t index,
                                             const ProxyDescriptor& d) {
    ProxyDescriptor& slot = ring.slots[index & ((std::uint64_t{1} << ring.log_size) - 1)];
    const std::uint64_t lap = proxy_lap(index, ring.log_size);
    for (int i = 0; i < 4; ++i) {
#if defined(MARROW_PLANT_RING_PUBLISH)
      store_relaxed<Scope::system>(&slot.chunk[i].low, d.chunk[i].low);
      store_relaxed<Scope::system>(&slot.chunk[i].high, d.chunk[i].high | lap);
#else
      store_cell(&slot.chunk[i], Cell16{d.chunk[i].low, d.chunk[i].high | lap});
#endif
    }
  }

  /// Posts `count` (1 or 2) descriptors in a row, or none.
  static MARROW_DEVICE Status post(const DeviceCommunicator& comm, int context, int peer,
                                   const ProxyOperation* d, int count, const Knobs& knobs) {
    if (!comm.proxy) return Status::invalid;
    ProxyRing& ring = ring_of(comm, context, peer);
    std::uint64_t first = 0;
    Status status;
    if (comm.sharing == Sharing::thread) {
      status = reserve_alone(comm, ring, count, knobs.deadline, peer, &first);
    } else {
      status = reserve_together(comm, ring, count, knobs.deadline, peer, &first);
    }
    if (status != Status::ok) return status;
    for (int i = 0; i < count; ++i) store_descriptor(ring, first + i, proxy_encode(d[i]));
    std::uint64_t* posted = &comm.proxy->posted[queue_of(comm, context, peer)];
    const std::uint64_t end = first + static_cast<std::uint64_t>(count);
    if (comm.sharing == Sharing::thread) {
      store_relaxed<Scope::device>(posted, end);
    } else {
      fetch_max_relaxed<Scope::device>(posted, end);
    }
    return Status::ok;
  }

  /// One thread at a time: no atomics.
  static MARROW_DEVICE Status reserve_alone(const DeviceCommunicator& comm, ProxyRing& ring,
                                            int count, Deadline deadline, int peer,
                                            std::uint64_t* first) {
    const std::uint64_t at = load_relaxed<Scope::device>(&ring.producer);
    const std::uint64_t limit =
        at + static_cast<std::uint64_t>(count) - (std::uint64_t{1} << ring.log_size);
    if (static_cast<std::int64_t>(load_relaxed<Scope::device>(&ring.consumed_seen) - limit) < 0) {
      std::uint64_t seen = 0;
      const Status status = wait_until(
          comm, deadline,
          [&] {
            seen = observe<Scope::system>(ring.consumed);
            return static_cast<std::int64_t>(seen - limit) >= 0;
          },
          peer);
      if (status != Status::ok) return status;
      store_relaxed<Scope::device>(&ring.consumed_seen, seen);
    }
    store_relaxed<Scope::device>(&ring.producer, at + static_cast<std::uint64_t>(count));
    *first = at;
    return Status::ok;
  }

  /// Lanes that are here together and post to one ring: the lowest takes for all.
  static MARROW_DEVICE Status reserve_together(const DeviceCommunicator& comm, ProxyRing& ring,
                                               int count, Deadline deadline, int peer,
                                               std::uint64_t* first) {
    const std::uint32_t lanes =
        warp_match(converged_lanes(), reinterpret_cast<std::uint64_t>(&ring));
    const std::uint32_t twos = warp_ballot(lanes, count == 2);
    const int total = count_lanes(lanes) + count_lanes(twos);
    // A small ring: together we may never fit, one by one we do.
    if (total > 1 && static_cast<std::uint64_t>(total) * 2 > (std::uint64_t{1} << ring.log_size)) {
      return take(comm, ring, static_cast<std::uint64_t>(count), deadline, peer, first);
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
    const std::uint32_t before = (1u << lane_index()) - 1;
    *first =
        base + static_cast<std::uint64_t>(count_lanes(lanes & before) + count_lanes(twos & before));
    return static_cast<Status>(status);
  }

  /// Takes n credits, then n indices. Relaxed throughout: a slot's words are only ever stored and
  /// loaded whole, and the thread had read them before it moved `consumed`, on which our store depends.
  static MARROW_DEVICE Status take(const DeviceCommunicator& comm, ProxyRing& ring, std::uint64_t n,
                                   Deadline deadline, int peer, std::uint64_t* first) {
    const auto wanted = static_cast<std::int64_t>(n);
    const Status status = wait_until(
        comm, deadline,
        [&] {
          if (static_cast<std::int64_t>(load_relaxed<Scope::device>(&ring.credits)) < wanted) {
            const std::uint64_t seen = observe<Scope::system>(ring.consumed);
            const std::uint64_t before =
                fetch_max_relaxed<Scope::device>(&ring.consumed_seen, seen);
            if (seen > before) add_relaxed<Scope::device>(&ring.credits, seen - before);
            if (static_cast<std::int64_t>(load_relaxed<Scope::device>(&ring.credits)) < wanted)
              return false;
          }
          const std::uint64_t had =
              fetch_add_relaxed<Scope::device>(&ring.credits, std::uint64_t{0} - n);
          if (static_cast<std::int64_t>(had) >= wanted) return true;
          add_relaxed<Scope::device>(&ring.credits, n);  // somebody was faster
          return false;
        },
        peer);
    if (status == Status::ok) *first = fetch_add_relaxed<Scope::device>(&ring.producer, n);
    return status;
  }

  /// A free result slot, or -1.
  static MARROW_DEVICE int take_slot(ProxyRing& ring) {
    for (std::uint32_t w = 0; w < kProxyFetchSlots / 64; ++w) {
      std::uint64_t free = load_relaxed<Scope::device>(&ring.fetch_free[w]);
      while (free) {
        const std::uint64_t bit = free & (~free + 1);
        const std::uint64_t seen =
            compare_swap_relaxed<Scope::device>(&ring.fetch_free[w], free, free & ~bit);
        if (seen == free) {
          int index = 0;
          while (!(bit >> index & 1)) ++index;
          return static_cast<int>(w * 64) + index;
        }
        free = seen;
      }
    }
    return -1;
  }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
