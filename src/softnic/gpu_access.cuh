// SPDX-License-Identifier: Apache-2.0
// How the GPU engine touches memory that others touch at the same time: the same policy as HostAccess, on
// a GPU. Everything is of system scope: a peer's kernel, another GPU or a CPU may be the reader. Nothing that
// others write is read through L1.
#pragma once

#include <cstdint>
#include <cstring>

#include "marrow/abi/mlx5_wqe.h"
#include "marrow/device/platform.cuh"

#if defined(__CUDACC__)
#define MARROW_UNROLL _Pragma("unroll")
#else
#define MARROW_UNROLL
#endif

namespace marrow::softnic::gpu {

struct GpuAccess {
  /// One lane moves this much; longer pieces are the whole warp's or block's.
  static constexpr std::uint64_t kAlone = 16;
  static constexpr std::uint64_t kTurnBytes = std::uint64_t{1} << 20;

  static __device__ std::uint32_t load_acquire(const std::uint32_t* p) { return observe_any(p); }
  static __device__ std::uint64_t load_acquire(const std::uint64_t* p) {
    return observe<Scope::system>(p);
  }
  static __device__ std::uint32_t load_relaxed(const std::uint32_t* p) {
    return marrow::load_relaxed<Scope::system>(p);
  }
  /// The word may be the engine's own, in shared memory.
  static __device__ void store_relaxed(std::uint32_t* p, std::uint32_t value) {
    *static_cast<volatile std::uint32_t*>(p) = value;
  }
  static __device__ void store_release(std::uint32_t* p, std::uint32_t value) {
    publish<Scope::system>(Store{p, value});
  }

  /// Makes the relaxed loads before it acquires: what their stores' releases cover is readable afterwards. On a GPU
  /// it empties L1, so only who has found something calls it.
  static __device__ void acquire_fence() {
#if !defined(__CUDACC__)
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#elif __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
    asm volatile("fence.acquire.sys;" ::: "memory");
#else
    settle<Scope::system>();
#endif
  }

  /// A completion entry. The one release covers all that the operation did, by this lane and by those
  /// that it met since.
  static __device__ void store_entry(std::uint32_t* p, const std::uint32_t (&words)[16]) {
    store_cell(p, Cell16{0, 0});
    store_cell(p + 4, Cell16{0, 0});
    store_body(p, words[8], words[9], words[11], words[13], words[14]);
    store_completion(p + 15, words[15]);
  }
  /// The second half but for the last word. The first half is reserved in these entries and stays as it is.
  static __device__ void store_body(std::uint32_t* p, std::uint32_t w8, std::uint32_t w9,
                                    std::uint32_t w11, std::uint32_t w13, std::uint32_t w14) {
    store_cell(p + 8, Cell16{w8 | std::uint64_t{w9} << 32, std::uint64_t{w11} << 32});
    auto* at = reinterpret_cast<std::uint64_t*>(p + 12);
    marrow::store_relaxed<Scope::system>(at, std::uint64_t{w13} << 32);
    marrow::store_relaxed<Scope::system>(p + 14, w14);
  }
  /// The same for an entry that tells of no error: words 12 and 13 then say nothing.
  static __device__ void store_good_body(std::uint32_t* p, std::uint32_t w8, std::uint32_t w11,
                                         std::uint32_t w14) {
    store_cell(p + 8, Cell16{w8, std::uint64_t{w11} << 32});
    marrow::store_relaxed<Scope::system>(p + 14, w14);
  }
  static __device__ void store_completion(std::uint32_t* p, std::uint32_t value) {
    publish<Scope::system>(Store{p, value});
  }

  /// Reads blocks of a send queue into the engine's own memory; 16-byte units.
  static __device__ void read(void* to, const std::byte* from, std::size_t bytes) {
    auto* target = static_cast<uint4*>(to);
    const auto* source = reinterpret_cast<const uint4*>(from);
    if (bytes == mlx5::kBlockBytes) {
      uint4 v[4];
      MARROW_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = __ldcg(source + i);
      MARROW_UNROLL
      for (int i = 0; i < 4; ++i) target[i] = v[i];
      return;
    }
    for (std::size_t i = 0; i < bytes / 16; ++i) target[i] = __ldcg(source + i);
  }

  /// At most kAlone bytes between memory of users.
  static __device__ void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const std::uintptr_t either =
        reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if ((either & 7) == 0) {
      move<std::uint64_t>(to, from, bytes);
    } else if ((either & 3) == 0) {
      move<std::uint32_t>(to, from, bytes);
    } else {
      move<std::uint8_t>(to, from, bytes);
    }
  }
  /// Copies the engine's own bytes (inline payload) to memory of users.
  static __device__ void place(std::byte* to, const std::uint8_t* from, std::size_t bytes) {
    if (((reinterpret_cast<std::uintptr_t>(to) | bytes) & 7) == 0) {
      for (std::size_t i = 0; i < bytes; i += 8) {
        std::uint64_t word;
        memcpy(&word, from + i, 8);
        marrow::store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(to + i), word);
      }
      return;
    }
    for (std::size_t i = 0; i < bytes; ++i) {
      marrow::store_relaxed<Scope::system>(reinterpret_cast<std::uint8_t*>(to + i), from[i]);
    }
  }

  /// Atomic read-modify-writes, acquire and release: a signal word comes after the data of earlier WRITEs.
#if defined(__CUDACC__)
  static __device__ std::uint64_t fetch_add(std::uint64_t* p, std::uint64_t n) {
    std::uint64_t old;
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(p)), "l"(n)
                 : "memory");
    return old;
  }
  static __device__ std::uint32_t fetch_add(std::uint32_t* p, std::uint32_t n) {
    std::uint32_t old;
    asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(__cvta_generic_to_global(p)), "r"(n)
                 : "memory");
    return old;
  }
  static __device__ std::uint64_t compare_swap(std::uint64_t* p, std::uint64_t expected,
                                               std::uint64_t desired) {
    std::uint64_t old;
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(p)), "l"(expected), "l"(desired)
                 : "memory");
    return old;
  }
  static __device__ std::uint32_t compare_swap(std::uint32_t* p, std::uint32_t expected,
                                               std::uint32_t desired) {
    std::uint32_t old;
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(__cvta_generic_to_global(p)), "r"(expected), "r"(desired)
                 : "memory");
    return old;
  }
#else
  template <class T>
  static T fetch_add(T* p, T n) {
    return __atomic_fetch_add(p, n, __ATOMIC_ACQ_REL);
  }
  template <class T>
  static T compare_swap(T* p, T expected, T desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
  }
#endif

 private:
  /// WAIT looks at words in shared memory, everyone else at global ones.
  static __device__ std::uint32_t observe_any(const std::uint32_t* p) {
#if defined(__CUDACC__)
    std::uint32_t value;
    asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
#else
    return observe<Scope::system>(p);
#endif
  }
  template <class T>
  static __device__ void move(std::byte* to, const std::byte* from, std::size_t bytes) {
    T value[kAlone / sizeof(T)];
    const std::size_t n = bytes / sizeof(T);
    for (std::size_t i = 0; i < n; ++i) {
      value[i] = marrow::load_relaxed<Scope::system>(reinterpret_cast<const T*>(from) + i);
    }
    for (std::size_t i = 0; i < n; ++i) {
      marrow::store_relaxed<Scope::system>(reinterpret_cast<T*>(to) + i, value[i]);
    }
  }
};

}  // namespace marrow::softnic::gpu
