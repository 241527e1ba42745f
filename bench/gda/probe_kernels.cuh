// SPDX-License-Identifier: Apache-2.0
// One put in an otherwise empty kernel: what Marrow costs a kernel in registers, stack and blocks per SM.
// gda_registers_test reads what ptxas says of them; marrow_gda_issue asks the driver.
#pragma once

#include "marrow/device.cuh"

namespace gda_probes {

using namespace marrow;

#define GDA_PROBE(NAME, BOUND, PATHS, SHARING, CALL)                                        \
  __global__ void BOUND NAME(const MARROW_GRID_CONSTANT DeviceCommunicator comm,            \
                             const MARROW_GRID_CONSTANT WindowHandle window, int peer,      \
                             std::uint64_t offset, std::uint64_t from, std::uint64_t bytes, \
                             Status* out) {                                                 \
    const Gin<PATHS> gin(comm, 0, SHARING);                                                 \
    *out = gin.CALL;                                                                        \
  }

/// The same through the queue's holder.
#define GDA_PROBE_HELD(NAME, CALL)                                                    \
  __global__ void NAME(const MARROW_GRID_CONSTANT DeviceCommunicator comm,            \
                       const MARROW_GRID_CONSTANT WindowHandle window, int peer,      \
                       std::uint64_t offset, std::uint64_t from, std::uint64_t bytes, \
                       Status* out) {                                                 \
    auto queue = Gin<Path::gda>(comm, 0, Sharing::thread).exclusive(peer);            \
    *out = queue.CALL;                                                                \
  }

// The bound is what the put fits in: it may not spill.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define GDA_PROBE_24 __maxnreg__(24)
#else
#define GDA_PROBE_24
#endif
GDA_PROBE(exclusive_put_24, GDA_PROBE_24, Path::gda, Sharing::thread,
          put(peer, window, offset, window, from, bytes))
GDA_PROBE(exclusive_put, , Path::gda, Sharing::thread,
          put(peer, window, offset, window, from, bytes))
GDA_PROBE_HELD(held_put, put(window, offset, window, from, bytes))
GDA_PROBE_HELD(held_put_signal, put(window, offset, window, from, bytes, SignalAdd{0, 1}))
GDA_PROBE(exclusive_put_value, , Path::gda, Sharing::thread, put_value(peer, window, offset, from))
GDA_PROBE(exclusive_signal, , Path::gda, Sharing::thread, signal(peer, SignalAdd{0, from}))
GDA_PROBE(exclusive_put_signal, , Path::gda, Sharing::thread,
          put(peer, window, offset, window, from, bytes, SignalAdd{0, 1}))
GDA_PROBE(exclusive_put_each_lane, , Path::gda, Sharing::thread,
          put(peer, window, offset, window, from, bytes, EachLane{}))
GDA_PROBE(block_shared_put, , Path::gda, Sharing::block,
          put(peer, window, offset, window, from, bytes))
GDA_PROBE(device_shared_put, , Path::gda, Sharing::device,
          put(peer, window, offset, window, from, bytes))
GDA_PROBE(any_sharing_put, , Path::gda, comm.sharing,
          put(peer, window, offset, window, from, bytes))
#undef GDA_PROBE
#undef GDA_PROBE_HELD

/// A kernel that has Marrow's headers and does not call them.
__global__ void unrelated(float* to, const float* from, int n) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n;
       i += static_cast<int>(gridDim.x * blockDim.x))
    to[i] = from[i] * 2 + to[i];
}

}  // namespace gda_probes
