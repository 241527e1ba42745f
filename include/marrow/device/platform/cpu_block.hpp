// SPDX-License-Identifier: Apache-2.0
// A block of the CPU device: a team of OS threads with barriers, shared memory and warps of 1 to 32
// lanes. Header-only, so that a user's sanitizer build instruments every synchronisation in it.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>

#include "marrow/abi/abi.h"

namespace marrow {
inline namespace cpu_device {

inline constexpr int kMaxCpuLanes = 32;

/// Barrier of a changing number of threads: a thread that returns from the kernel leaves it, as an
/// exited GPU thread no longer counts for __syncthreads. Round, arrivals and members are one word,
/// so that leaving and arriving cannot miss each other.
class CpuBarrier {
 public:
  void set_members(std::uint32_t members) { state_.store(members, std::memory_order_relaxed); }

  void arrive_and_wait() {
    change([](std::uint64_t s) { return s + kArrival; }, true);
  }

  /// For a fixed group: the same `members` in every call.
  void arrive_and_wait(std::uint32_t members) {
    change(
        [members](std::uint64_t s) { return ((s & ~std::uint64_t{0xffff}) | members) + kArrival; },
        true);
  }

  /// A thread that exits: never waits.
  void leave() {
    change([](std::uint64_t s) { return s - 1; }, false);
  }

 private:
  static constexpr std::uint64_t kArrival = 1u << 16;
  static std::uint32_t round_of(std::uint64_t s) { return static_cast<std::uint32_t>(s >> 32); }

  template <class Step>
  void change(Step step, bool wait) {
    std::uint64_t old = state_.load(std::memory_order_relaxed);
    std::uint64_t next;
    do {
      next = step(old);
      const std::uint64_t members = next & 0xffff;
      const std::uint64_t arrived = next >> 16 & 0xffff;
      if (arrived != 0 && arrived == members) {
        next = (std::uint64_t{round_of(next)} + 1) << 32 | members;
      }
      // acq_rel: the thread that opens the round has acquired every arrival and releases them all.
    } while (!state_.compare_exchange_weak(old, next, std::memory_order_acq_rel,
                                           std::memory_order_relaxed));
    if (!wait) return;
    const std::uint32_t round = round_of(old);
    for (std::uint32_t spins = 0; round_of(state_.load(std::memory_order_acquire)) == round;
         ++spins) {
      if (spins > 64) sched_yield();
    }
  }

  std::atomic<std::uint64_t> state_{0};
};

/// What the lanes of one warp exchange through.
struct CpuWarp {
  CpuBarrier barrier[kMaxCpuLanes]
                    [6];  ///< by first lane and size class of the mask: tiles and warp do not mix
  std::uint64_t slot[kMaxCpuLanes] = {};
};

struct CpuBlock {
  int index = 0;
  int grid = 1;
  int size = 1;
  int lanes = 1;
  std::byte* shared = nullptr;
  CpuBarrier barrier;
  std::unique_ptr<CpuWarp[]> warps;
  std::unique_ptr<std::atomic<std::uint32_t>[]> value;  ///< block_any, one slot a thread
};

struct CpuThread {
  CpuBlock* block = nullptr;
  int index = 0;
  std::uint64_t random = 0;  ///< 0: no seeded schedule
};

/// The calling OS thread's place in the grid; outside a launch: a block of one thread.
inline CpuThread& cpu_thread() {
  thread_local CpuThread self;
  return self;
}

/// A seeded schedule: with a seed set, publishes, observes and barriers sometimes yield or sleep, so
/// that runs explore orders that an idle machine would not show.
inline void schedule_point() {
  CpuThread& self = cpu_thread();
  if (self.random == 0) return;
  self.random ^= self.random << 13;
  self.random ^= self.random >> 7;
  self.random ^= self.random << 17;
  const std::uint64_t dice = self.random & 0xff;
  if (dice < 24) {
    sched_yield();
  } else if (dice == 255) {
    timespec pause{0, static_cast<long>(self.random >> 8 & 0x3fff)};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace cpu_device
}  // namespace marrow
