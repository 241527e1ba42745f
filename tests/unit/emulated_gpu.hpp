// SPDX-License-Identifier: Apache-2.0
// Just enough of a GPU to run one block of CUDA code on the CPU: a warp is a thread, its lanes are fibers that take
// turns wherever the warp meets (shuffle, ballot, __syncwarp). For the logic of code that is written for nvcc; its
// memory order is not tested here. Include before that code.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif
// Keeps the caller's registers on its stack, its stack in *from, and goes on where `to` was kept. (swapcontext would
// make two system calls each time.)
extern "C" void emulated_gpu_switch(void** from, void* to);
asm(R"(
.text
.type emulated_gpu_switch, @function
emulated_gpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_gpu_switch, .-emulated_gpu_switch
)");

namespace emulated_gpu {

struct Lane {
  void* at = nullptr;  ///< its stack pointer while it does not run
  std::unique_ptr<char[]> stack;
  bool ended = false;
};

struct Warp {
  unsigned number = 0;
  std::barrier<>* block = nullptr;
  std::function<void()> kernel;
  void* thread = nullptr;
  Lane lanes[32];
  unsigned now = 0;  ///< the lane that runs
  unsigned arrived = 0;
  std::uint64_t meeting = 0;
  std::uint64_t slots[2][32] = {};

  void to_next() {
    const unsigned from = now;
    do {
      now = (now + 1) % 32;
    } while (lanes[now].ended && now != from);
    if (now != from) emulated_gpu_switch(&lanes[from].at, lanes[now].at);
  }
  /// All lanes give a value and get everybody's.
  const std::uint64_t* meet(std::uint64_t value) {
    const std::uint64_t mine = meeting;
    slots[mine & 1][now] = value;
    if (++arrived == 32) {
      arrived = 0;
      ++meeting;
    } else {
      while (meeting == mine) to_next();
    }
    return slots[mine & 1];
  }
};

inline thread_local Warp* warp = nullptr;

inline void run_lane() {
  warp->kernel();
  warp->lanes[warp->now].ended = true;
  for (unsigned i = 0; i < 32; ++i) {
    if (warp->lanes[i].ended) continue;
    void* ended = nullptr;
    warp->now = i;
    emulated_gpu_switch(&ended, warp->lanes[i].at);
  }
  void* ended = nullptr;
  emulated_gpu_switch(&ended, warp->thread);
}

/// Starts one block of `warps` full warps; join the threads for its end.
inline std::vector<std::thread> launch(unsigned warps, std::barrier<>& block,
                                       std::function<void()> kernel) {
  std::vector<std::thread> threads;
  for (unsigned w = 0; w < warps; ++w) {
    threads.emplace_back([w, &block, kernel] {
      auto mine = std::make_unique<Warp>();
      mine->number = w;
      mine->block = &block;
      mine->kernel = kernel;
      warp = mine.get();
      constexpr std::size_t kStack = 256 * 1024;
      for (Lane& lane : mine->lanes) {
        lane.stack = std::make_unique<char[]>(kStack);
        // As if it had been switched away from just before its first instruction.
        auto top =
            reinterpret_cast<std::uintptr_t>(lane.stack.get() + kStack) & ~std::uintptr_t{15};
        auto** frame =
            reinterpret_cast<void**>(top) - 8;  // six registers, the function, its caller
        std::fill_n(frame, 8, nullptr);
        frame[6] = reinterpret_cast<void*>(&run_lane);
        lane.at = frame;
      }
      emulated_gpu_switch(&mine->thread, mine->lanes[0].at);
    });
  }
  return threads;
}

struct Index {
  struct X {
    operator unsigned() const { return warp->number * 32 + warp->now; }
  } x;
};
struct Size {
  unsigned x = 512;
};

}  // namespace emulated_gpu

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
inline emulated_gpu::Index threadIdx;
inline emulated_gpu::Size blockDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const std::uint64_t got = emulated_gpu::warp->meet(word)[lane];
  std::memcpy(&value, &got, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return __shfl_sync(mask, value, static_cast<int>(emulated_gpu::warp->now ^ unsigned(distance)));
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const std::uint64_t* all = emulated_gpu::warp->meet(predicate);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[i] != 0) << i;
  // Nobody has anything to do: leaves the core to the other warps.
  if (bits == 0 && emulated_gpu::warp->now == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  return bits;
}
inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline unsigned __match_any_sync(unsigned, std::uint64_t value) {
  const std::uint64_t* all = emulated_gpu::warp->meet(value);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[i] == value) << i;
  return bits;
}
inline void __syncwarp() { emulated_gpu::warp->meet(0); }
inline void __syncthreads() {
  emulated_gpu::warp->meet(0);
  if (emulated_gpu::warp->now == 0) emulated_gpu::warp->block->arrive_and_wait();
  emulated_gpu::warp->meet(0);
}
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {
  if (emulated_gpu::warp->now == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}
template <class T, class U>
T atomicAdd(T* p, U n) {
  return __atomic_fetch_add(p, static_cast<T>(n), __ATOMIC_SEQ_CST);
}
template <class T, class U>
T atomicAdd_system(T* p, U n) {
  return atomicAdd(p, n);
}
template <class T>
T atomicExch(T* p, T value) {
  return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicCAS(T* p, T expected, T desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
