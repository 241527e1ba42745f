// SPDX-License-Identifier: Apache-2.0
// The gda path: the calling thread writes work-queue entries and rings the NIC. One RC queue pair per
// (context, peer), so the NIC itself orders a signal (FETCH_ADD) after the WRITEs before it; no fence
// between them. A put is WRITE, put + signal is WRITE and FETCH_ADD with one doorbell. A counter is a
// WAIT and a FETCH_ADD to our own counter on the queue's companion.
#pragma once

#include "marrow/device/detail/gda_producer.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

namespace gda {

MARROW_DEVICE GdaQueue& queue_of(const DeviceCommunicator& comm, int context, int peer) {
  auto* queues = reinterpret_cast<GdaQueue*>(const_cast<GdaDevice*>(comm.gda) + 1);
  return queues[context * comm.nranks + peer];
}

MARROW_DEVICE void write_add(const GdaQueue& q, std::uint64_t index, int peer, const Then& then) {
  Wqe(q, index).fetch_add(load_cached(then.window->gda_base + peer) + then.offset,
                          load_cached(then.window->gda_rkey + peer), then.n, q.sink, q.sink_lkey);
}

/// The operations, for one sharing mode.
template <Sharing kSharing>
struct Operations {
  using Queue = Producer<kSharing>;

  /// Posts n entries, and counts when the last of the first `data` of them has completed.
  template <class Build>
  static MARROW_DEVICE Status submit(const DeviceCommunicator& comm, int context, int peer,
                                     std::uint32_t n, std::uint32_t data, const Knobs& knobs,
                                     Build&& build) {
    GdaQueue& q = queue_of(comm, context, peer);
    const PostKnobs post{knobs.deadline, knobs.doorbell == Doorbell::now};
    if (knobs.counter < 0) return Queue::post(wait_words(comm), peer, q, n, post, build);
    return counted(comm, peer, q, n, data, knobs.counter, post, build);
  }

  /// The companion's entries are reserved first: should the queue have no room before the deadline, they
  /// become NOPs and nothing was posted.
  template <class Build>
  static MARROW_DEVICE Status counted(const DeviceCommunicator& comm, int peer, GdaQueue& q,
                                      std::uint32_t n, std::uint32_t data, int counter,
                                      const PostKnobs& knobs, Build&& build) {
    GdaQueue& companion = *(&q + comm.gda->companion);
    std::uint64_t behind = 0;
    std::uint64_t at = 0;
    Status status =
        Queue::reserve(wait_words(comm), peer, companion, 2, knobs.deadline, &behind, &q);
    if (status != Status::ok) return status;
    status = Queue::reserve(wait_words(comm), peer, q, n, knobs.deadline, &at);
    if (status == Status::ok) {
      build(q, at);
      Queue::publish(wait_words(comm), q, at, at + n, knobs.now);
      Wqe(companion, behind).wait(q.cqn, at + data - 1);
      Wqe(companion, behind + 1)
          .fetch_add(comm.gda->counter_base + static_cast<std::uint64_t>(counter) * 8,
                     comm.gda->counter_rkey, 1, companion.sink, companion.sink_lkey);
    } else {
      Wqe(companion, behind).nop();
      Wqe(companion, behind + 1).nop();
    }
    Queue::publish(wait_words(comm), companion, behind, behind + 2, true);
    return status;
  }

  /// WRITE or READ of any length, then an add.
  static MARROW_DEVICE Status transfer(const DeviceCommunicator& comm, int context, int peer,
                                       const WindowHandle& window, std::uint64_t offset,
                                       const Region& ours, std::uint64_t our_offset,
                                       std::uint64_t bytes, bool is_read, const Then& then,
                                       const Knobs& knobs) {
    const bool acts = then.window != nullptr;
    if (bytes == 0) {
      if (acts) return add(comm, context, peer, then, knobs);
      if (knobs.counter < 0) return Status::ok;
      return submit(comm, context, peer, 1, 1, knobs,
                    [&](const GdaQueue& q, std::uint64_t at) { Wqe(q, at).nop(); });
    }
    std::uint32_t data = 1;
    if (bytes > kChunkBytes) {
      const std::uint64_t chunks = (bytes + kChunkBytes - 1) >> kChunkShift;
      // From 16 GiB on with the smallest ring of 32, 512 GiB with the default one.
      if (chunks >= (queue_of(comm, context, peer).mask + 1) >> 1) return Status::invalid;
      data = static_cast<std::uint32_t>(chunks);
    }
    return submit(comm, context, peer, data + acts, data, knobs,
                  [&](const GdaQueue& q, std::uint64_t at) {
                    const std::uint64_t remote = load_cached(window.gda_base + peer) + offset;
                    const std::uint32_t rkey = load_cached(window.gda_rkey + peer);
                    if (data > 1) {
                      at = write_chunks(q, at, remote, rkey, ours.gda_local + our_offset,
                                        ours.gda_lkey, bytes, is_read);
                    } else if (is_read) {
                      Wqe(q, at++).read(remote, rkey, ours.gda_local + our_offset, ours.gda_lkey,
                                        static_cast<std::uint32_t>(bytes));
                    } else {
                      Wqe(q, at++).write(remote, rkey, ours.gda_local + our_offset, ours.gda_lkey,
                                         static_cast<std::uint32_t>(bytes));
                    }
                    if (acts) write_add(q, at, peer, then);
                  });
  }

  /// More than 1 GiB. @return the index behind the last chunk
  static MARROW_DEVICE_COLD std::uint64_t write_chunks(const GdaQueue& q, std::uint64_t at,
                                                       std::uint64_t remote, std::uint32_t rkey,
                                                       std::uint64_t local, std::uint32_t lkey,
                                                       std::uint64_t bytes, bool is_read) {
    while (bytes) {
      const auto now = static_cast<std::uint32_t>(bytes < kChunkBytes ? bytes : kChunkBytes);
      if (is_read) {
        Wqe(q, at++).read(remote, rkey, local, lkey, now);
      } else {
        Wqe(q, at++).write(remote, rkey, local, lkey, now);
      }
      bytes -= now;
      remote += now;
      local += now;
    }
    return at;
  }

  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, int context, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs) {
    const bool acts = then.window != nullptr;
    return submit(comm, context, peer, acts ? 2 : 1, 1, knobs,
                  [&](const GdaQueue& q, std::uint64_t at) {
                    std::uint32_t payload[7] = {};
                    const auto* from = static_cast<const std::uint8_t*>(value);
                    for (std::uint32_t i = 0; i < 24; ++i) {
                      if (i < bytes)
                        payload[i >> 2] |= static_cast<std::uint32_t>(from[i]) << (8 * (i & 3));
                    }
                    Wqe(q, at).write_inline(load_cached(window.gda_base + peer) + offset,
                                            load_cached(window.gda_rkey + peer), payload, bytes);
                    if (acts) write_add(q, at + 1, peer, then);
                  });
  }

  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, int context, int peer,
                                  const Then& then, const Knobs& knobs) {
    return submit(comm, context, peer, 1, 1, knobs,
                  [&](const GdaQueue& q, std::uint64_t at) { write_add(q, at, peer, then); });
  }

  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, int context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    GdaQueue& q = queue_of(comm, context, peer);
    int slot = 0;
    Status status = take_result(wait_words(comm), peer, q, knobs.deadline, &slot);
    if (status != Status::ok) return status;
    std::uint64_t first = 0;
    status = Queue::post(
        wait_words(comm), peer, q, 1, PostKnobs{knobs.deadline, true},
        [&](const GdaQueue&, std::uint64_t at) {
          const std::uint64_t remote = load_cached(op.window.gda_base + peer) + op.offset;
          const std::uint32_t rkey = load_cached(op.window.gda_rkey + peer);
          const std::uint64_t local = q.sink + 8 + static_cast<std::uint64_t>(slot) * 8;
          if (op.swap) {
            Wqe(q, at).compare_swap(remote, rkey, op.operand, op.compare, local, q.sink_lkey);
          } else {
            Wqe(q, at).fetch_add(remote, rkey, op.operand, local, q.sink_lkey);
          }
        },
        &first);
    if (status != Status::ok) {
      give_result(q, slot, 0);
      return status;
    }
    status = wait_for(wait_words(comm), peer, q, first + 1, knobs.deadline);
    // The NIC's store of the old value happens before its completion entry, which wait_for acquired.
    if (status == Status::ok) *old = load_relaxed<Scope::system>(q.result + slot);
    give_result(q, slot, status == Status::ok ? 0 : first + 1);
    return status;
  }

  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator& comm, int context, int peer) {
    GdaQueue& q = queue_of(comm, context, peer);
    const std::uint64_t end = Queue::end(q);
    Queue::ring_deferred(wait_words(comm), q, end);
    return end;
  }

  static MARROW_DEVICE Status test(const DeviceCommunicator& comm, int context, int peer,
                                   Ticket ticket) {
    GdaQueue& q = queue_of(comm, context, peer);
    const Status status = Queue::test(q, ticket);
    if (kSharing != Sharing::thread && status == Status::timeout)
      Queue::ring_deferred(wait_words(comm), q, ticket);
    return status;
  }

  /// One READ of 8 bytes of each of the peer's memories that the NIC writes to: the responder executes it
  /// after our WRITEs and adds, and it pushes them out of every buffer on the way to that memory. A WRITE's
  /// own completion proves an acknowledgement only.
  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator& comm, int context, int peer,
                                           const Knobs& knobs) {
    GdaQueue& q = queue_of(comm, context, peer);
    const std::uint64_t end = Queue::end(q);
    // Acquire: meets publish_max below, another thread's flush_remote covers what we posted before it.
    const std::uint64_t fenced =
        Queue::kExclusive ? q.fenced_index : observe<Queue::kScope>(&q.fenced_index);
    if (fenced >= end) return Status::ok;  // nothing was posted since
    const bool both = comm.gda->fence_base[0] != nullptr;
    const std::uint32_t reads = both ? 2 : 1;
    std::uint64_t first = 0;
    Status status = Queue::post(
        wait_words(comm), peer, q, reads, PostKnobs{knobs.deadline, true},
        [&](const GdaQueue&, std::uint64_t at) {
          const WindowHandle& sync = comm.sync[static_cast<int>(Path::gda)];
          for (std::uint32_t i = 0; i < reads; ++i) {
            const std::uint64_t* base = both ? comm.gda->fence_base[i] : sync.gda_base;
            const std::uint32_t* rkey = both ? comm.gda->fence_rkey[i] : sync.gda_rkey;
            Wqe(q, at + i).read(load_cached(base + peer), load_cached(rkey + peer), q.sink,
                                q.sink_lkey, 8);
          }
        },
        &first);
    if (status == Status::ok)
      status = wait_for(wait_words(comm), peer, q, first + reads, knobs.deadline);
    if (status != Status::ok) return status;
    if constexpr (Queue::kExclusive) {
      q.fenced_index = first + reads;
    } else {
      publish_max<Queue::kScope>(&q.fenced_index, first + reads);
    }
    return Status::ok;
  }

 private:
  static MARROW_DEVICE_COLD Status wait_for(WaitWords comm, int peer, GdaQueue& q,
                                            std::uint64_t wanted, Deadline deadline) {
    Status seen = Status::timeout;
    const Status waited = wait_until(
        comm, deadline,
        [&] {
          seen = Queue::test(q, wanted);
          return seen != Status::timeout;
        },
        peer);
    return waited == Status::ok ? seen : waited;
  }

  /// A result slot nobody else reads and no late operation writes. A queue of one thread at a time has
  /// one operation in line, so slot 0 will do: an abandoned one completes before the next.
  static MARROW_DEVICE Status take_result(WaitWords comm, int peer, GdaQueue& q, Deadline deadline,
                                          int* slot) {
    if constexpr (Queue::kExclusive) {
      *slot = 0;
      return Status::ok;
    } else {
      return wait_until(
          comm, deadline,
          [&] {
            const std::uint64_t done = Queue::completed(q);
            for (int i = 0; i < kGdaResults; ++i) {
              // Acquire: meets give_result, the last reader's load happens before our operation's store.
              const std::uint64_t state = observe<Queue::kScope>(&q.result_state[i]);
              if (state == kGdaResultBusy || state > done) continue;
              if (compare_swap_relaxed<Queue::kScope>(&q.result_state[i], state, kGdaResultBusy) ==
                  state) {
                *slot = i;
                return true;
              }
            }
            return false;
          },
          peer);
    }
  }

  static MARROW_DEVICE void give_result(GdaQueue& q, int slot, std::uint64_t state) {
    if constexpr (!Queue::kExclusive) publish<Queue::kScope>(Store{&q.result_state[slot], state});
  }
};

}  // namespace gda

class PathGda {
  template <class Body>
  static MARROW_DEVICE auto by_sharing(const DeviceCommunicator& comm, Body&& body)
      -> decltype(body(gda::Operations<Sharing::device>{})) {
    switch (comm.sharing) {
      case Sharing::thread: return body(gda::Operations<Sharing::thread>{});
      case Sharing::block: return body(gda::Operations<Sharing::block>{});
      default: return body(gda::Operations<Sharing::device>{});
    }
  }

 public:
  static constexpr Path kPath = Path::gda;

  static MARROW_DEVICE Status put(const DeviceCommunicator& comm, int context, const PutOp& op,
                                  const Then& then, const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) {
      return on.transfer(comm, context, op.peer, op.window, op.offset, op.source, op.source_offset,
                         op.bytes, false, then, knobs);
    });
  }

  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, int context, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) {
      return on.put_value(comm, context, peer, window, offset, value, bytes, then, knobs);
    });
  }

  static MARROW_DEVICE Status get(const DeviceCommunicator& comm, int context, const GetOp& op,
                                  const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) {
      return on.transfer(comm, context, op.peer, op.window, op.offset, op.target, op.target_offset,
                         op.bytes, true, Then{}, knobs);
    });
  }

  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, int context, int peer,
                                  const Then& then, const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) { return on.add(comm, context, peer, then, knobs); });
  }

  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, int context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) { return on.fetch(comm, context, peer, op, old, knobs); });
  }

  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator& comm, int context, int peer) {
    return by_sharing(comm, [&](auto on) { return on.ticket(comm, context, peer); });
  }

  static MARROW_DEVICE Status test(const DeviceCommunicator& comm, int context, int peer,
                                   Ticket ticket) {
    return by_sharing(comm, [&](auto on) { return on.test(comm, context, peer, ticket); });
  }

  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator& comm, int context, int peer,
                                           const Knobs& knobs) {
    return by_sharing(comm, [&](auto on) { return on.flush_remote(comm, context, peer, knobs); });
  }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
