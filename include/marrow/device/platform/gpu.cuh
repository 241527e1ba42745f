// SPDX-License-Identifier: Apache-2.0
// platform.cuh under nvcc: one PTX instruction per function. tests/unit/ptx_golden checks which
// fences, scopes and stores each publish and observe compiles to.
//
// Measured on H200 (ns): fence.release gpu 91-250, sys 540-870 idle and about 6000 while NVLink is
// full; acquire load +18; b128 cell one way 808.
#pragma once

#if !defined(__CUDACC__)
#error "platform/gpu.cuh is for nvcc; include marrow/device/platform.cuh"
#endif

#include <type_traits>

namespace marrow {
inline namespace gpu_device {

inline constexpr bool kOnGpu = true;

MARROW_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
/// Tells this block from every other that runs at the same time: those of concurrent kernels, and of grids
/// with more dimensions than one, share a block_index().
MARROW_DEVICE std::uint64_t block_identity() {
  std::uint64_t grid;
  asm("mov.u64 %0, %%gridid;" : "=l"(grid));
  return grid << 32 ^ (blockIdx.x + static_cast<std::uint64_t>(gridDim.x) *
                                        (blockIdx.y + gridDim.y * blockIdx.z));
}
MARROW_DEVICE int grid_size() { return static_cast<int>(gridDim.x); }
MARROW_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
MARROW_DEVICE int block_size() { return static_cast<int>(blockDim.x); }
MARROW_DEVICE int lane_index() { return static_cast<int>(threadIdx.x & 31u); }
MARROW_DEVICE constexpr int warp_lanes() { return 32; }

extern __shared__ __align__(128) unsigned char marrow_dynamic_shared[];

/// Block's dynamic shared memory from byte_offset on.
template <class T>
MARROW_DEVICE T* dynamic_shared(std::size_t byte_offset = 0) {
  return reinterpret_cast<T*>(marrow_dynamic_shared + byte_offset);
}

MARROW_DEVICE void block_sync() { __syncthreads(); }

MARROW_DEVICE bool block_any(bool mine) { return __syncthreads_or(mine); }

MARROW_DEVICE std::uint32_t full_mask() {
  const unsigned first = threadIdx.x & ~31u;
  const unsigned lanes = blockDim.x - first;
  return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
}
MARROW_DEVICE std::uint32_t converged_lanes() { return __activemask(); }
// With a mask that nvcc does not know, each of these is a loop over differing masks, 60 cycles; so the whole
// warp, the usual case, has one of its own.
inline constexpr std::uint32_t kWholeWarp = 0xffffffffu;
MARROW_DEVICE void warp_sync(std::uint32_t mask) {
  if (mask == kWholeWarp) {
    __syncwarp(kWholeWarp);
  } else {
    __syncwarp(mask);
  }
}
MARROW_DEVICE std::uint32_t warp_ballot(std::uint32_t mask, bool p) {
  return mask == kWholeWarp ? __ballot_sync(kWholeWarp, p) : __ballot_sync(mask, p);
}
template <class T>
MARROW_DEVICE T warp_shuffle(std::uint32_t mask, T value, int lane) {
  return mask == kWholeWarp ? __shfl_sync(kWholeWarp, value, lane) : __shfl_sync(mask, value, lane);
}
template <class T>
MARROW_DEVICE std::uint32_t warp_match(std::uint32_t mask, T value) {
  return __match_any_sync(mask, value);
}
MARROW_DEVICE int lowest_lane(std::uint32_t mask) { return __ffs(static_cast<int>(mask)) - 1; }
MARROW_DEVICE int count_lanes(std::uint32_t mask) { return __popc(mask); }

// One asm statement per (operation, scope, width). `volatile` and the memory clobber keep the
// compiler from moving ordinary accesses across.
#define MARROW_GPU_WORD(SCOPE, PTX_SCOPE, SPACE, ADDRESS)                                        \
  template <>                                                                                    \
  struct Words<Scope::SCOPE> {                                                                   \
    static MARROW_DEVICE std::size_t at(const void* p) { return ADDRESS(p); }                    \
    static MARROW_DEVICE std::uint64_t load(const std::uint64_t* p) {                            \
      std::uint64_t v;                                                                           \
      asm volatile("ld.relaxed." PTX_SCOPE SPACE ".b64 %0, [%1];"                                \
                   : "=l"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint32_t load(const std::uint32_t* p) {                            \
      std::uint32_t v;                                                                           \
      asm volatile("ld.relaxed." PTX_SCOPE SPACE ".b32 %0, [%1];"                                \
                   : "=r"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint8_t load(const std::uint8_t* p) {                              \
      std::uint32_t v;                                                                           \
      asm volatile("ld.relaxed." PTX_SCOPE SPACE ".u8 %0, [%1];"                                 \
                   : "=r"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return static_cast<std::uint8_t>(v);                                                       \
    }                                                                                            \
    static MARROW_DEVICE std::uint64_t acquire(const std::uint64_t* p) {                         \
      std::uint64_t v;                                                                           \
      asm volatile("ld.acquire." PTX_SCOPE SPACE ".b64 %0, [%1];"                                \
                   : "=l"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint32_t acquire(const std::uint32_t* p) {                         \
      std::uint32_t v;                                                                           \
      asm volatile("ld.acquire." PTX_SCOPE SPACE ".b32 %0, [%1];"                                \
                   : "=r"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint8_t acquire(const std::uint8_t* p) {                           \
      std::uint32_t v;                                                                           \
      asm volatile("ld.acquire." PTX_SCOPE SPACE ".u8 %0, [%1];"                                 \
                   : "=r"(v)                                                                     \
                   : "l"(at(p))                                                                  \
                   : "memory");                                                                  \
      return static_cast<std::uint8_t>(v);                                                       \
    }                                                                                            \
    static MARROW_DEVICE void store(std::uint64_t* p, std::uint64_t v) {                         \
      asm volatile("st.relaxed." PTX_SCOPE SPACE ".b64 [%0], %1;" ::"l"(at(p)), "l"(v)           \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void store(std::uint32_t* p, std::uint32_t v) {                         \
      asm volatile("st.relaxed." PTX_SCOPE SPACE ".b32 [%0], %1;" ::"l"(at(p)), "r"(v)           \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void store(std::uint8_t* p, std::uint8_t v) {                           \
      asm volatile("st.relaxed." PTX_SCOPE SPACE ".u8 [%0], %1;" ::"l"(at(p)),                   \
                   "r"(static_cast<std::uint32_t>(v))                                            \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint64_t add(std::uint64_t* p, std::uint64_t n) {                  \
      std::uint64_t v;                                                                           \
      asm volatile("atom.relaxed." PTX_SCOPE SPACE ".add.u64 %0, [%1], %2;"                      \
                   : "=l"(v)                                                                     \
                   : "l"(at(p)), "l"(n)                                                          \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint32_t add(std::uint32_t* p, std::uint32_t n) {                  \
      std::uint32_t v;                                                                           \
      asm volatile("atom.relaxed." PTX_SCOPE SPACE ".add.u32 %0, [%1], %2;"                      \
                   : "=r"(v)                                                                     \
                   : "l"(at(p)), "r"(n)                                                          \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint64_t max(std::uint64_t* p, std::uint64_t n) {                  \
      std::uint64_t v;                                                                           \
      asm volatile("atom.relaxed." PTX_SCOPE SPACE ".max.u64 %0, [%1], %2;"                      \
                   : "=l"(v)                                                                     \
                   : "l"(at(p)), "l"(n)                                                          \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint64_t cas(std::uint64_t* p, std::uint64_t e, std::uint64_t d) { \
      std::uint64_t v;                                                                           \
      asm volatile("atom.relaxed." PTX_SCOPE SPACE ".cas.b64 %0, [%1], %2, %3;"                  \
                   : "=l"(v)                                                                     \
                   : "l"(at(p)), "l"(e), "l"(d)                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE std::uint32_t cas(std::uint32_t* p, std::uint32_t e, std::uint32_t d) { \
      std::uint32_t v;                                                                           \
      asm volatile("atom.relaxed." PTX_SCOPE SPACE ".cas.b32 %0, [%1], %2, %3;"                  \
                   : "=r"(v)                                                                     \
                   : "l"(at(p)), "r"(e), "r"(d)                                                  \
                   : "memory");                                                                  \
      return v;                                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void reduce(std::uint64_t* p, std::uint64_t n) {                        \
      asm volatile("red.relaxed." PTX_SCOPE SPACE ".add.u64 [%0], %1;" ::"l"(at(p)), "l"(n)      \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void release_reduce(std::uint64_t* p, std::uint64_t n) {                \
      asm volatile("red.release." PTX_SCOPE SPACE ".add.u64 [%0], %1;" ::"l"(at(p)), "l"(n)      \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void release_max(std::uint64_t* p, std::uint64_t n) {                   \
      asm volatile("red.release." PTX_SCOPE SPACE ".max.u64 [%0], %1;" ::"l"(at(p)), "l"(n)      \
                   : "memory");                                                                  \
    }                                                                                            \
    static MARROW_DEVICE void release_fence() {                                                  \
      asm volatile(MARROW_RELEASE_FENCE(PTX_SCOPE)::: "memory");                                 \
    }                                                                                            \
    static MARROW_DEVICE void fence() {                                                          \
      asm volatile("fence.acq_rel." PTX_SCOPE ";" ::: "memory");                                 \
    }                                                                                            \
  }

// fence.release came with PTX 8.6 for sm_90; it costs 42 ns less than acq_rel.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
#define MARROW_RELEASE_FENCE(PTX_SCOPE) "fence.release." PTX_SCOPE ";"
#else
#define MARROW_RELEASE_FENCE(PTX_SCOPE) "fence.acq_rel." PTX_SCOPE ";"
#endif

// Words that others than the block read are in global memory, and the instructions say so: a
// reduction at a generic address compiles to an atomic that waits for its result, 1 us over NVLink.
template <Scope S>
struct Words;
MARROW_GPU_WORD(block, "cta", "", reinterpret_cast<std::size_t>);
MARROW_GPU_WORD(block_global, "cta", ".global", __cvta_generic_to_global);
MARROW_GPU_WORD(device, "gpu", ".global", __cvta_generic_to_global);
MARROW_GPU_WORD(system, "sys", ".global", __cvta_generic_to_global);
#undef MARROW_GPU_WORD

template <Scope S, class T>
MARROW_DEVICE T load_relaxed(const T* p) {
  return Words<S>::load(p);
}
template <Scope S, class T, class U>
MARROW_DEVICE void store_relaxed(T* p, U v) {
  Words<S>::store(p, static_cast<T>(v));
}
template <Scope S, class T, class U>
MARROW_DEVICE T fetch_add_relaxed(T* p, U n) {
  return Words<S>::add(p, static_cast<T>(n));
}
template <Scope S>
MARROW_DEVICE void add_relaxed(std::uint64_t* p, std::uint64_t n) {
  Words<S>::reduce(p, n);
}
template <Scope S, class T, class U>
MARROW_DEVICE T fetch_max_relaxed(T* p, U n) {
  return Words<S>::max(p, static_cast<T>(n));
}
template <Scope S, class T, class U, class V>
MARROW_DEVICE T compare_swap_relaxed(T* p, U expected, V desired) {
  return Words<S>::cas(p, static_cast<T>(expected), static_cast<T>(desired));
}

/// Read-mostly word of a table the host writes between launches.
template <class T>
MARROW_DEVICE T load_cached(const T* p) {
  return *p;
}

/// Words that nobody writes while the kernel runs, loaded here: neither kept from an earlier load nor
/// moved to where the value is first used, so that loads overlap and a rare branch costs no registers.
MARROW_DEVICE std::uint64_t load_constant(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)));
  return v;
}
MARROW_DEVICE std::uint32_t load_constant(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)));
  return v;
}
/// 16 aligned bytes of them.
MARROW_DEVICE Cell16 load_constant(const Cell16* p) {
  Cell16 v;
  asm volatile("ld.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(__cvta_generic_to_global(p)));
  return v;
}

/// The same words, 0 if not `valid`. Not volatile: a loop keeps what it loaded, so nvcc moves this in front
/// of it and of the branch that says whether p is valid; hence the condition.
#define MARROW_GPU_FIXED(TYPE, PTX, REGISTER, WIDE)                                      \
  MARROW_DEVICE TYPE load_fixed(bool valid, const TYPE* p) {                             \
    WIDE v;                                                                              \
    asm("{.reg .pred q; setp.ne.u32 q, %2, 0; mov." REGISTER " %0, 0; @q ld.global." PTX \
        " %0, [%1];}"                                                                    \
        : "=" MARROW_GPU_CONSTRAINT_##WIDE(v)                                            \
        : "l"(__cvta_generic_to_global(p)), "r"(static_cast<std::uint32_t>(valid)));     \
    return static_cast<TYPE>(v);                                                         \
  }
using FixedWord = std::uint32_t;
using FixedLong = std::uint64_t;
#define MARROW_GPU_CONSTRAINT_FixedWord(v) "r"(v)
#define MARROW_GPU_CONSTRAINT_FixedLong(v) "l"(v)
MARROW_GPU_FIXED(std::uint8_t, "u8", "b32", FixedWord)
MARROW_GPU_FIXED(std::uint32_t, "b32", "b32", FixedWord)
MARROW_GPU_FIXED(std::uint64_t, "b64", "b64", FixedLong)
#undef MARROW_GPU_FIXED
#undef MARROW_GPU_CONSTRAINT_FixedWord
#undef MARROW_GPU_CONSTRAINT_FixedLong
MARROW_DEVICE Cell16 load_fixed(bool valid, const Cell16* p) {
  Cell16 v;
  asm("{.reg .pred q; setp.ne.u32 q, %3, 0; mov.b64 %0, 0; mov.b64 %1, 0;"
      " @q ld.global.v2.b64 {%0, %1}, [%2];}"
      : "=l"(v.low), "=l"(v.high)
      : "l"(__cvta_generic_to_global(p)), "r"(static_cast<std::uint32_t>(valid)));
  return v;
}

/// The value itself, computed once: a loop keeps it, where nvcc else computes it again each time to save a
/// register.
MARROW_DEVICE std::uint64_t kept(std::uint64_t v) {
  asm("" : "+l"(v));
  return v;
}
MARROW_DEVICE std::uint32_t kept(std::uint32_t v) {
  asm("" : "+r"(v));
  return v;
}

/// The value, in a register of this thread from here on: nvcc neither computes it again where it is used nor takes
/// it for the same in all threads, which would put a move before each use.
MARROW_DEVICE std::uint32_t pin(std::uint32_t v) {
  const unsigned lane = threadIdx.x & 31u;
  return __shfl_sync(1u << lane, v, static_cast<int>(lane));
}
MARROW_DEVICE int pin(int v) { return static_cast<int>(pin(static_cast<std::uint32_t>(v))); }
template <class T>
MARROW_DEVICE T* pin(T* p) {
  const auto v = reinterpret_cast<std::uint64_t>(p);
  return reinterpret_cast<T*>(std::uint64_t{pin(static_cast<std::uint32_t>(v >> 32))} << 32 |
                              pin(static_cast<std::uint32_t>(v)));
}

/// A table's byte, loaded here and not where the value is first used, so that loads overlap.
MARROW_DEVICE std::uint8_t load_ahead(const std::uint8_t* p) {
  std::uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)));
  return static_cast<std::uint8_t>(v);
}
/// The same; 0 if not `valid`, without a branch.
MARROW_DEVICE std::uint8_t load_ahead(bool valid, const std::uint8_t* p) {
  std::uint32_t v;
  asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; mov.b32 %0, 0; @q ld.global.u8 %0, [%1];}"
               : "=r"(v)
               : "l"(__cvta_generic_to_global(p)), "r"(static_cast<std::uint32_t>(valid)));
  return static_cast<std::uint8_t>(v);
}
/// Has both values ready here, while loads are under way, and not where they are first used.
MARROW_DEVICE void compute_here(std::uint64_t& a, std::uint64_t& b) {
  asm volatile("" : "+l"(a), "+l"(b));
}
/// A data word, loaded here and not where the value is first used, so that loads overlap.
MARROW_DEVICE std::uint64_t load_data_ahead(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
/// 16 aligned bytes of data words, each of which may be of another time; zeros if not `valid`.
MARROW_DEVICE Cell16 load_data_ahead(bool valid, const Cell16* p) {
  Cell16 v;
  asm volatile(
      "{.reg .pred q; setp.ne.u32 q, %3, 0; mov.b64 %0, 0; mov.b64 %1, 0;"
      " @q ld.global.v2.b64 {%0, %1}, [%2];}"
      : "=l"(v.low), "=l"(v.high)
      : "l"(__cvta_generic_to_global(p)), "r"(static_cast<std::uint32_t>(valid))
      : "memory");
  return v;
}
/// A plain store to a window.
MARROW_DEVICE void store_plain(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}

/// 16 bytes, also ordinary.
MARROW_DEVICE void store_wide(void* p, const Words16& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

/// ... unless `sign` is negative, without a branch.
MARROW_DEVICE void store_wide_if(std::int32_t sign, void* p, const Words16& v) {
  asm volatile(
      "{.reg .pred q; setp.ge.s32 q, %5, 0; @q st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(
          __cvta_generic_to_global(p)),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(sign)
      : "memory");
}

template <Scope S, class T>
MARROW_DEVICE T observe(const T* p) {
  return Words<S>::acquire(p);
}

template <Scope S, class T>
MARROW_DEVICE void publish(Store<T> only) {
  Words<S>::release_fence();
  Words<S>::store(only.word, only.value);
}
template <Scope S, class T, class... More>
MARROW_DEVICE void publish(Store<T> first, More... more) {
  Words<S>::release_fence();
  Words<S>::store(first.word, first.value);
  (Words<S>::store(more.word, more.value), ...);
}

template <Scope S>
MARROW_DEVICE void publish_add(std::uint64_t* word, std::uint64_t n) {
  Words<S>::release_reduce(word, n);
}

template <Scope S>
MARROW_DEVICE void publish_max(std::uint64_t* word, std::uint64_t n) {
  Words<S>::release_max(word, n);
}

template <Scope S>
class Publication {
 public:
  MARROW_DEVICE Publication() { Words<S>::release_fence(); }
  /// The scope of the release is known at run time: 0 device, 1 S. A loop for the latter, since the compiler
  /// makes both fences conditional instructions otherwise, and one not taken costs 100 cycles.
  explicit MARROW_DEVICE Publication(std::uint32_t wide) {
    if (wide == 0) {
      Words<Scope::device>::release_fence();
    } else {
#pragma unroll 1
      for (; wide; --wide) Words<S>::release_fence();
    }
  }
  /// W: scope of the store itself, e.g. system for a doorbell after a device-scope release.
  template <Scope W = S, class T, class U>
  MARROW_DEVICE void store(T* word, U value) {
    Words<W>::store(word, static_cast<T>(value));
  }
  MARROW_DEVICE void add(std::uint64_t* word, std::uint64_t n) { Words<S>::reduce(word, n); }
};

template <Scope S>
MARROW_DEVICE void settle() {
  Words<S>::fence();
}

MARROW_DEVICE void store_cell(void* p, Cell16 cell) {
  asm volatile("{.reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t;}" ::"l"(
                   __cvta_generic_to_global(p)),
               "l"(cell.low), "l"(cell.high)
               : "memory");
}
/// ptxas (CUDA 13.0) narrows this load to the words that are used, a load for each run of neighbours: of a cell of which only
/// words 0 and 3 are used it makes two loads, and sees a store half. Use all of a cell, or words that are neighbours in one half.
MARROW_DEVICE Cell16 load_cell(const void* p) {
  Cell16 cell;
  asm volatile("{.reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t;}"
               : "=l"(cell.low), "=l"(cell.high)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return cell;
}

MARROW_DEVICE void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

/// In a kernel started by launch_early: returns when the stream's previous kernel has ended and its
/// stores are visible. Elsewhere it returns at once.
MARROW_DEVICE void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Every block that calls this (or has ended) allows the stream's next launch_early kernel to start.
MARROW_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

MARROW_DEVICE std::uint64_t now_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
MARROW_DEVICE std::uint64_t cycle_clock() { return static_cast<std::uint64_t>(clock64()); }
MARROW_DEVICE void relax(std::uint32_t) {}

namespace detail {

/// kCount elements, `step` apart, all loads in flight before the first store.
template <int kCount, class T>
MARROW_DEVICE void copy_some(T* to, const T* from, std::size_t step) {
  T value[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) value[k] = from[k * step];
#pragma unroll
  for (int k = 0; k < kCount; ++k) to[k * step] = value[k];
}

/// Whole tiles of kCount x 32 neighbouring elements, a warp each: the addresses of one tile differ by
/// constants, so hardly an instruction is spent on them. Returns how many elements were in tiles.
template <int kCount, class T>
MARROW_DEVICE std::size_t copy_tiles(T* to, const T* from, std::size_t n, unsigned rank,
                                     unsigned size) {
  constexpr std::size_t kTile = kCount * 32;
  const std::size_t tiled = n / kTile * kTile;
  const std::size_t step = std::size_t{size / 32} * kTile;
  for (std::size_t at = rank / 32 * kTile; at < tiled; at += step) {
    copy_some<kCount>(to + at + rank % 32, from + at + rank % 32, 32);
  }
  return tiled;
}

/// Copies n elements of T. One SM needs about 4 x 16 bytes in flight per thread at 1024 threads to reach
/// its 46 GB/s of NVLink.
template <class T>
MARROW_DEVICE void copy_elements(T* to, const T* from, std::size_t n, unsigned rank,
                                 unsigned size) {
  __builtin_assume(__isGlobal(to));
  __builtin_assume(__isGlobal(from));
  std::size_t done = 0;
  if (size % 32 == 0) {
    if (n >= std::size_t{8} * size) {
      done = copy_tiles<8>(to, from, n, rank, size);
    } else if (n >= std::size_t{2} * size) {
      done = copy_tiles<4>(to, from, n, rank, size);
    }
  } else {
    const std::size_t own = n / size / 8 * 8;
    for (std::size_t at = 0; at < own; at += 8)
      copy_some<8>(to + (at * size + rank), from + (at * size + rank), size);
    done = own * size;
  }
  for (std::size_t at = done + rank; at < n; at += size) to[at] = from[at];
}

/// Bytes before both sides are aligned, whole elements of T, bytes after.
template <class T>
MARROW_DEVICE void copy_as(unsigned char* to, const unsigned char* from, std::size_t bytes,
                           unsigned rank, unsigned size) {
  std::size_t head = -reinterpret_cast<std::uintptr_t>(to) & (sizeof(T) - 1);
  if (head > bytes) head = bytes;
  const std::size_t elements = (bytes - head) / sizeof(T);
  copy_elements(reinterpret_cast<T*>(to + head), reinterpret_cast<const T*>(from + head), elements,
                rank, size);
  const std::size_t done = head + elements * sizeof(T);
  for (std::size_t i = rank; i < head; i += size) to[i] = from[i];
  for (std::size_t i = done + rank; i < bytes; i += size) to[i] = from[i];
}

/// Not inlined: its 32 registers of loads in flight would otherwise count in every kernel that puts.
__device__ __noinline__ inline void copy_any(unsigned char* to, const unsigned char* from,
                                             std::size_t bytes, unsigned rank, unsigned size) {
  const auto differ = reinterpret_cast<std::uintptr_t>(to) ^ reinterpret_cast<std::uintptr_t>(from);
  if ((differ & 15) == 0) {
    copy_as<uint4>(to, from, bytes, rank, size);
  } else if ((differ & 3) == 0) {
    copy_as<std::uint32_t>(to, from, bytes, rank, size);
  } else {
    copy_elements(to, from, bytes, rank, size);
  }
}

}  // namespace detail

MARROW_DEVICE void copy(void* dst, const void* src, std::size_t bytes, unsigned rank,
                        unsigned size) {
  auto* to = static_cast<unsigned char*>(dst);
  auto* from = static_cast<const unsigned char*>(src);
  const auto either =
      reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
  if ((either & 15) == 0 && bytes <= std::size_t{size} * 16) {
    // At most one element a thread.
    if (rank < bytes / 16)
      reinterpret_cast<uint4*>(to)[rank] = reinterpret_cast<const uint4*>(from)[rank];
  } else if ((either & 7) == 0 && bytes == 8) {
    if (rank == 0)
      *reinterpret_cast<std::uint64_t*>(to) = *reinterpret_cast<const std::uint64_t*>(from);
  } else {
    detail::copy_any(to, from, bytes, rank, size);
  }
}

}  // namespace gpu_device
}  // namespace marrow
