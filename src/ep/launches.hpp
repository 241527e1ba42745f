// SPDX-License-Identifier: Apache-2.0
// The kernels of ep as functions, once for the CPU device and once, compiled by nvcc, for GPUs.
#pragma once

#include "ep/shape.hpp"
#include "marrow/place.hpp"

namespace marrow::ep {

#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif
struct DispatchArgs;
struct CombineArgs;
struct FarArgs;
}  // namespace cpu_device / gpu_device

/// What a launch needs besides its arguments.
struct Target {
  Place place;
  int blocks;            ///< of a kernel that uses all it may
  int threads;           ///< a block
  std::uint64_t* times;  ///< see Group::record_times
};

/// Phases of one call.
enum class Phase : std::uint8_t { send = 1, receive = 2, both = 3 };

struct Launches {
  void (*dispatch)(const Target&, const DeviceCommunicator&, const WindowHandle&, const Shape&,
                   const DispatchInput&, const DispatchOutput&, std::uint64_t handle, Phase);
  void (*combine)(const Target&, const DeviceCommunicator&, const WindowHandle&, const Shape&,
                  const CombineInput&, const CombineOutput&, std::uint64_t handle, Phase);
  /// See flush_kernel.
  void (*flush)(const Target&, const DeviceCommunicator&, std::uint64_t* to,
                std::uint64_t deadline_ns);
  /// See reset_kernel.
  void (*reset)(const Target&, const DeviceCommunicator&, const WindowHandle&, const Shape&,
                std::uint64_t batch, const std::uint32_t* failed, const std::uint16_t* experts);
  void (*report)(const Target&, const WindowHandle&, const Shape&, std::uint64_t* to, bool clear);
  /// Waits for the place's stream. @throws Error(cuda)
  void (*synchronize)(const Place&);
  /// Whether the place's stream is being captured into a graph.
  bool (*capturing)(const Place&);
  /// SMs of the place; 0: the CPU device.
  int (*processors)(const Place&);
  /// Loads the kernels. CUDA would do so at their first launch, and wait for the GPU's running kernels then, which may
  /// themselves wait for this launch: of another rank on this GPU, or, by a lock of CUDA's, on any GPU of the process.
  void (*load)(const Place&);
};

/// @throws Error(unsupported) for a GPU when the library was built without nvcc
const Launches& launches(const Place& place);
/// Defined by launches_gpu.cu, in builds with CUDA.
const Launches& gpu_launches();

}  // namespace marrow::ep
