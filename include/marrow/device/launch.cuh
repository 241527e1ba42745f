// SPDX-License-Identifier: Apache-2.0
// marrow::launch: one call that starts a kernel on the GPU or on the CPU device. Under nvcc a kernel
// is a __global__ function, under g++ an ordinary one; write MARROW_KERNEL for both.
#pragma once

#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "marrow/device/platform.cuh"
#include "marrow/error.hpp"
#include "marrow/place.hpp"

namespace marrow {

#if defined(__CUDACC__)

namespace detail {
/// Opens all the shared memory of a block of the current GPU, `device`, to a kernel: what its own static
/// one leaves. The attribute belongs to the kernel, not to a launch: were it each launch's own size, another
/// thread's smaller launch could lower it between this one's call and its launch. Done once per kernel and GPU.
/// @param most  set to the dynamic shared memory that a launch may ask for, in bytes
inline cudaError_t open_shared_memory(const void* kernel, int device, std::size_t& most) {
  struct Known {
    std::mutex mutex;
    std::map<std::pair<const void*, int>, std::size_t> most;
  };
  static Known known;
  const std::lock_guard lock(known.mutex);
  const auto found = known.most.find({kernel, device});
  if (found != known.most.end()) {
    most = found->second;
    return cudaSuccess;
  }
  int block = 0;
  cudaFuncAttributes attributes{};
  cudaError_t result =
      cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, kernel);
  if (result != cudaSuccess) return result;
  most = static_cast<std::size_t>(block) - attributes.sharedSizeBytes;
  result = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(most));
  if (result == cudaSuccess) known.most.emplace(std::pair(kernel, device), most);
  return result;
}

template <class... Parameters, class... Args>
void launch_on_gpu(const Place& where, int grid, int block, std::size_t shared_bytes, bool early,
                   void (*kernel)(Parameters...), Args&&... args) {
  if (where.kind != Place::Kind::gpu) {
    throw Error(Code::invalid_argument, "a kernel built by nvcc was launched on the CPU device",
                "build the kernel's file with g++ for Place::cpu(), or pass Place::gpu(device)");
  }
  std::tuple<Parameters...> values(static_cast<Parameters>(std::forward<Args>(args))...);
  std::apply(
      [&](auto&... each) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&each))..., nullptr};
        const auto* function = reinterpret_cast<const void*>(kernel);
        int before = where.device;  // the caller's current device stays what it was
        (void)cudaGetDevice(&before);
        cudaError_t result = cudaSetDevice(where.device);
        std::size_t most = shared_bytes;
        if (result == cudaSuccess && shared_bytes != 0)
          result = open_shared_memory(function, where.device, most);
        if (result == cudaSuccess && shared_bytes <= most) {
          int major = 0;  // early launches came with compute capability 9.0
          if (early)
            (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, where.device);
          cudaLaunchAttribute attribute{};
          attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
          attribute.val.programmaticStreamSerializationAllowed = 1;
          cudaLaunchConfig_t config{};
          config.gridDim = dim3(grid);
          config.blockDim = dim3(block);
          config.dynamicSmemBytes = shared_bytes;
          config.stream = static_cast<cudaStream_t>(where.stream);
          config.attrs = &attribute;
          config.numAttrs = major >= 9 ? 1 : 0;
          result = cudaLaunchKernelExC(&config, function, pointers);
        }
        if (before != where.device) (void)cudaSetDevice(before);
        if (result == cudaSuccess && shared_bytes > most) {
          throw Error(Code::invalid_argument,
                      "launch of a kernel with " + std::to_string(shared_bytes) +
                          " bytes of shared memory a block; GPU " + std::to_string(where.device) +
                          " has at most " + std::to_string(most) + " for it",
                      "ask for less");
        }
        if (result != cudaSuccess) {
          throw Error(Code::cuda,
                      std::string("launch of a kernel on GPU ") + std::to_string(where.device) +
                          " failed: " + cudaGetErrorString(result),
                      "check grid, block and shared memory against the GPU's limits");
        }
      },
      values);
}
}  // namespace detail

/// Enqueues kernel(args...) on the stream of `where`; returns at once. See the CPU form below.
/// @throws Error(invalid_argument) when `where` is the CPU device: this translation unit was built by
///         nvcc, or `shared_bytes` is more than its GPU has for this kernel; Error(cuda) when the launch fails
template <class... Parameters, class... Args>
void launch(const Place& where, int grid, int block, std::size_t shared_bytes,
            void (*kernel)(Parameters...), Args&&... args) {
  detail::launch_on_gpu(where, grid, block, shared_bytes, false, kernel,
                        std::forward<Args>(args)...);
}

/// launch(), except that the kernel may start while the stream's previous one still runs (its blocks
/// are placed meanwhile, which hides 1 to 2 us of launch), if that one says let_next_kernel_start().
/// The kernel must call await_previous_kernel() before it touches memory.
template <class... Parameters, class... Args>
void launch_early(const Place& where, int grid, int block, std::size_t shared_bytes,
                  void (*kernel)(Parameters...), Args&&... args) {
  detail::launch_on_gpu(where, grid, block, shared_bytes, true, kernel,
                        std::forward<Args>(args)...);
}

#else

namespace detail {
/// MARROW_CPU_LANES and MARROW_CPU_SEED in force. @throws Error(invalid_argument) naming a bad value
struct CpuSettings {
  int lanes = 1;
  std::uint64_t seed = 0;
};
MARROW_API CpuSettings cpu_settings();
}  // namespace detail

/// Runs kernel(args...) on the CPU device: `grid` blocks of `block` OS threads, all at once, and
/// returns when the kernel has finished (a stream's order is then trivially kept).
/// MARROW_CPU_LANES gives warps of 1..32 lanes (default 1), MARROW_CPU_SEED a seeded schedule.
/// @param grid          blocks, >= 1
/// @param block         threads a block, >= 1; grid * block at most 4096
/// @param shared_bytes  block's dynamic shared memory
/// @throws Error(invalid_argument) for a GPU place (build the kernel's file with nvcc), sizes out of
///         range, or a MARROW_CPU_LANES or MARROW_CPU_SEED that is none; Error(out_of_memory) for threads
template <class... Parameters, class... Args>
void launch(const Place& where, int grid, int block, std::size_t shared_bytes,
            void (*kernel)(Parameters...), Args&&... args) {
  if (where.kind != Place::Kind::cpu) {
    throw Error(Code::invalid_argument, "a kernel built by g++ was launched on a GPU",
                "build the kernel's file with nvcc for Place::gpu(), or pass Place::cpu()");
  }
  if (grid < 1 || block < 1 || grid > 4096 / block) {
    throw Error(Code::invalid_argument,
                "launch of " + std::to_string(grid) + " blocks x " + std::to_string(block) +
                    " threads on the CPU device",
                "both must be at least 1 and their product at most 4096 OS threads");
  }
  const std::tuple<Parameters...> values(static_cast<Parameters>(std::forward<Args>(args))...);
  const detail::CpuSettings settings = detail::cpu_settings();
  const int lanes = settings.lanes;
  const std::uint64_t seed = settings.seed;
  static_assert(kMaxCpuLanes == 32, "the range of MARROW_CPU_LANES");
  std::vector<CpuBlock> blocks(static_cast<std::size_t>(grid));
  std::vector<std::unique_ptr<std::byte[]> > shared;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(grid) * block);
  for (int b = 0; b < grid; ++b) {
    CpuBlock& team = blocks[b];
    team.index = b;
    team.grid = grid;
    team.size = block;
    team.lanes = lanes;
    team.barrier.set_members(static_cast<std::uint32_t>(block));
    team.warps = std::make_unique<CpuWarp[]>((block + lanes - 1) / lanes);
    team.value = std::make_unique<std::atomic<std::uint32_t>[]>(block);
    shared.push_back(std::make_unique<std::byte[]>(shared_bytes + 16));
    team.shared = shared.back().get();
  }
  const auto body = [&](CpuBlock& team, int t) {
    CpuThread& self = cpu_thread();
    const CpuThread outer = self;
    self.block = &team;
    self.index = t;
    self.random =
        seed ? seed * 0x9e3779b97f4a7c15ull + (team.index * 4099u + t + 1) * 0xbf58476d1ce4e5b9ull
             : 0;
    std::apply(kernel, values);
    team.barrier.leave();
    self = outer;
  };
  if (grid * block == 1) {
    body(blocks[0], 0);
    return;
  }
  // The kernel starts when all threads are there: a block with a missing one would wait for ever.
  std::atomic<int> start{0};  // 1: run, -1: there are too few threads, leave
  const auto begin = [&](CpuBlock& team, int t) {
    for (std::uint32_t spins = 0; start.load(std::memory_order_acquire) == 0; ++spins) relax(spins);
    if (start.load(std::memory_order_acquire) > 0) body(team, t);
  };
  bool complete = true;
  try {
    for (CpuBlock& team : blocks) {
      for (int t = 0; t < block; ++t) threads.emplace_back(begin, std::ref(team), t);
    }
  } catch (const std::system_error&) {
    complete = false;
  }
  start.store(complete ? 1 : -1, std::memory_order_release);
  for (std::thread& thread : threads) thread.join();
  if (!complete) {
    throw Error(
        Code::out_of_memory,
        "launch of " + std::to_string(grid) + " blocks x " + std::to_string(block) +
            " threads: the system gave only " + std::to_string(threads.size()) + " threads",
        "use fewer, or raise the limit of processes (ulimit -u, the container's pids limit)");
  }
}

/// On the CPU device every kernel has ended before the next is launched: the same as launch().
template <class... Parameters, class... Args>
void launch_early(const Place& where, int grid, int block, std::size_t shared_bytes,
                  void (*kernel)(Parameters...), Args&&... args) {
  launch(where, grid, block, shared_bytes, kernel, std::forward<Args>(args)...);
}

#endif

}  // namespace marrow
