// SPDX-License-Identifier: Apache-2.0
// The only place that knows nvcc from g++. Device code is ordinary C++ on top of these names, so a
// kernel runs on the GPU and, as OS threads, on the CPU under ThreadSanitizer.
//
// Contract (bodies: platform/gpu.cuh, platform/cpu.cuh). S is the Scope of whoever reads.
//
//   position   block_index() block_identity() grid_size() thread_index() block_size() lane_index() warp_lanes()
//              dynamic_shared<T>(byte_offset)           block's shared memory, given at launch
//   groups     block_sync()  block_any(p)               all threads of the block
//              warp_sync(mask) warp_ballot(mask, p) warp_shuffle(mask, v, lane) warp_match(mask, v)
//              full_mask()  converged_lanes()           lanes that are here together (CPU: only oneself)
//   words      load_relaxed<S>(p) store_relaxed<S>(p, v) fetch_add_relaxed<S>(p, n)
//              add_relaxed<S>(p, n) fetch_max_relaxed<S>(p, v) compare_swap_relaxed<S>(p, expected, desired) -> old
//              load_cached(p)                           read-mostly tables; may lag until the next launch
//              load_constant(p) load_fixed(valid, p)    words (Cell16 too) that nobody writes while the kernel runs; the second
//                                                       may be kept from an earlier load
//              load_ahead([valid, ]p) load_data_ahead([valid, ]p) store_plain(p, v) store_wide(p, Words16) ..._if(sign, p, v)   a table byte, a data word, loaded here and used later;
//                                                       an unordered store.  compute_here(a, b): not later; kept(v): not again
//   observe<S>(p)                 acquire load: what the publisher stored before is visible after it
//   publish<S>(Store{p, v}...)    GPU: one release fence, then relaxed stores in the order given; CPU: each a release store
//   publish_add<S>(p, n)          release reduction; no result
//   publish_max<S>(p, n)          release maximum; no result
//   Publication<S> out; out.store(p, v); out.store<W>(p, v); out.add(p, n);   the same release for many words; W: scope of that store
//              out(wide): a release of device scope only, if wide is 0, else of S
//   settle<S>()                   orders all earlier stores before all later ones of this thread, whatever the word (cross-context fence)
//   cells      store_cell(p, Cell16) load_cell(p)       16 aligned bytes at once, relaxed, system scope
//                                                       (use all words of what is loaded, or neighbours within a half: see gpu.cuh)
//   copy(dst, src, bytes, rank, size)                   rank's share of a copy by `size` threads, through registers;
//                                                       both sides in global memory
//   bulk_copy(dst, src, bytes, scratch, rank, size)     the same by the SM's copy engine where there is one; member 0's copy
//                                                       is complete when it returns
//   time       now_ns() (global timer), cycle_clock(), relax(spins) (yields after 64 spins on the CPU)
//   prefetch(p)                                         brings a cache line near; a hint
//   launch     await_previous_kernel() let_next_kernel_start()   for kernels started by launch_early
//   wait_until(comm, deadline, predicate[, peer])       the only spin loop
#pragma once

#include "marrow/abi/abi.h"
#include "marrow/abi/device_communicator.h"
#include "marrow/device/status.cuh"

namespace marrow {

/// Who has to see a store: the scope follows the reader.
/// block_global: block, of words that are in global memory for sure; fewer instructions on a GPU.
enum class Scope : std::uint8_t { block, device, system, block_global };

/// 16 aligned bytes stored and loaded at once. On the CPU the high word is stored last (release) and
/// loaded first (acquire), so a protocol puts its epoch or sentinel in `high`.
struct alignas(16) Cell16 {
  std::uint64_t low;
  std::uint64_t high;
};

/// 16 aligned bytes as one ordinary store.
struct alignas(16) Words16 {
  std::uint32_t word[4];
};

/// Shared memory of the block that an operation may use until its group meets again: the way to bulk
/// copies. Aligned to 128 bytes; 132 KiB is the most that helps, 9 KiB the least that is used.
struct Scratch {
  void* shared = nullptr;
  std::uint32_t bytes = 0;
};

/// One word of a publication.
template <class T>
struct Store {
  T* word;
  T value;
};
template <class T, class U>
Store(T*, U) -> Store<T>;

}  // namespace marrow

#if defined(__CUDACC__)
#include "marrow/device/platform/gpu.cuh"
#include "marrow/device/platform/gpu_bulk.cuh"
#else
#include "marrow/device/platform/cpu.cuh"
#endif

namespace marrow {

#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// What waiting needs of a communicator, small enough to hand to a function that is not inlined. (A
/// reference to a kernel's parameter would make the compiler copy all of it to local memory.)
struct WaitWords {
  ControlBlock* control;
  std::uint64_t wait_ns;
  std::uint64_t* look;
};
MARROW_DEVICE WaitWords wait_words(const DeviceCommunicator& comm) {
  return {comm.control, comm.wait_ns, comm.look};
}

/// How often waiters look at the words the host writes: a read of host memory costs a GPU about 1 us.
inline constexpr std::uint64_t kLookNs = 10000;

/// control->state; what lets a wait go on is at most about kLookNs old. One waiter of all reads it; the
/// others take what it found: 4096 threads that read host memory one by one would need 100 us for it.
/// A reason to stop is read again by everybody: what the last reader found may be older than the
/// agreement that took it back.
MARROW_DEVICE std::uint64_t control_state(const WaitWords& comm, std::uint64_t now) {
  if (!comm.look) return load_relaxed<Scope::system>(&comm.control->state);
  const std::uint64_t last = load_relaxed<Scope::device>(comm.look);
  if (now - last < kLookNs || compare_swap_relaxed<Scope::device>(comm.look, last, now) != last) {
    // Its address from here on, and not before the loop that waits: it would cost registers.
    auto at = reinterpret_cast<std::uint64_t>(comm.look);
    compute_here(at, now);
    const std::uint64_t found =
        load_relaxed<Scope::device>(reinterpret_cast<const std::uint64_t*>(at) + 1);
    if ((found & (kControlAborted | kControlPeerFailed)) == 0) return found;
  }
  const std::uint64_t state = load_relaxed<Scope::system>(&comm.control->state);
  store_relaxed<Scope::device>(comm.look + 1, state);
  return state;
}

/// What a wait or an operation that names `peer` must return now, from the words the host writes.
/// peer < 0: names no peer. May read host memory, so only waits do it.
MARROW_DEVICE Status control_status(const WaitWords& comm, int peer = -1) {
  const std::uint64_t state = control_state(comm, now_ns());
  if (state == kControlOk) return Status::ok;
  if (state & kControlAborted) return Status::aborted;
  if (state & kControlPeerFailed) return Status::peer_failed;
  if (peer >= 0 && (state & kControlMasked)) {
    // Here and not before the loop that waits: it would cost registers.
    std::uint64_t word = static_cast<unsigned>(peer);
    std::uint64_t bit = static_cast<unsigned>(peer);
    compute_here(word, bit);
    if (load_relaxed<Scope::system>(&comm.control->failed[word / 64]) >> (bit % 64) & 1)
      return Status::peer_failed;
  }
  return Status::ok;
}
MARROW_DEVICE Status control_status(const DeviceCommunicator& comm, int peer = -1) {
  return control_status(wait_words(comm), peer);
}

/// Spins until predicate() is true, the deadline passes, or the host says stop. The only spin loop
/// of device code. The predicate does its own observe() and may look at many words; it is looked at
/// once more after the decision to give up.
/// @param deadline  ns; 0: the communicator's default
/// @param peer      rank this wait depends on, or -1; a failed (masked) one ends the wait
/// @return ok, timeout (what was waited for may still come), peer_failed, aborted
template <class Predicate>
MARROW_DEVICE Status wait_until(const WaitWords& comm, Deadline deadline, Predicate&& predicate,
                                int peer = -1) {
  constexpr int kBetweenLooks = 32;  // at the clock
  const std::uint64_t limit = deadline.ns ? deadline.ns : comm.wait_ns;
  std::uint64_t start = 0;
  std::uint32_t looked = 0;  // one register: waiting may be part of a kernel that has few
  std::uint32_t spins = 0;
  Status stop = Status::ok;
  for (;;) {
    // Nothing but the predicate in here: it is inlined once, and a short loop answers sooner.
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int i = 0; i < kBetweenLooks; ++i) {
      if (predicate()) return Status::ok;
      relax(spins++);
    }
    if (stop != Status::ok) return stop;
    const std::uint64_t now = now_ns();
    if (start == 0) start = now;
    const std::uint64_t waited = now - start;
    constexpr int kLookShift = 13;  // 8192 ns, about kLookNs
    if (const auto tick = static_cast<std::uint32_t>(waited >> kLookShift); tick != looked) {
      looked = tick;
      stop = control_status(comm, peer);
    }
    if (stop == Status::ok && waited >= limit) stop = Status::timeout;
  }
}
template <class Predicate>
MARROW_DEVICE Status wait_until(const DeviceCommunicator& comm, Deadline deadline,
                                Predicate&& predicate, int peer = -1) {
  return wait_until(wait_words(comm), deadline, predicate, peer);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow
