// SPDX-License-Identifier: Apache-2.0
// The lsa path: the peer's memory is mapped, the threads of the group store into it, and one release
// reduction signals. Nothing is queued, so tickets are always reached. The release is the dearest
// instruction here (0.54 us idle, 0.87 after a peer store, 6 us while NVLink is full).
#pragma once

#include "marrow/device/detail/operation.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
namespace detail {

struct PathLsa {
  static constexpr Path kPath = Path::lsa;

  static MARROW_DEVICE std::byte* address(const DeviceCommunicator& comm,
                                          const WindowHandle& window, int peer,
                                          std::uint64_t offset) {
    return reinterpret_cast<std::byte*>(lsa_base(comm, window, peer) + offset);
  }

  /// The whole group copies; member 0 signals after the group has met. The group has met before the
  /// call: the source's stores by other members happen before our loads.
  template <class Coop>
  static MARROW_DEVICE Status put(const DeviceCommunicator& comm, int, const PutOp& op,
                                  const Then& then, const Knobs& knobs, const Coop& coop) {
    move(address(comm, op.window, op.peer, op.offset), op.source.local + op.source_offset, op.bytes,
         knobs, coop);
    finish(comm, op.peer, then, knobs, coop);
    return Status::ok;
  }

  /// The same with everything known that there is to look up.
  /// @param value  the source, if it is 8 aligned bytes that the caller loaded already
  /// @param word   address of the signal
  template <bool kSignal, class Coop>
  static MARROW_DEVICE void put_directly(const DeviceCommunicator& comm, std::uint64_t to,
                                         const std::byte* from, std::uint64_t bytes, bool has_value,
                                         std::uint64_t value, std::uint64_t word, std::uint64_t n,
                                         const Knobs& knobs, const Coop& coop) {
    if (has_value && (to & 7) == 0) {
      if (coop.rank() == 0) store_plain(reinterpret_cast<std::uint64_t*>(to), value);
    } else {
      move(reinterpret_cast<std::byte*>(to), from, bytes, knobs, coop);
    }
    if (!kSignal && knobs.counter < 0) return;
    coop.sync();  // every member's share is stored before member 0 says so
    if (coop.rank() != 0) return;
    // Whatever the caller released came before the copy: its stores need a release of their own.
    if (kSignal) add_to(reinterpret_cast<std::uint64_t*>(word), n, Knobs{});
    count(comm, knobs);
  }

  template <class Coop>
  static MARROW_DEVICE Status put_value(const DeviceCommunicator& comm, int, int peer,
                                        const WindowHandle& window, std::uint64_t offset,
                                        const void* value, std::uint32_t bytes, const Then& then,
                                        const Knobs& knobs, const Coop& coop) {
    coop.sync();
    if (coop.rank() == 0) store_value(address(comm, window, peer, offset), value, bytes);
    finish(comm, peer, then, knobs, coop);
    return Status::ok;
  }

  template <class Coop>
  static MARROW_DEVICE Status get(const DeviceCommunicator& comm, int, const GetOp& op,
                                  const Knobs& knobs, const Coop& coop) {
    coop.sync();
    move(op.target.local + op.target_offset, address(comm, op.window, op.peer, op.offset), op.bytes,
         knobs, coop);
    finish(comm, op.peer, Then{}, knobs, coop);
    return Status::ok;
  }

  /// A reduction at system scope; strong ones release every store that happened before, whatever
  /// the context, and meet the acquire load of wait_signal at the peer.
  static MARROW_DEVICE Status add(const DeviceCommunicator& comm, int, int peer, const Then& then,
                                  const Knobs& knobs) {
    add_to(reinterpret_cast<std::uint64_t*>(address(comm, *then.window, peer, then.offset)), then.n,
           knobs);
    count(comm, knobs);
    return Status::ok;
  }

  static MARROW_DEVICE void add_to(std::uint64_t* word, std::uint64_t n, const Knobs& knobs) {
#if defined(MARROW_PLANT_PUT_SIGNAL)
    (void)knobs;
    add_relaxed<Scope::system>(word, n);  // planted bug: the release is missing
#else
    // The caller's own system release already covers the data. (The CPU device has no fence that
    // ThreadSanitizer sees, so there each add releases.)
    if (kOnGpu && knobs.ordering.released == Ordering::Released::system) {
      add_relaxed<Scope::system>(word, n);
    } else {
      publish_add<Scope::system>(word, n);
    }
#endif
  }

  static MARROW_DEVICE Status fetch(const DeviceCommunicator& comm, int, int peer,
                                    const FetchOp& op, std::uint64_t* old, const Knobs&) {
    auto* word = reinterpret_cast<std::uint64_t*>(address(comm, op.window, peer, op.offset));
    *old = op.swap ? compare_swap_relaxed<Scope::system>(word, op.compare, op.operand)
                   : fetch_add_relaxed<Scope::system>(word, op.operand);
    return Status::ok;
  }

  static MARROW_DEVICE Ticket ticket(const DeviceCommunicator&, int, int) { return 0; }
  static MARROW_DEVICE Status test(const DeviceCommunicator&, int, int, Ticket) {
    return Status::ok;
  }

  /// Cross-context fence: a later signal on another path or context may not overtake our stores.
  static MARROW_DEVICE Status flush_remote(const DeviceCommunicator&, int, int, const Knobs&) {
    settle<Scope::system>();
    return Status::ok;
  }

 private:
  template <class Coop>
  static MARROW_DEVICE void move(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                 const Knobs& knobs, const Coop& coop) {
    const auto rank = static_cast<unsigned>(coop.rank());
    const auto size = static_cast<unsigned>(coop.size());
    if (knobs.scratch.shared) {
      bulk_copy(to, from, bytes, knobs.scratch, rank, size);
    } else {
      copy(to, from, bytes, rank, size);
    }
  }

  template <class Coop>
  static MARROW_DEVICE void finish(const DeviceCommunicator& comm, int peer, const Then& then,
                                   const Knobs& knobs, const Coop& coop) {
    if (!then.window && knobs.counter < 0) return;
    coop.sync();  // every member's share is stored before member 0 says so
    if (coop.rank() != 0) return;
    // No knobs: what the caller released came before the copy, whose stores need a release too.
    if (then.window) (void)add(comm, 0, peer, then, Knobs{});
    count(comm, knobs);
  }

  static MARROW_DEVICE void count(const DeviceCommunicator& comm, const Knobs& knobs) {
    if (knobs.counter >= 0) publish_add<Scope::device>(comm.counter[0] + knobs.counter, 1);
  }

  /// 8-byte words at once where the target is aligned, so that a poller of one never sees half.
  static MARROW_DEVICE void store_value(std::byte* to, const void* value, std::uint32_t bytes) {
    auto* from = static_cast<const std::byte*>(value);
    std::uint32_t done = 0;
    if ((reinterpret_cast<std::uintptr_t>(to) & 7) == 0) {
      for (; done + 8 <= bytes; done += 8) {
        std::uint64_t word = 0;
        for (int i = 0; i < 8; ++i) word |= static_cast<std::uint64_t>(from[done + i]) << (8 * i);
        store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(to + done), word);
      }
    }
    for (; done < bytes; ++done) {
      store_relaxed<Scope::system>(reinterpret_cast<std::uint8_t*>(to + done),
                                   static_cast<std::uint8_t>(from[done]));
    }
  }
};

}  // namespace detail
}  // namespace cpu_device / gpu_device
}  // namespace marrow
