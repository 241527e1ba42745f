// SPDX-License-Identifier: Apache-2.0
// What every floor kernel needs: two GPUs of one process with peer access, one stream each, a log in
// GPU memory (a store to host memory would make every later system fence dearer), and a deadline in
// each wait.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace floors {

inline void must(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

__device__ __forceinline__ std::uint64_t global_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

/// Spins until ready() or 2 s; false: gave up. The deadline is looked at every 1024 turns.
template <class Ready>
__device__ __forceinline__ bool spin_until(Ready&& ready) {
  if (ready()) return true;
  const std::uint64_t start = global_ns();
  for (std::uint32_t turns = 1;; ++turns) {
    if (ready()) return true;
    if ((turns & 1023) == 0 && global_ns() - start > 2000000000ull) return false;
  }
}

struct Summary {
  double median = 0, p99 = 0, min = 0, max = 0, mean = 0, stddev = 0;
  std::vector<double> samples;
};
inline Summary summary(std::vector<double> samples) {
  Summary out;
  if (samples.empty()) return out;
  out.samples = samples;
  std::sort(samples.begin(), samples.end());
  out.min = samples.front();
  out.max = samples.back();
  for (const double v : samples) out.mean += v / static_cast<double>(samples.size());
  for (const double v : samples)
    out.stddev += (v - out.mean) * (v - out.mean) / static_cast<double>(samples.size());
  out.stddev = std::sqrt(out.stddev);
  out.median = samples[samples.size() / 2];
  out.p99 = samples[std::min(samples.size() - 1, samples.size() * 99 / 100)];
  return out;
}

/// A kernel's own clock: cycles per nanosecond, from the two timers of one long run.
struct Clock {
  std::uint64_t cycles = 0, ns = 0;
  double per_ns() const {
    return ns ? static_cast<double>(cycles) / static_cast<double>(ns) : 1.98;
  }
};

struct Gpu {
  int device = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  char* window = nullptr;        ///< the peer stores here
  char* source = nullptr;        ///< puts read here
  std::uint64_t* log = nullptr;  ///< cycles per round
  Clock* clock = nullptr;
  int* failed = nullptr;  ///< a wait gave up, or data was wrong
};

constexpr std::size_t kWindow = std::size_t{128} << 20;
constexpr std::size_t kFlag = std::size_t{96} << 20;  ///< where in the window the flags are
constexpr int kMaxRounds = 20000;

inline std::vector<Gpu> open_gpus(int count) {
  std::vector<Gpu> gpus(count);
  for (int d = 0; d < count; ++d) {
    Gpu& g = gpus[d];
    g.device = d;
    must(cudaSetDevice(d), "set device");
    for (int p = 0; p < count; ++p) {
      if (p != d) must(cudaDeviceEnablePeerAccess(p, 0), "peer access");
    }
    must(cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking), "stream");
    must(cudaEventCreate(&g.begin), "event");
    must(cudaEventCreate(&g.end), "event");
    must(cudaMalloc(&g.window, kWindow), "malloc");
    must(cudaMalloc(&g.source, kWindow), "malloc");
    must(cudaMalloc(&g.log, kMaxRounds * sizeof(std::uint64_t)), "malloc");
    must(cudaMalloc(&g.clock, sizeof(Clock)), "malloc");
    must(cudaMalloc(&g.failed, sizeof(int)), "malloc");
    must(cudaMemset(g.window, 0, kWindow), "memset");
    std::vector<std::uint64_t> pattern(kWindow / 8);
    for (std::size_t i = 0; i < pattern.size(); ++i)
      pattern[i] = (i + 1) * 0x9e3779b97f4a7c15ull + d;
    must(cudaMemcpy(g.source, pattern.data(), kWindow, cudaMemcpyHostToDevice), "copy");
    must(cudaMemset(g.failed, 0, sizeof(int)), "memset");
    must(cudaDeviceSynchronize(), "sync");
  }
  return gpus;
}

inline void clear_flags(std::vector<Gpu>& gpus) {
  for (Gpu& g : gpus) {
    must(cudaSetDevice(g.device), "set device");
    must(cudaMemset(g.window + kFlag, 0, kWindow - kFlag), "memset");
    must(cudaDeviceSynchronize(), "sync");
  }
}

inline void wait_all(std::vector<Gpu>& gpus, const char* what) {
  for (Gpu& g : gpus) {
    must(cudaSetDevice(g.device), "set device");
    must(cudaStreamSynchronize(g.stream), what);
    int failed = 0;
    must(cudaMemcpy(&failed, g.failed, sizeof(int), cudaMemcpyDeviceToHost), "copy");
    if (failed) {
      std::fprintf(stderr, "%s: a wait on GPU %d gave up or data was wrong (%d)\n", what, g.device,
                   failed);
      std::exit(1);
    }
  }
}

/// What a kernel logged in cycles, in ns; waits for the stream. @param warmup  rounds left out at the beginning
/// @param parts  a round is divided by it: 2 for one way of two
inline Summary in_ns(const std::uint64_t* log, const Clock* clock, cudaStream_t stream, int rounds,
                     int warmup, double parts) {
  std::vector<std::uint64_t> cycles(rounds);
  Clock c;
  must(cudaMemcpyAsync(cycles.data(), log, rounds * sizeof(*log), cudaMemcpyDeviceToHost, stream),
       "copy");
  must(cudaMemcpyAsync(&c, clock, sizeof(c), cudaMemcpyDeviceToHost, stream), "copy");
  must(cudaStreamSynchronize(stream), "copy");
  std::vector<double> ns;
  for (int i = warmup; i < rounds; ++i)
    ns.push_back(static_cast<double>(cycles[i]) / c.per_ns() / parts);
  return summary(std::move(ns));
}

/// One-way times of GPU 0 (half of each round trip), ns, without the first `warmup` rounds.
inline Summary one_way(const Gpu& g, int rounds, int warmup) {
  return in_ns(g.log, g.clock, g.stream, rounds, warmup, 2);
}

}  // namespace floors
