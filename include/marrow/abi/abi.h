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
#else
#define MARROW_HOST_DEVICE
#define MARROW_DEVICE inline
#define MARROW_DEVICE_COLD inline __attribute__((noinline, cold))
#define MARROW_KERNEL void
#endif

#define MARROW_API __attribute__((visibility("default")))

namespace marrow {

/// Layout number of everything a kernel and the host both read (include/marrow/abi). A kernel built
/// against another number gets Status::invalid from each operation and Communicator::check() names
/// both numbers.
inline constexpr std::uint32_t kAbiVersion = 1;

}  // namespace marrow
