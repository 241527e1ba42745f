// SPDX-License-Identifier: Apache-2.0
// The gda path: the calling thread writes work-queue entries and rings the NIC. One RC queue pair per
// (context, peer), so the NIC itself orders a signal (FETCH_ADD) after the WRITEs before it; no fence
// between them. A put is WRITE, put + signal is WRITE and FETCH_ADD with one doorbell.
#pragma once

#include "marrow/device/detail/gda_operations.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

namespace gda {

/// The operations that wait, for one sharing mode.
template <Sharing kSharing>
struct Waits {
  using Queue = Producer<kSharing>;

  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, int context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    GdaQueue& q = queue_of(comm, context, peer);
    int slot = 0;
    Status status = take_result(wait_words(comm), peer, q, knobs.deadline, &slot);
    if (status != Status::ok) return status;
    std::uint64_t first = 0;
    status = Operations::submit<Thread>(
        comm, kSharing, context, peer, Operations::one, 0, at_once(knobs),
        [&](const Hot& hot, std::uint64_t at, std::uint32_t) {
          const std::uint64_t remote = load_constant(op.window.gda_base + peer) + op.offset;
          const std::uint32_t rkey = load_constant(op.window.gda_rkey + peer);
          const std::uint64_t local = q.sink + 8 + static_cast<std::uint64_t>(slot) * 8;
          if (op.swap) {
            Wqe(hot, at).compare_swap(remote, rkey, op.operand, op.compare, local, q.sink_lkey);
          } else {
            Wqe(hot, at).fetch_add(remote, rkey, op.operand, local, q.sink_lkey);
          }
          return true;
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
    if (!Queue::kExclusive && status == Status::timeout)
      Queue::ring_deferred(wait_words(comm), q, ticket);
    return status;
  }

  static MARROW_DEVICE Status wait(const DeviceCommunicator& comm, int context, int peer,
                                   Ticket ticket, Deadline deadline) {
    return wait_for<true>(wait_words(comm), peer, queue_of(comm, context, peer), ticket, deadline);
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
    Status status = Operations::submit<Thread>(
        comm, kSharing, context, peer, [&] { return reads; }, 0, at_once(knobs),
        [&](const Hot& hot, std::uint64_t at, std::uint32_t i) {
          const WindowHandle& sync = comm.sync[static_cast<int>(Path::gda)];
          const std::uint64_t* base = both ? comm.gda->fence_base[i] : sync.gda_base;
          const std::uint32_t* rkey = both ? comm.gda->fence_rkey[i] : sync.gda_rkey;
          Wqe(hot, at).transfer(mlx5::kRead, load_constant(base + peer), load_constant(rkey + peer),
                                q.sink, q.sink_lkey, 8);
          return i + 1 == reads;
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
  static MARROW_DEVICE Knobs at_once(const Knobs& knobs) {
    Knobs own;
    own.deadline = knobs.deadline;
    return own;
  }

  /// Waits until all WQEs below `wanted` have completed.
  /// @tparam kRings  sees to it that those of a shared queue whose doorbell was deferred are rung
  template <bool kRings = false>
  static MARROW_DEVICE_COLD Status wait_for(WaitWords comm, int peer, GdaQueue& q,
                                            std::uint64_t wanted, Deadline deadline) {
    if (Queue::kExclusive && q.completed_index >= wanted) return Status::ok;
    const typename Queue::Ring ring(q);
    Status seen = Status::timeout;
    const Status waited = wait_until(
        comm, deadline,
        [&] {
          if constexpr (Queue::kExclusive) {
            seen = Queue::poll_at(ring, q, wanted);  // nobody else raises completed_index
          } else {
            seen = Queue::test_at(ring, q, wanted);
            if (kRings && seen == Status::timeout) Queue::ring_deferred(comm, q, wanted);
          }
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
  static MARROW_DEVICE auto by_sharing(Sharing sharing, Body&& body)
      -> decltype(body(gda::Waits<Sharing::device>{})) {
    switch (sharing) {
      case Sharing::thread: return body(gda::Waits<Sharing::thread>{});
      case Sharing::block: return body(gda::Waits<Sharing::block>{});
      default: return body(gda::Waits<Sharing::device>{});
    }
  }

 public:
  static constexpr Path kPath = Path::gda;

  template <class Coop = Thread>
  static MARROW_DEVICE Status put(const DeviceCommunicator& comm, Context context, const PutOp& op,
                                  const Then& then, const Knobs& knobs, const Coop& = {}) {
    return gda::Operations::transfer<Coop>(comm, context.sharing, context, op.peer, op.window,
                                           op.offset, op.source, op.source_offset, op.bytes, false,
                                           then, knobs);
  }

  template <class Coop = Thread>
  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, Context context, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs, const Coop& = {}) {
    return gda::Operations::put_value<Coop>(comm, context.sharing, context, peer, window, offset,
                                            value, bytes, then, knobs);
  }

  template <class Coop = Thread>
  static MARROW_DEVICE Status get(const DeviceCommunicator& comm, Context context, const GetOp& op,
                                  const Knobs& knobs, const Coop& = {}) {
    return gda::Operations::transfer<Coop>(comm, context.sharing, context, op.peer, op.window,
                                           op.offset, op.target, op.target_offset, op.bytes, true,
                                           Then{}, knobs);
  }

  template <class Coop = Thread>
  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, Context context, int peer,
                                  const Then& then, const Knobs& knobs, const Coop& = {}) {
    return gda::Operations::add<Coop>(comm, context.sharing, context, peer, then, knobs);
  }

  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, Context context, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs& knobs) {
    return by_sharing(context.sharing,
                      [&](auto on) { return on.fetch(comm, context, peer, op, old, knobs); });
  }

  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator& comm, Context context, int peer) {
    return by_sharing(context.sharing, [&](auto on) { return on.ticket(comm, context, peer); });
  }

  static MARROW_DEVICE Status test(const DeviceCommunicator& comm, Context context, int peer,
                                   Ticket ticket) {
    return by_sharing(context.sharing,
                      [&](auto on) { return on.test(comm, context, peer, ticket); });
  }

  /// As test, until it is not timeout or the deadline passes.
  static MARROW_DEVICE Status wait(const DeviceCommunicator& comm, Context context, int peer,
                                   Ticket ticket, Deadline deadline) {
    return by_sharing(context.sharing,
                      [&](auto on) { return on.wait(comm, context, peer, ticket, deadline); });
  }

  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator& comm, Context context,
                                           int peer, const Knobs& knobs) {
    return by_sharing(context.sharing,
                      [&](auto on) { return on.flush_remote(comm, context, peer, knobs); });
  }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
