// SPDX-License-Identifier: Apache-2.0
// platform.cuh under g++: words are std::atomic_ref, a publish is a release store, an observe an
// acquire load. No bare fences: ThreadSanitizer cannot see them.
#pragma once

#if defined(__CUDACC__)
#error "platform/cpu.cuh is for g++; include marrow/device/platform.cuh"
#endif

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>

#include "marrow/device/platform/cpu_block.hpp"

namespace marrow {
inline namespace cpu_device {

inline constexpr bool kOnGpu = false;

MARROW_DEVICE int block_index() { return cpu_thread().block ? cpu_thread().block->index : 0; }
MARROW_DEVICE std::uint64_t block_identity() {
  return reinterpret_cast<std::uintptr_t>(cpu_thread().block);
}
MARROW_DEVICE int grid_size() { return cpu_thread().block ? cpu_thread().block->grid : 1; }
MARROW_DEVICE int thread_index() { return cpu_thread().index; }
MARROW_DEVICE int block_size() { return cpu_thread().block ? cpu_thread().block->size : 1; }
MARROW_DEVICE int warp_lanes() { return cpu_thread().block ? cpu_thread().block->lanes : 1; }
MARROW_DEVICE int lane_index() { return thread_index() % warp_lanes(); }

template <class T>
MARROW_DEVICE T* dynamic_shared(std::size_t byte_offset = 0) {
  return reinterpret_cast<T*>(cpu_thread().block->shared + byte_offset);
}

MARROW_DEVICE void block_sync() {
  schedule_point();
  if (CpuBlock* block = cpu_thread().block; block && block->size > 1) {
    block->barrier.arrive_and_wait();
  }
}

MARROW_DEVICE bool block_any(bool mine) {
  CpuBlock* block = cpu_thread().block;
  if (!block || block->size == 1) return mine;
  block->value[cpu_thread().index].store(mine, std::memory_order_relaxed);
  block_sync();
  bool any = false;
  for (int i = 0; i < block->size; ++i) {
    any |= block->value[i].load(std::memory_order_relaxed) != 0;
  }
  block_sync();
  return any;
}

MARROW_DEVICE std::uint32_t full_mask() {
  const int first = thread_index() / warp_lanes() * warp_lanes();
  const int lanes = std::min(warp_lanes(), block_size() - first);
  return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
}
/// Lanes are OS threads here: who else is at this line is unknown, so only the caller.
MARROW_DEVICE std::uint32_t converged_lanes() { return 1u << lane_index(); }
MARROW_DEVICE int lowest_lane(std::uint32_t mask) { return std::countr_zero(mask); }
MARROW_DEVICE int count_lanes(std::uint32_t mask) { return std::popcount(mask); }

MARROW_DEVICE void warp_sync(std::uint32_t mask) {
  schedule_point();
  const std::uint32_t lanes = static_cast<std::uint32_t>(std::popcount(mask));
  if (lanes <= 1) return;
  CpuWarp& warp = cpu_thread().block->warps[thread_index() / warp_lanes()];
  CpuBarrier& barrier = warp.barrier[std::countr_zero(mask)][std::bit_width(lanes) - 1];
  barrier.arrive_and_wait(lanes);
}

namespace detail {
/// Every lane of the mask gives a word, then folds all of them. Slots are plain words between two
/// barriers, so a missing barrier shows as a data race.
template <class Fold>
MARROW_DEVICE void warp_exchange(std::uint32_t mask, std::uint64_t word, Fold&& fold) {
  CpuBlock* block = cpu_thread().block;
  if (!block || std::popcount(mask) <= 1) {
    fold(lane_index(), word);
    return;
  }
  CpuWarp& warp = block->warps[thread_index() / warp_lanes()];
  warp.slot[lane_index()] = word;
  warp_sync(mask);
  for (std::uint32_t left = mask; left; left &= left - 1) {
    const int lane = std::countr_zero(left);
    fold(lane, warp.slot[lane]);
  }
  warp_sync(mask);
}
template <class T>
MARROW_DEVICE std::uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
}  // namespace detail

MARROW_DEVICE std::uint32_t warp_ballot(std::uint32_t mask, bool p) {
  std::uint32_t result = 0;
  detail::warp_exchange(mask, p,
                        [&](int lane, std::uint64_t w) { result |= (w ? 1u : 0u) << lane; });
  return result;
}
template <class T>
MARROW_DEVICE T warp_shuffle(std::uint32_t mask, T value, int lane) {
  T result = value;
  detail::warp_exchange(mask, detail::to_word(value), [&](int from, std::uint64_t w) {
    if (from == lane) std::memcpy(&result, &w, sizeof(T));
  });
  return result;
}
template <class T>
MARROW_DEVICE std::uint32_t warp_match(std::uint32_t mask, T value) {
  const std::uint64_t mine = detail::to_word(value);
  std::uint32_t result = 0;
  detail::warp_exchange(
      mask, mine, [&](int lane, std::uint64_t w) { result |= (w == mine ? 1u : 0u) << lane; });
  return result;
}

template <Scope, class T>
MARROW_DEVICE T load_relaxed(const T* p) {
  return std::atomic_ref<T>(*const_cast<T*>(p)).load(std::memory_order_relaxed);
}
template <Scope, class T, class U>
MARROW_DEVICE void store_relaxed(T* p, U v) {
  std::atomic_ref<T>(*p).store(static_cast<T>(v), std::memory_order_relaxed);
}
template <Scope, class T, class U>
MARROW_DEVICE T fetch_add_relaxed(T* p, U n) {
  return std::atomic_ref<T>(*p).fetch_add(static_cast<T>(n), std::memory_order_relaxed);
}
template <Scope S>
MARROW_DEVICE void add_relaxed(std::uint64_t* p, std::uint64_t n) {
  (void)fetch_add_relaxed<S>(p, n);
}
template <Scope, class T, class U>
MARROW_DEVICE T fetch_max_relaxed(T* p, U n) {
  std::atomic_ref<T> word(*p);
  T old = word.load(std::memory_order_relaxed);
  while (old < static_cast<T>(n) &&
         !word.compare_exchange_weak(old, static_cast<T>(n), std::memory_order_relaxed)) {
  }
  return old;
}
template <Scope, class T, class U, class V>
MARROW_DEVICE T compare_swap_relaxed(T* p, U expected, V desired) {
  T old = static_cast<T>(expected);
  std::atomic_ref<T>(*p).compare_exchange_strong(old, static_cast<T>(desired),
                                                 std::memory_order_relaxed);
  return old;
}

/// The host rewrites such tables while kernels run (a failed peer's path), hence relaxed.
template <class T>
MARROW_DEVICE T load_cached(const T* p) {
  return load_relaxed<Scope::system>(p);
}
/// As load_cached, of 4, 8 or 16 bytes that are constant while the kernel runs.
template <class T>
MARROW_DEVICE T load_constant(const T* p) {
  return *p;
}
template <class T>
MARROW_DEVICE T load_fixed(bool valid, const T* p) {
  return valid ? load_cached(p) : T{};
}
template <>
MARROW_DEVICE Cell16 load_fixed(bool valid, const Cell16* p) {
  return valid ? *p : Cell16{};
}
MARROW_DEVICE std::uint8_t load_ahead(const std::uint8_t* p) { return load_cached(p); }
MARROW_DEVICE std::uint8_t load_ahead(bool valid, const std::uint8_t* p) {
  return valid ? load_cached(p) : std::uint8_t{};
}
MARROW_DEVICE void compute_here(std::uint64_t&, std::uint64_t&) {}
MARROW_DEVICE std::uint64_t load_data_ahead(const std::uint64_t* p) { return *p; }
template <class T>
MARROW_DEVICE T kept(T v) {
  return v;
}
template <class T>
MARROW_DEVICE T pin(T v) {
  return v;
}
MARROW_DEVICE Cell16 load_data_ahead(bool valid, const Cell16* p) { return valid ? *p : Cell16{}; }
MARROW_DEVICE void store_plain(std::uint64_t* p, std::uint64_t v) { *p = v; }

MARROW_DEVICE void store_wide(void* p, const Words16& v) { std::memcpy(p, &v, sizeof v); }
MARROW_DEVICE void store_wide_if(std::int32_t sign, void* p, const Words16& v) {
  if (sign >= 0) store_wide(p, v);
}

template <Scope, class T>
MARROW_DEVICE T observe(const T* p) {
  schedule_point();
  return std::atomic_ref<T>(*const_cast<T*>(p)).load(std::memory_order_acquire);
}

template <Scope S, class... T>
MARROW_DEVICE void publish(Store<T>... stores) {
  schedule_point();
  (std::atomic_ref<T>(*stores.word).store(stores.value, std::memory_order_release), ...);
}
template <Scope>
MARROW_DEVICE void publish_add(std::uint64_t* word, std::uint64_t n) {
  schedule_point();
  std::atomic_ref<std::uint64_t>(*word).fetch_add(n, std::memory_order_release);
}

/// A release maximum, for an index that several threads raise: fetch_max that publishes what the caller did.
template <Scope, class T, class U>
MARROW_DEVICE void publish_max(T* p, U n) {
  schedule_point();
  std::atomic_ref<T> word(*p);
  T old = word.load(std::memory_order_relaxed);
  while (old < static_cast<T>(n) &&
         !word.compare_exchange_weak(old, static_cast<T>(n), std::memory_order_release,
                                     std::memory_order_relaxed)) {
  }
}

template <Scope S>
class Publication {
 public:
  Publication() { schedule_point(); }
  explicit Publication(std::uint32_t) { schedule_point(); }
  template <Scope = S, class T, class U>
  void store(T* word, U value) {
    std::atomic_ref<T>(*word).store(static_cast<T>(value), std::memory_order_release);
  }
  void add(std::uint64_t* word, std::uint64_t n) {
    std::atomic_ref<std::uint64_t>(*word).fetch_add(n, std::memory_order_release);
  }
};

/// Nothing to do: every publish of the CPU device is itself a release of all earlier stores.
template <Scope>
MARROW_DEVICE void settle() {}

MARROW_DEVICE void store_cell(void* p, Cell16 cell) {
  auto* word = static_cast<std::uint64_t*>(p);
  std::atomic_ref<std::uint64_t>(word[0]).store(cell.low, std::memory_order_relaxed);
  // Publishes the low word: whoever observes this high word has the low one with it.
  std::atomic_ref<std::uint64_t>(word[1]).store(cell.high, std::memory_order_release);
}
MARROW_DEVICE Cell16 load_cell(const void* p) {
  auto* word = static_cast<std::uint64_t*>(const_cast<void*>(p));
  Cell16 cell;
  cell.high = std::atomic_ref<std::uint64_t>(word[1]).load(std::memory_order_acquire);
  cell.low = std::atomic_ref<std::uint64_t>(word[0]).load(std::memory_order_relaxed);
  return cell;
}

MARROW_DEVICE std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}
MARROW_DEVICE void prefetch(const void* p) { __builtin_prefetch(p); }
MARROW_DEVICE void await_previous_kernel() {}
MARROW_DEVICE void let_next_kernel_start() {}
MARROW_DEVICE std::uint64_t cycle_clock() { return now_ns(); }

MARROW_DEVICE void relax(std::uint32_t spins) {
  if (spins < 64) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else {
    sched_yield();
  }
}

MARROW_DEVICE void copy(void* dst, const void* src, std::size_t bytes, unsigned rank,
                        unsigned size) {
  // Contiguous shares, cut at 64 bytes so that two threads seldom touch one cache line.
  const std::size_t share = ((bytes + size - 1) / size + 63) & ~std::size_t{63};
  const std::size_t begin = std::min(bytes, share * rank);
  const std::size_t end = std::min(bytes, begin + share);
  if (begin < end) {
    std::memmove(static_cast<std::byte*>(dst) + begin, static_cast<const std::byte*>(src) + begin,
                 end - begin);
  }
}
MARROW_DEVICE void bulk_copy(void* dst, const void* src, std::size_t bytes, const Scratch&,
                             unsigned rank, unsigned size) {
  copy(dst, src, bytes, rank, size);
}

}  // namespace cpu_device
}  // namespace marrow
