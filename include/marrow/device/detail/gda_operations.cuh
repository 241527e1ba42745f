// SPDX-License-Identifier: Apache-2.0
// What the gda path posts: WRITE, READ, FETCH_ADD and, for a counter, a WAIT and a FETCH_ADD to our own
// counter on the queue's companion. All sharing modes write their entries in one place, so that a put of one
// thread's queue is short; only taking and publishing differ.
#pragma once

#include <type_traits>

#include "marrow/device/detail/gda_producer.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail::gda {

MARROW_DEVICE GdaQueue& queue_of(const DeviceCommunicator& comm, int context, int peer) {
  auto* queues = reinterpret_cast<GdaQueue*>(const_cast<GdaDevice*>(comm.gda) + 1);
  return queues[context * comm.nranks + peer];
}

MARROW_DEVICE void write_add(const DeviceCommunicator& comm, const Hot& hot, std::uint64_t index,
                             int context, int peer, const Then& then) {
  const GdaQueue& q = queue_of(comm, context, peer);
  Wqe(hot, index)
      .fetch_add(load_constant(then.window->gda_base + peer) + then.offset,
                 load_constant(then.window->gda_rkey + peer), then.n, q.sink, q.sink_lkey);
}

/// Which lanes post together: for a Thread only itself (a shared queue finds out), for EachLane the warp.
template <class Coop>
struct Lanes {
  static constexpr bool kTogether = std::is_same_v<Coop, EachLane>;
  static MARROW_DEVICE std::uint32_t mask() { return kTogether ? full_mask() : 0; }
};

/// The operations. The sharing mode is the communicator's, or known when the kernel is compiled.
struct Operations {
  template <class Body>
  static MARROW_DEVICE auto by_sharing(Sharing sharing, Body&& body)
      -> decltype(body(Producer<Sharing::device>{})) {
    switch (sharing) {
      case Sharing::thread: return body(Producer<Sharing::thread>{});
      case Sharing::block: return body(Producer<Sharing::block>{});
      default: return body(Producer<Sharing::device>{});
    }
  }

  /// Posts data() + more entries: write(hot, index, i) writes the i-th of data(), with the last one also the
  /// `more` (0 or 1) behind it, and says whether it was the last. Counts when the last of data() has completed.
  /// @param first  if not null: the index of the first entry
  /// @return not ok: nothing was posted
  template <class Coop, class Data, class Write>
  static MARROW_DEVICE Status submit(const DeviceCommunicator& comm, Sharing sharing, int context,
                                     int peer, Data&& data, std::uint32_t more, const Knobs& knobs,
                                     Write&& write, std::uint64_t* first = nullptr) {
    GdaQueue& q = queue_of(comm, context, peer);
    if constexpr (Lanes<Coop>::kTogether) {
      return together(comm, sharing, context, peer, q, 1 + more, knobs, write);
    } else {
      if (knobs.counter >= 0) {
        return by_sharing(sharing, [&](auto queue) {
          return counted<decltype(queue)>(comm, peer, q, data(), more, knobs, write);
        });
      }
      switch (sharing) {
        case Sharing::thread: return alone(comm, peer, q, data, more, knobs, write, first);
        case Sharing::block:
          return shared<Sharing::block>(comm, peer, q, data(), more, knobs, write, first, 0);
        default:
          return shared<Sharing::device>(comm, peer, q, data(), more, knobs, write, first, 0);
      }
    }
  }

  /// A queue of one thread. One turn of the loop an entry, so that nothing but its number is kept: a wait for
  /// room and a put of many GiB cost no registers that a short put would pay for.
  template <class Data, class Write>
  static MARROW_DEVICE Status alone(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                    Data&& data, std::uint32_t more, const Knobs& knobs,
                                    Write&& write, std::uint64_t* first) {
    using Own = Producer<Sharing::thread>;
    const std::uint32_t n = kept(std::uint32_t{data()});
    std::uint32_t i = 0;
    for (;;) {
      const Hot hot(q);
      const std::uint64_t at = q.reserved_index;
      // All have room before the first is written. A put from 16 GiB on has none in the smallest ring of 32,
      // from 512 GiB on in the default one.
      if (i == 0 && n > hot.mask() >> 1) return Status::invalid;
      if (i == 0 && !Own::has_room(q, hot.mask(), at + n + more)) {
        const Status status = Own::wait_here(comm, peer, q, n + more, knobs.deadline);
        if (status != Status::ok) return status;
        continue;
      }
      if (!write(hot, at, i)) {
        ++i;
        q.reserved_index = at + 1;
        continue;
      }
      if (first) *first = at - i;
      Own::publish_own(hot, q, at - i, at + 1 + more, knobs.doorbell == Doorbell::now);
      return Status::ok;
    }
  }

  static constexpr Status kLongWay = Status::invalid;
  /// The short way of a put: what it reads is under way at once, since each access takes a lone thread 35
  /// cycles, or 300 after an acquire. Nothing has been posted when the answer is no.
  /// @param plain  whether context, peer and handles may be used; no: the answer is no
  /// @param bytes  1 .. kChunkBytes, unless Coop is EachLane
  /// @param word   what SignalAdd adds to, an offset in `sync`; kActs: there is one
  /// @return ok, timeout (as Producer::in_line), or kLongWay: the peer is on another path, there is no room,
  ///         or the long way is as good
  template <class Coop, bool kActs>
  static MARROW_DEVICE Status put_directly(bool plain, const DeviceCommunicator& comm,
                                           const Context& context, int peer,
                                           const WindowHandle& window, std::uint64_t offset,
                                           std::uint64_t local, std::uint32_t lkey,
                                           std::uint64_t bytes, const WindowHandle& sync,
                                           std::uint64_t word, std::uint64_t add, bool now) {
    GdaQueue& q = queue_of(comm, context, peer);
    Short put;
    // All ones if the peer is on another path. The host may mask the peer meanwhile: a loop looks again.
    put.valid = plain;
    put.elsewhere =
        load_ahead(plain, comm.path + peer) == static_cast<std::uint8_t>(Path::gda) ? 0 : -1;
    put.hot = load_fixed(plain, reinterpret_cast<const Cell16*>(&q));
    put.remote = load_fixed(plain, window.gda_base + peer) + offset;
    put.rkey = load_fixed(plain, window.gda_rkey + peer);
    if constexpr (kActs) {
      put.word = load_fixed(plain, sync.gda_base + peer) + word;
      put.word_rkey = load_fixed(plain, sync.gda_rkey + peer);
      put.sink = load_fixed(plain, &q.sink);
      put.sink_lkey = load_fixed(plain, &q.sink_lkey);
      put.add = add;
    }
    put.local = local;
    // A parameter of the kernel: as an operand of an addition it costs nothing, loading it 30 cycles.
    put.lkey = lkey + static_cast<std::uint32_t>(put.elsewhere);
    put.bytes = static_cast<std::uint32_t>(bytes);
    // Of EachLane every lane has a length of its own: they agree where they must meet anyway.
    if constexpr (Lanes<Coop>::kTogether) put.elsewhere |= bytes - 1 < kChunkBytes ? 0 : -1;
    if (!plain) {
      // A lane of EachLane may be the only one; the others ask in put_own or put_shared.
      if constexpr (Lanes<Coop>::kTogether) (void)warp_ballot(full_mask(), true);
      return kLongWay;
    }
    switch (context.sharing) {
      case Sharing::thread: return put_own<Coop, kActs>(q, put, now) ? Status::ok : kLongWay;
      case Sharing::block:
        return put_shared<Sharing::block, Coop, kActs>(q, put, now, comm.wait_ns);
      default: return put_shared<Sharing::device, Coop, kActs>(q, put, now, comm.wait_ns);
    }
  }
  struct Short {
    bool valid;
    std::int32_t elsewhere;
    Cell16 hot;
    std::uint64_t remote, local, word, sink, add;
    std::uint32_t rkey, lkey, bytes, word_rkey, sink_lkey;
    template <bool kActs>
    MARROW_DEVICE void write(const Hot& at_queue, std::uint64_t at, std::int32_t sign) const {
      WqeWriter<true>(at_queue, at, sign).transfer(mlx5::kWrite, remote, rkey, local, lkey, bytes);
      if constexpr (kActs)
        WqeWriter<true>(at_queue, at + 1, sign).fetch_add(word, word_rkey, add, sink, sink_lkey);
    }
  };

  template <class Coop, bool kActs>
  static MARROW_DEVICE bool put_own(GdaQueue& q, const Short& put, bool now) {
    using Own = Producer<Sharing::thread>;
    constexpr bool kTogether = Lanes<Coop>::kTogether;
    constexpr std::uint32_t kEach = kActs ? 2 : 1;
    const std::uint64_t begin = load_data_ahead(&q.reserved_index);
    const Hot hot(put.hot);
    std::uint32_t lanes = 1;
    std::uint64_t at = begin;
    if constexpr (kTogether) {
      const std::uint32_t mask = full_mask();
      lanes = static_cast<std::uint32_t>(count_lanes(mask));
      at += static_cast<std::uint32_t>(count_lanes(mask & ((1u << lane_index()) - 1))) * kEach;
    }
    const std::uint64_t end = begin + lanes * kEach;
    // Negative: elsewhere, a queue whose reader is not of this GPU, or no room.
    std::int32_t sign = put.elsewhere | -static_cast<std::int32_t>(hot.wide());
#if !defined(MARROW_MEASURE_WITHOUT_ROOM_CHECK)
    sign |= static_cast<std::int32_t>(
        (load_data_ahead(&q.completed_index) + hot.mask() + 1 - end) >> 32);
#endif
    if constexpr (kTogether) sign |= lanes * kEach > (hot.mask() + 1) >> 1 ? -1 : 0;
    put.template write<kActs>(hot, at, sign);
    const bool no = kTogether ? warp_ballot(full_mask(), sign < 0) != 0 : sign < 0;
    if (__builtin_expect(no, false)) return false;
    const Bell bell(load_fixed(put.valid, reinterpret_cast<const Cell16*>(&q) + 1));
    if constexpr (kTogether) {
      warp_sync(full_mask());  // the lanes' entries, and their reads of the index, happen before
      if (at == begin) Own::template ring_own<RingScope::device>(hot, bell, q, begin, end, now);
      warp_sync(full_mask());  // the index is the new one for whoever of us posts next
    } else {
      Own::template ring_own<RingScope::device>(hot, bell, q, begin, end, now);
    }
    return true;
  }

  template <Sharing kSharing, class Coop, bool kActs>
  static MARROW_DEVICE Status put_shared(GdaQueue& q, const Short& put, bool now,
                                         std::uint64_t wait_ns) {
    using Queue = Producer<kSharing>;
    constexpr std::uint32_t kEach = kActs ? 2 : 1;
    const typename Queue::Guess guess(q);
    const Bell bell(load_fixed(put.valid, reinterpret_cast<const Cell16*>(&q) + 1));
    const Hot hot(put.hot);
    bool no = put.elsewhere != 0;
    if constexpr (Lanes<Coop>::kTogether) {
      // More than the ring takes at once: the long way posts one lane after the other.
      const std::uint32_t mask = full_mask();
      const std::uint32_t total = static_cast<std::uint32_t>(count_lanes(mask)) * kEach;
      no = warp_ballot(mask, no | (total > (hot.mask() + 1) >> 1)) != 0;
    }
    if (__builtin_expect(no, false)) return kLongWay;
    if constexpr (!Lanes<Coop>::kTogether) {
      if (converged_lanes() == 1u << lane_index()) {  // a lone thread: nothing to agree about
        bool turn = true;
        std::uint64_t at = guess.index;
        if (__builtin_expect(!Queue::take_guess(q, hot.mask(), guess, kEach), false)) {
          turn = false;
          at = Queue::take_range(q, hot.mask(), kEach);
          if (at == kNoRoom) return kLongWay;
        }
        put.template write<kActs>(hot, at, 0);
        if (__builtin_expect(turn, true)) {
          Queue::template in_turn<RingScope::loop>(hot, bell, q, at, at + kEach, now, false);
        } else {
          return Queue::in_line(q, at, at + kEach, now, Queue::patience(wait_ns));
        }
        return Status::ok;
      }
    }
    const Range range = Queue::take_here(q, hot.mask(), guess, kEach, Lanes<Coop>::mask());
    if (__builtin_expect(range.at == kNoRoom, false)) return kLongWay;
    put.template write<kActs>(hot, range.at, 0);
    return Queue::template publish_here<RingScope::loop>(hot, bell, q, range.at, kEach, range.group,
                                                         range.role, now, Queue::patience(wait_ns));
  }

  /// A shared queue.
  /// @param lanes  as in take
  template <Sharing kSharing, class Write>
  static MARROW_DEVICE Status shared(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                     std::uint32_t data, std::uint32_t more, const Knobs& knobs,
                                     Write&& write, std::uint64_t* first, std::uint32_t lanes) {
    using Queue = Producer<kSharing>;
    const std::uint32_t n = data + more;
    if (data > Hot(q).mask() >> 1) return Status::invalid;
    Range range = Queue::take(q, n, lanes);
    if (range.at == kNoRoom) {
      WaitWords words = wait_words(comm);
      if (knobs.deadline.ns) words.wait_ns = knobs.deadline.ns;
      range = Queue::take_waiting(words, peer, q, n, range.group);
      if (range.at == kNoRoom) return static_cast<Status>(range.role);
    }
    if (first) *first = range.at;
    write_all(Hot(q), range.at, data, write);
    return Queue::publish(q, range.at, n, range.group, range.role, knobs.doorbell == Doorbell::now,
                          Queue::patience(comm.wait_ns));
  }

  /// Every lane of the warp has one entry, or one and an add.
  template <class Write>
  static MARROW_DEVICE Status together(const DeviceCommunicator& comm, Sharing sharing, int context,
                                       int peer, GdaQueue& q, std::uint32_t n, const Knobs& knobs,
                                       Write&& write) {
    using Own = Producer<Sharing::thread>;
    const std::uint32_t mask = full_mask();
    const std::uint32_t total = n * static_cast<std::uint32_t>(count_lanes(mask));
    const Hot hot(q);
    if (total > (hot.mask() + 1) >> 1 || knobs.counter >= 0) {
      // Too many for the ring at once, or each with a counter of its own: one lane after the other.
      Status status = Status::ok;
      for (std::uint32_t left = mask; left; left &= left - 1) {
        if (lane_index() == lowest_lane(left))
          status = submit<Thread>(comm, sharing, context, peer, one, n - 1, knobs, write);
        warp_sync(mask);
      }
      return status;
    }
    if (sharing == Sharing::block)
      return shared<Sharing::block>(comm, peer, q, 1, n - 1, knobs, write, nullptr, mask);
    if (sharing == Sharing::device)
      return shared<Sharing::device>(comm, peer, q, 1, n - 1, knobs, write, nullptr, mask);
    const std::uint64_t begin = q.reserved_index;
    if (!Own::has_room(q, hot.mask(), begin + total)) {
      warp_sync(mask);  // all have read what the lowest lane may change
      Status status = Status::ok;
      if (lane_index() == lowest_lane(mask))
        status = Own::wait_here(comm, peer, q, total, knobs.deadline);
      status = static_cast<Status>(
          warp_shuffle(mask, static_cast<std::uint32_t>(status), lowest_lane(mask)));
      if (status != Status::ok) return status;
    }
    const std::uint32_t below = mask & ((1u << lane_index()) - 1);
    write(hot, begin + static_cast<std::uint32_t>(count_lanes(below)) * n, 0);
    warp_sync(mask);  // the lanes' entries, and their reads of the index, happen before
    if (below == 0) Own::publish_own(hot, q, begin, begin + total, knobs.doorbell == Doorbell::now);
    warp_sync(mask);  // the index is the new one for whoever of us posts next
    return Status::ok;
  }

  template <class Write>
  static MARROW_DEVICE void write_all(const Hot& hot, std::uint64_t at, std::uint32_t data,
                                      Write&& write) {
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (std::uint32_t i = 0; i < data; ++i) (void)write(hot, at + i, i);
  }
  static MARROW_DEVICE std::uint32_t one() { return 1; }

  /// The companion's entries are reserved first: should the queue have no room before the deadline, they
  /// become NOPs and nothing was posted. Those behind us in the companion's line wait for us meanwhile, and
  /// give up after Producer::patience; so we hold them for half of that at most, then try anew.
  template <class Queue, class Write>
  static MARROW_DEVICE Status counted(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                      std::uint32_t data, std::uint32_t more, const Knobs& knobs,
                                      Write&& write) {
    if (data > Hot(q).mask() >> 1) return Status::invalid;
    Deadline deadline = knobs.deadline;
    if (Queue::kExclusive || deadline.ns <= comm.wait_ns)
      return counted_once<Queue>(comm, peer, q, data, more, knobs, deadline, write);
    const std::uint64_t start = now_ns();
    for (;;) {
      const Deadline turn{deadline.ns < comm.wait_ns ? deadline.ns : comm.wait_ns};
      const Status status = counted_once<Queue>(comm, peer, q, data, more, knobs, turn, write);
      const std::uint64_t passed = now_ns() - start;
      if (status != Status::timeout || passed >= knobs.deadline.ns) return status;
      deadline.ns = knobs.deadline.ns - passed;
    }
  }
  template <class Queue, class Write>
  static MARROW_DEVICE Status counted_once(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                           std::uint32_t data, std::uint32_t more,
                                           const Knobs& knobs, Deadline deadline, Write&& write) {
    GdaQueue& companion = *(&q + comm.gda->companion);
    const std::uint32_t patience = Queue::patience(comm.wait_ns);
    Range behind;
    Range range;
    Status status = Queue::take_alone(wait_words(comm), peer, companion, 2, deadline, &behind, &q);
    if (status != Status::ok) return status;
    const Hot hot(companion);
    status = Queue::take_alone(wait_words(comm), peer, q, data + more, deadline, &range);
    if (status == Status::ok) {
      write_all(Hot(q), range.at, data, write);
      status =
          Queue::publish_alone(q, range, data + more, knobs.doorbell == Doorbell::now, patience);
    }
    if (status == Status::ok) {
      Wqe(hot, behind.at).wait(q.cqn, range.at + data - 1);
      Wqe(hot, behind.at + 1)
          .fetch_add(comm.gda->counter_base + static_cast<std::uint64_t>(knobs.counter) * 8,
                     comm.gda->counter_rkey, 1, companion.sink, companion.sink_lkey);
    } else {
      Wqe(hot, behind.at).nop();
      Wqe(hot, behind.at + 1).nop();
    }
    return worse(status, Queue::publish_alone(companion, behind, 2, true, patience));
  }

  /// WRITE or READ of any length, then an add.
  template <class Coop = Thread>
  static MARROW_DEVICE Status transfer(const DeviceCommunicator& comm, Sharing sharing, int context,
                                       int peer, const WindowHandle& window, std::uint64_t offset,
                                       const Region& ours, std::uint64_t our_offset,
                                       std::uint64_t bytes, bool is_read, const Then& then,
                                       const Knobs& knobs) {
    const bool acts = then.window != nullptr;
    if constexpr (!Lanes<Coop>::kTogether) {
      if (bytes == 0) {
        if (acts) return add(comm, sharing, context, peer, then, knobs);
        if (knobs.counter < 0) return Status::ok;
      }
    }  // else at most kChunkBytes: the lanes have agreed on that
    return submit<Coop>(
        comm, sharing, context, peer,
        [&] {
          if (bytes <= kChunkBytes) return 1u;
          return bytes >> 46 ? 65536u : static_cast<std::uint32_t>((bytes - 1) >> kChunkShift) + 1;
        },
        acts, knobs,
        [&](const Hot& q, std::uint64_t at, std::uint32_t i) {
          const std::uint64_t done = static_cast<std::uint64_t>(i) << kChunkShift;
          const std::uint64_t left = bytes - done;
          const bool last = left <= kChunkBytes;
          if (bytes == 0) {
            Wqe(q, at).nop();
          } else {
            Wqe(q, at).transfer(is_read ? mlx5::kRead : mlx5::kWrite,
                                load_constant(window.gda_base + peer) + offset + done,
                                load_constant(window.gda_rkey + peer),
                                ours.gda_local + our_offset + done, ours.gda_lkey,
                                static_cast<std::uint32_t>(last ? left : kChunkBytes));
          }
          if (acts && last) write_add(comm, q, at + 1, context, peer, then);
          return last;
        });
  }

  template <class Coop = Thread>
  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, Sharing sharing,
                                        int context, int peer, const WindowHandle& window,
                                        std::uint64_t offset, const void* value,
                                        std::uint32_t bytes, const Then& then, const Knobs& knobs) {
    const bool acts = then.window != nullptr;
    return submit<Coop>(
        comm, sharing, context, peer, one, acts, knobs,
        [&](const Hot& q, std::uint64_t at, std::uint32_t) {
          std::uint32_t payload[7] = {};
          const auto* from = static_cast<const std::uint8_t*>(value);
          for (std::uint32_t i = 0; i < 24; ++i) {
            if (i < bytes) payload[i >> 2] |= static_cast<std::uint32_t>(from[i]) << (8 * (i & 3));
          }
          Wqe(q, at).write_inline(load_constant(window.gda_base + peer) + offset,
                                  load_constant(window.gda_rkey + peer), payload, bytes);
          if (acts) write_add(comm, q, at + 1, context, peer, then);
          return true;
        });
  }

  template <class Coop = Thread>
  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, Sharing sharing, int context,
                                  int peer, const Then& then, const Knobs& knobs) {
    return submit<Coop>(comm, sharing, context, peer, one, 0, knobs,
                        [&](const Hot& q, std::uint64_t at, std::uint32_t) {
                          write_add(comm, q, at, context, peer, then);
                          return true;
                        });
  }
};

}  // namespace detail::gda
}  // namespace cpu_device / gpu_device
}  // namespace marrow
