// SPDX-License-Identifier: Apache-2.0
// The proxy path: a kernel writes one 64-byte descriptor into a ring of pinned host memory and a CPU
// thread executes it (layout: abi/proxy_ring.h). Posting takes credits, then ring indices: lanes that
// post together take both with one atomic each. The slot's lap bit publishes it, so an inline value
// or a signal needs no fence; a payload in memory needs one release at system scope, since its reader
// is a CPU thread or a NIC.
//
// Where the rings lie is constant while a kernel runs, and loaded so that a loop of posts keeps it. On an
// exclusive context the indices are ordinary words: a GPU's L1 has them, L2 is 130 ns away.
#pragma once

#include "marrow/device/detail/proxy_producer.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

struct PathProxy : private ProxyProducer {
  static constexpr Path kPath = Path::proxy;

  /// By one thread.
  template <class At>
  static MARROW_DEVICE Status put(const DeviceCommunicator& comm, At context, const PutOp& op,
                                  const Then& then, const Knobs& knobs) {
    Taken ahead{};
    if (op.source.staged && is_written_ahead(comm, op, 1)) {
      ahead = write_ahead(wait_words(comm), comm.proxy, context,
                          sharing_of(comm, context) == Sharing::thread, knobs.deadline, op.peer,
                          op.source.local + op.source_offset, op.bytes);
      if (ahead.status != Status::ok) return ahead.status;
    }
    return put_or_ahead(comm, context, op, then, knobs, ahead);
  }

  /// By a group: it writes a staging slot together.
  template <class At, class Coop>
  static MARROW_DEVICE Status put_together(const DeviceCommunicator& comm, At context,
                                           const PutOp& op, const Then& then, const Knobs& knobs,
                                           const Coop& coop) {
    coop.sync();  // the group's stores to the source happen before the post
    Taken ahead{};
    if (op.source.staged && is_written_ahead(comm, op, coop.size())) {
      if (coop.rank() == 0) {
        ahead = take_staging(wait_words(comm), comm.proxy, context,
                             sharing_of(comm, context) == Sharing::thread, knobs.deadline, op.peer);
      }
      ahead.status = coop.agree(ahead.status);
      if (ahead.status != Status::ok) return ahead.status;
      // Its low bits say which slot; the ring follows from the peer.
      const std::uint64_t index =
          coop.first(ahead.index, static_cast<int>(comm.proxy->stage_log_size));
      copy(slot_of(comm.proxy, context, op.peer, index).slot, op.source.local + op.source_offset,
           op.bytes, static_cast<unsigned>(coop.rank()), static_cast<unsigned>(coop.size()));
      coop.sync();
      if (coop.rank() == 0) release_slot();
    }
    Status status = Status::ok;
    if (coop.rank() == 0) status = put_or_ahead(comm, context, op, then, knobs, ahead);
    return coop.agree(status);
  }

  template <class At>
  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, At context, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs) {
    ProxyOperation d[2];
    const bool fits = !then.window || then.n <= kProxyMaxFusedAdd;
    d[0] = start(ProxyOpcode::put_value, peer, window, fits ? then : Then{}, knobs);
    d[0].offset = offset;
    d[0].bytes = bytes;
    __builtin_memcpy(d[0].value, value, bytes);
    if (!fits) d[1] = start(ProxyOpcode::add, peer, window, then, Knobs{});
    return post(comm, context, peer, d, fits ? 1 : 2, knobs);
  }

  /// The same without an action, by one thread on an exclusive context, when nothing is unusual: all that
  /// is constant is loaded without a branch, so that a loop of posts keeps it.
  /// @param valid  context and peer are in range
  /// @param from   a Kept<Path::proxy>
  /// @return whether it was posted. Else the long way says why not, or waits
  template <std::uint32_t kBytes, class Kept>
  static MARROW_DEVICE bool put_value_directly(bool valid, const Kept& from, int context, int peer,
                                               const WindowHandle& window, std::uint64_t offset,
                                               const void* value) {
    valid = valid & (from.proxy != nullptr);
    const std::uint8_t path = load_fixed(valid, from.path + peer);
    const Where at = where(valid, from.proxy, context, peer);
    std::uint64_t* posted = posted_of(valid, from.proxy, from.nranks, context, peer);
    const std::uint32_t log_size = load_fixed(valid, &from.proxy->log_size);
    const std::uint32_t size = kept(1u << log_size);
    auto* slots = reinterpret_cast<ProxyDescriptor*>(
        kept(reinterpret_cast<std::uint64_t>(fixed_pointer(valid, &from.proxy->slots) +
                                             (static_cast<std::uint64_t>(at.number) << log_size))));
    auto* ring = reinterpret_cast<ProxyRing*>(kept(reinterpret_cast<std::uint64_t>(at.ring)));
    // {index, limit}
    const Cell16 words = load_data_ahead(valid, reinterpret_cast<const Cell16*>(&ring->producer));
    ProxyOperation op;
    op.opcode = ProxyOpcode::put_value;
    op.peer = static_cast<std::uint16_t>(peer);
    op.window = window.id;
    op.offset = offset;
    op.bytes = kBytes;
    __builtin_memcpy(op.value, value, kBytes);
    if (!(valid & (path == static_cast<std::uint8_t>(Path::proxy)) & (window.abi == kAbiVersion) &
          (words.low != words.high)))
      return false;
    store_plain(&ring->producer, words.low + 1);
    store_in(slots, size, static_cast<std::uint32_t>(words.low), proxy_encode(op));
    store_plain(posted, words.low + 1);
    return true;
  }

  template <class At>
  static MARROW_DEVICE Status get(const DeviceCommunicator& comm, At context, const GetOp& op,
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
  template <class At>
  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, At context, int peer,
                                  const Then& then, const Knobs& knobs) {
    const ProxyOperation d = start(ProxyOpcode::add, peer, *then.window, then, knobs);
    return post(comm, context, peer, &d, 1, knobs);
  }

  /// The old value comes through a result slot that belongs to us until we give it back. Results
  /// carry the slot's generation: one that comes after we stopped waiting matches nobody.
  template <class At>
  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, At context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    if (!comm.proxy) return Status::invalid;
    ProxyRing& ring = *where(true, comm.proxy, context, peer).ring;
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
  template <class At>
  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator& comm, At context, int peer) {
    if (!comm.proxy) return 0;
    const std::uint64_t* posted = &comm.proxy->posted[queue_of(comm, context, peer)];
    return sharing_of(comm, context) == Sharing::thread ? load_data_ahead(posted)
                                                        : load_relaxed<Scope::device>(posted);
  }

  static MARROW_DEVICE Status test(const DeviceCommunicator& comm, int context, int peer,
                                   Ticket ticket) {
    if (!comm.proxy) return Status::invalid;
    const ProxyCompletion& queue = comm.proxy->completion[queue_of(comm, context, peer)];
    const std::uint64_t completed = observe<Scope::system>(&queue.completed);
    // Ring indices have 63 bits here: the one above says that something failed.
    if (static_cast<std::int64_t>((completed - ticket) << 1) < 0) return Status::timeout;
    if ((completed & kProxyFailed) == 0) return Status::ok;
    return static_cast<Status>(load_relaxed<Scope::system>(&queue.status));
  }

  template <class At>
  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator& comm, At context, int peer,
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
  static MARROW_DEVICE Sharing sharing_of(const DeviceCommunicator& comm, int) {
    return comm.sharing;
  }
  static MARROW_DEVICE Sharing sharing_of(const DeviceCommunicator&, const Context& context) {
    return context.sharing;
  }

  static MARROW_DEVICE std::uint64_t queue_of(const DeviceCommunicator& comm, int context,
                                              int peer) {
    return static_cast<std::uint64_t>(context) * comm.nranks + peer;
  }

  /// A staging slot of a ring.
  struct Taken {
    std::byte* slot;        ///< null: none
    std::uint64_t* unused;  ///< where to say that it will not be posted, and what
    std::uint64_t index;
    Status status;
  };

  /// Small enough to be written to pinned memory here, too large to travel in the descriptor. (A copy engine
  /// takes longer to start than such a copy takes.)
  static MARROW_DEVICE bool is_written_ahead(const DeviceCommunicator& comm, const PutOp& op,
                                             int threads) {
    return comm.proxy && op.bytes > kProxyMaxInline &&
           op.bytes <= load_fixed(true, &comm.proxy->stage_bytes) &&
           op.bytes <= std::uint64_t{load_fixed(true, &comm.proxy->stage_thread_bytes)} *
                           static_cast<std::uint32_t>(threads) &&
           inside(op.source_offset, op.bytes, op.source.bytes);
  }
  // Not inlined: most kernels never come here.

  static MARROW_DEVICE_COLD Taken take_staging(WaitWords comm, const ProxyDevice* proxy,
                                               int context, bool alone, Deadline deadline,
                                               int peer) {
    const std::uint32_t number = where(true, proxy, context, peer).number;
    ProxyRing& ring = *(proxy->stage_rings + number);
    Place place;
    const Status status = alone
                              ? reserve_alone(comm, ring, 1, deadline, peer, &place)
                              : reserve_together(comm, {&ring, number}, 1, deadline, peer, &place);
    Taken taken = slot_of(proxy, context, peer, place.first);
    taken.status = status;
    return taken;
  }
  template <class At>
  static MARROW_DEVICE Taken slot_of(const ProxyDevice* proxy, At context, int peer,
                                     std::uint64_t index) {
    const std::uint64_t ring = where(true, proxy, context, peer).number;
    const std::uint64_t slot = (ring << proxy->stage_log_size) +
                               (index & ((std::uint64_t{1} << proxy->stage_log_size) - 1));
    return {proxy->stage + (slot << proxy->stage_log_slot), proxy->stage_unused + slot, index,
            Status::ok};
  }
  /// Publishes what was written to a slot, whatever the caller had released before; as release_payload.
  static MARROW_DEVICE_COLD void release_slot() { release_payload(Knobs{}); }
  static MARROW_DEVICE_COLD Taken write_ahead(WaitWords comm, const ProxyDevice* proxy, int context,
                                              bool alone, Deadline deadline, int peer,
                                              const std::byte* from, std::uint64_t bytes) {
    const Taken taken = take_staging(comm, proxy, context, alone, deadline, peer);
    if (taken.status != Status::ok) return taken;
    copy(taken.slot, from, bytes, 0, 1);
    release_slot();
    return taken;
  }
  /// A slot that was taken for nothing; it goes back in its turn. Meets the thread's acquire in Engine::say_free.
  static MARROW_DEVICE_COLD void give_back(Taken taken) {
    publish<Scope::system>(Store<std::uint64_t>{taken.unused, taken.index + 1});
  }

  /// @param ahead  the slot that has the payload; none: it lies where the operation says
  template <class At>
  static MARROW_DEVICE Status put_or_ahead(const DeviceCommunicator& comm, At context,
                                           const PutOp& op, const Then& then, const Knobs& knobs,
                                           const Taken& ahead) {
    // What fits travels in the descriptor: no release, and no copy out of GPU memory by somebody else.
    if (op.bytes - 1 < kProxyMaxInline && inside(op.source_offset, op.bytes, op.source.bytes) &&
        (!then.window || then.n <= kProxyMaxFusedAdd)) {
      ProxyOperation value = start(ProxyOpcode::put_value, op.peer, op.window, then, knobs);
      value.offset = op.offset;
      value.bytes = op.bytes;
      load_value(op.source.local + op.source_offset, static_cast<std::uint32_t>(op.bytes), value);
      return post(comm, context, op.peer, &value, 1, knobs);
    }
    ProxyOperation d =
        start(op.bytes ? ProxyOpcode::put : ProxyOpcode::add, op.peer, op.window, then, knobs);
    d.region = op.source.id;
    d.source_offset = op.source_offset;
    if (ahead.slot) {
      d.region = load_fixed(true, &comm.proxy->stage_region);
      d.source_offset =
          static_cast<std::uint64_t>(ahead.slot - fixed_pointer(true, &comm.proxy->stage));
    }
    d.offset = op.offset;
    d.bytes = op.bytes;
    if (op.bytes && !ahead.slot) release_payload(knobs);
    const Status status = post(comm, context, op.peer, &d, 1, knobs);
    if (status != Status::ok && ahead.slot) give_back(ahead);
    return status;
  }

  static MARROW_DEVICE std::uint64_t* posted_of(bool valid, const ProxyDevice* proxy,
                                                std::uint32_t nranks, int context, int peer) {
    return fixed_pointer(valid, &proxy->posted) + static_cast<std::uint64_t>(context) * nranks +
           static_cast<std::uint32_t>(peer);
  }
  static MARROW_DEVICE void load_value(const std::byte* from, std::uint32_t bytes,
                                       ProxyOperation& value) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(from);
    if (((reinterpret_cast<std::uint64_t>(from) | bytes) & 7) == 0) {
      value.value[0] = words[0];
      if (bytes > 8) value.value[1] = words[1];
      if (bytes > 16) value.value[2] = words[2];
      return;
    }
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (std::uint32_t i = bytes; i-- != 0;) {  // shifts in from the end
      value.value[2] = value.value[2] << 8 | value.value[1] >> 56;
      value.value[1] = value.value[1] << 8 | value.value[0] >> 56;
      value.value[0] = value.value[0] << 8 | static_cast<std::uint64_t>(from[i]);
    }
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

  static MARROW_DEVICE void store_descriptor(const ProxyRing& ring, std::uint64_t index,
                                             const ProxyDescriptor& d) {
    store_in(fixed_pointer(true, &ring.slots), 1u << load_fixed(true, &ring.log_size),
             static_cast<std::uint32_t>(index), d);
  }
  /// @param index  its low bits: a ring has at most 2^20 slots
  static MARROW_DEVICE void store_in(ProxyDescriptor* slots, std::uint32_t size,
                                     std::uint32_t index, const ProxyDescriptor& d) {
    ProxyDescriptor& slot = slots[index & (size - 1)];
    const std::uint64_t lap = (index & size) ? 0 : kProxyLapBit;  // proxy_lap(index)
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
  template <class At>
  static MARROW_DEVICE Status post(const DeviceCommunicator& comm, At context, int peer,
                                   const ProxyOperation* d, int count, const Knobs& knobs) {
    if (!comm.proxy) return Status::invalid;
    const Where at = where(true, comm.proxy, context, peer);
    Place place;
    const bool alone = sharing_of(comm, context) == Sharing::thread;
    const Status status = alone ? reserve_alone(comm, *at.ring, count, knobs.deadline, peer, &place)
                                : reserve_together(comm, at, count, knobs.deadline, peer, &place);
    if (status != Status::ok) return status;
    for (int i = 0; i < count; ++i) store_descriptor(*at.ring, place.first + i, proxy_encode(d[i]));
    std::uint64_t* posted =
        posted_of(true, comm.proxy, static_cast<std::uint32_t>(comm.nranks), context, peer);
    if (alone) {
      store_plain(posted, place.end);
    } else if (place.says_end) {
      fetch_max_relaxed<Scope::device>(posted, place.end);
    }
    return Status::ok;
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
