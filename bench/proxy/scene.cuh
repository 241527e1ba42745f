// SPDX-License-Identifier: Apache-2.0
// What a kernel of a measured rank works with and leaves behind: cycles, its clock, a verdict.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "bench.cuh"
#include "marrow/marrow.hpp"

namespace proxy_bench {

constexpr int kWrongData = 99;  ///< a verdict that is no Status

struct Scene {
  marrow::Communicator& comm;
  marrow::DeviceCommunicator handle;
  marrow::WindowHandle window;
  cudaStream_t stream;
  std::uint64_t* log = nullptr;  ///< cycles of each round, in GPU memory
  floors::Clock* clock = nullptr;
  int* failed = nullptr;  ///< a Status, or kWrongData

  /// On the current GPU. @param rounds  the most that are logged
  Scene(marrow::Communicator& communicator, marrow::DeviceCommunicator device_handle,
        marrow::WindowHandle window_handle, cudaStream_t on, int rounds)
      : comm(communicator), handle(device_handle), window(window_handle), stream(on) {
    must(cudaMalloc(&log, sizeof(*log) * rounds), "malloc");
    must(cudaMalloc(&clock, sizeof(*clock)), "malloc");
    must(cudaMalloc(&failed, sizeof(*failed)), "malloc");
    must(cudaMemsetAsync(failed, 0, sizeof(*failed), stream), "memset");
  }
  ~Scene() {
    (void)cudaFree(log);
    (void)cudaFree(clock);
    (void)cudaFree(failed);
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  /// Waits for the stream; a bad verdict ends the process.
  void check(const char* what) const {
    must(cudaStreamSynchronize(stream), what);
    int bad = 0;
    must(cudaMemcpyAsync(&bad, failed, sizeof(int), cudaMemcpyDeviceToHost, stream), "copy");
    must(cudaStreamSynchronize(stream), what);
    comm.check();
    if (bad == 0) return;
    std::fprintf(stderr, "%s, rank %d: %s\n", what, handle.rank,
                 bad == kWrongData ? "wrong data" : name(static_cast<marrow::Status>(bad)));
    std::exit(1);
  }
  /// Of each round after the first `warmup`, in ns. @param parts  2: half of it
  Summary times(int rounds, int warmup, double parts) const {
    return floors::in_ns(log, clock, stream, rounds, warmup, parts);
  }
};

}  // namespace proxy_bench
