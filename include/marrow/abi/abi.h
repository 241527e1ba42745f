// SPDX-License-Identifier: Apache-2.0
// The one place that says how code is marked for host and device, what is exported from the shared
// library, and which ABI number a kernel is stamped with.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define MARROW_HOST_DEVICE __host__ __device__
#define MARROW_DEVICE __device__ __forceinline__
#define MARROW_DEVICE_COLD __device__ __noinline__
#define MARROW_KERNEL __global__ void
#define MARROW_GRID_CONSTANT __grid_constant__
#define MARROW_LAUNCH_BOUNDS(threads) __launch_bounds__(threads)
#else
#define MARROW_HOST_DEVICE
#define MARROW_DEVICE inline
#define MARROW_DEVICE_COLD inline __attribute__((noinline, cold))
#define MARROW_KERNEL void
#define MARROW_GRID_CONSTANT
#define MARROW_LAUNCH_BOUNDS(threads)
#endif
// MARROW_KERNEL marks a kernel. Take a DeviceCommunicator as `const MARROW_GRID_CONSTANT
// DeviceCommunicator comm`: Gin keeps a reference to it, and without the mark nvcc copies all of it to
// each thread's local memory. MARROW_LAUNCH_BOUNDS(1024) after MARROW_KERNEL keeps a kernel launchable
// with that many threads (64 registers each).

#define MARROW_API __attribute__((visibility("default")))

namespace marrow {

/// Layout number of everything a kernel and the host both read (include/marrow/abi). A kernel built
/// against another number gets Status::invalid from each operation and Communicator::check() names
/// both numbers.
inline constexpr std::uint32_t kAbiVersion = 3;

}  // namespace marrow
