// SPDX-License-Identifier: Apache-2.0
// Which kernels a call launches, with how many blocks: included by launches.cpp and, under nvcc, launches_gpu.cu.
#pragma once

#include <algorithm>

#include "ep/kernels/combine.cuh"
#include "ep/kernels/far.cuh"
#include "ep/kernels/place.cuh"
#include "ep/kernels/send.cuh"
#include "ep/launches.hpp"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

inline bool has(Phase phase, Phase which) {
  return (static_cast<int>(phase) & static_cast<int>(which)) != 0;
}

inline void launch_far_put(const Target& t, const DeviceCommunicator& comm, const WindowHandle& w,
                           const Shape& s, const FarArgs& a) {
  if (s.far_any)
    launch_early(t.place, std::min(t.blocks, s.ranks), t.threads, 0, far_put_kernel, comm, w, s, a);
}
inline void launch_far_wait(const Target& t, const DeviceCommunicator& comm, const WindowHandle& w,
                            const Shape& s, const FarArgs& a) {
  if (s.far_any) launch_early(t.place, 1, kOnGpu ? 128 : 1, 0, far_wait_kernel, comm, w, s, a);
}

/// Shares of a grid that does both: sending blocks read and quantise, receiving ones mostly wait, then copy; an SM's
/// loads queue behind its own stores to peers, so they are not the same ones.
inline int blocks_that_send(int blocks) {
  // Of a few, the instructions count, and sending has more of them.
  return std::max(1, blocks < 64 ? (blocks * 7 + 12) / 24 : blocks * 32 / 132);
}

inline void run_dispatch(const Target& t, const DeviceCommunicator& comm, const WindowHandle& w,
                         const Shape& s, const DispatchInput& in, const DispatchOutput& out,
                         std::uint64_t handle, Phase phase) {
  DispatchArgs a{};
  a.rows = static_cast<const std::byte*>(in.rows);
  a.scales = static_cast<const std::byte*>(in.scales);
  a.ids = in.expert_ids;
  a.weights = in.weights;
  a.device_tokens = in.device_tokens;
  a.tokens = in.tokens;
  a.out_rows = static_cast<std::byte*>(out.rows);
  a.out_scales = static_cast<std::byte*>(out.scales);
  a.handle = handle;
  a.times = t.times;
  const auto kernel = s.fp8 ? &dispatch_kernel<true, false> : &dispatch_kernel<false, false>;
  const std::size_t shared = std::max<std::size_t>(
      kNumbersBytes + sizeof(Targets), place_memory(s).bytes(s, t.threads / kQuadLanes));
  FarArgs far{};
  far.handle = handle;
  if (phase == Phase::both && !s.far_any && s.place_in_block) {
    a.send_blocks = blocks_that_send(t.blocks);
    a.receive_from = t.blocks > 3 ? a.send_blocks : 0;
    a.by_receivers = Divisor::by(static_cast<std::uint32_t>(t.blocks - a.receive_from));
    const auto apart = s.fp8 ? &dispatch_kernel<true, true> : &dispatch_kernel<false, true>;
    launch_early(t.place, t.blocks, t.threads, shared, a.receive_from > 0 ? apart : kernel, comm, w,
                 s, a);
    return;
  }
  if (has(phase, Phase::send)) {
    const int blocks = std::clamp(in.device_tokens ? s.tokens : in.tokens, 1, t.blocks);
    a.send_blocks = a.receive_from = blocks;
    launch_early(t.place, blocks, t.threads, shared, kernel, comm, w, s, a);
    launch_far_put(t, comm, w, s, far);
  }
  if (has(phase, Phase::receive)) {
    launch_far_wait(t, comm, w, s, far);
    if (!s.place_in_block) {
      launch_early(t.place, std::min(t.blocks, s.local + 1), t.threads,
                   (static_cast<std::size_t>(t.threads) + 1) * 4, place_kernel, comm, w, s, handle);
    }
    a.send_blocks = a.receive_from = 0;
    a.by_receivers = Divisor::by(static_cast<std::uint32_t>(t.blocks));
    launch_early(t.place, t.blocks, t.threads, shared, kernel, comm, w, s, a);
  }
}

inline void run_combine(const Target& t, const DeviceCommunicator& comm, const WindowHandle& w,
                        const Shape& s, const CombineInput& in, const CombineOutput& out,
                        std::uint64_t handle, Phase phase) {
  CombineArgs a{};
  a.rows = static_cast<const std::byte*>(in.rows);
  a.out_rows = static_cast<std::byte*>(out.rows);
  a.handle = handle;
  a.times = t.times;
  a.exact = in.mode == CombineMode::exact;
  a.weighted = in.weighted;
  const auto kernel = a.exact || s.rank_major ? &combine_kernel<false> : &combine_kernel<true>;
  FarArgs far{};
  far.handle = handle;
  far.combine = 1;
  far.exact = a.exact;
  if (in.registered.memory.local && a.rows && (a.exact || s.rank_major)) {
    a.from_rows = far.from_rows = 1;
    far.source = Region(in.registered.memory);
    far.offset = static_cast<std::uint64_t>(a.rows - in.registered.memory.local);
  }
  if (phase == Phase::both && !s.far_any) {
    a.send = a.receive = 1;
    launch_early(t.place, t.blocks, t.threads, kNumbersBytes, kernel, comm, w, s, a);
    return;
  }
  if (has(phase, Phase::send)) {
    a.send = 1;
    launch_early(t.place, t.blocks, t.threads, kNumbersBytes, kernel, comm, w, s, a);
    launch_far_put(t, comm, w, s, far);
  }
  if (has(phase, Phase::receive)) {
    launch_far_wait(t, comm, w, s, far);
    a.send = 0;
    a.receive = 1;
    launch_early(t.place, t.blocks, t.threads, kNumbersBytes, kernel, comm, w, s, a);
  }
}

inline void run_flush(const Target& t, const DeviceCommunicator& comm, std::uint64_t* to,
                      std::uint64_t deadline_ns) {
  launch(t.place, 1, t.threads, 0, flush_kernel, comm, to, deadline_ns);
}

inline void run_reset(const Target& t, const DeviceCommunicator& comm, const WindowHandle& w,
                      const Shape& s, std::uint64_t batch, const std::uint32_t* failed,
                      const std::uint16_t* experts) {
  launch(t.place, kOnGpu ? t.blocks : 1, t.threads, 0, reset_kernel, comm, w, s, batch, failed,
         experts);
}

inline void run_report(const Target& t, const WindowHandle& w, const Shape& s, std::uint64_t* to,
                       bool clear) {
  launch(t.place, 1, t.threads, 0, report_kernel, w, s, to, clear ? 1 : 0);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
