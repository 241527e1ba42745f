// SPDX-License-Identifier: Apache-2.0
// The floor: the stores of an exclusive put (three 16-byte segments, the queue's index, record,
// doorbell) and its one release, by hand, the index in a register; nothing is read and nothing checked.
#include <cuda_runtime.h>

#include "bench.cuh"

namespace gda_bench {
namespace {

__device__ __forceinline__ std::uint32_t big(std::uint32_t v) { return __byte_perm(v, 0, 0x0123); }

struct Queue {
  std::byte* sq;
  std::uint32_t* record;
  std::uint64_t* doorbell;
  std::uint64_t* index;
  std::uint32_t qpn;
};

__device__ __forceinline__ void write(const Queue& q, std::uint32_t at) {
  auto* to = reinterpret_cast<uint4*>(q.sq + ((at & (kDepth - 1)) << 6));
  const std::uint64_t remote = 0x1000000 + std::uint64_t{at} * 64,
                      local = 0x2000000 + std::uint64_t{at} * 64;
  to[1] = make_uint4(big(static_cast<std::uint32_t>(remote >> 32)),
                     big(static_cast<std::uint32_t>(remote)), big(0x77), 0);
  to[2] = make_uint4(big(64), big(0x66), big(static_cast<std::uint32_t>(local >> 32)),
                     big(static_cast<std::uint32_t>(local)));
  to[0] = make_uint4(big((at & 0xffff) << 8 | 8), big(q.qpn << 8 | 3), 8u << 24, 0);
}

template <bool kSystem>
__device__ __forceinline__ void ring(const Queue& q, std::uint64_t end) {
  if constexpr (kSystem) {
    asm volatile("fence.release.sys;" ::: "memory");
  } else {
    asm volatile("fence.release.gpu;" ::: "memory");
  }
  const std::uint32_t low = static_cast<std::uint32_t>(end) & 0xffff;
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(q.record)),
               "r"(big(low))
               : "memory");
  const std::uint64_t bell = std::uint64_t{big(q.qpn << 8)} << 32 | big(low << 8);
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(q.doorbell)),
               "l"(bell)
               : "memory");
  *q.index = end;
}

template <bool kSystem>
__global__ void issue(Queue q, int every, std::uint32_t* log, Clock* clock) {
  if (every == 1) {
    timed(log, clock, kCalls, [&](int i) {
      write(q, i);
      ring<kSystem>(q, i + 1);
    });
  } else {
    timed(log, clock, kCalls, [&](int i) {
      write(q, i);
      if (((i + 1) & (every - 1)) == 0) ring<kSystem>(q, i + 1);
    });
  }
}

/// A lane a WQE.
__global__ void issue_warp(Queue q, std::uint32_t* log, Clock* clock) {
  timed(log, clock, kCalls, [&](int i) {
    write(q, i * 32 + threadIdx.x);
    __syncwarp();
    if (threadIdx.x == 0) ring<false>(q, (i + 1) * 32);
  });
}

struct Queues {
  Queue q[kMostQueues];
};
__global__ void rate_warp(const __grid_constant__ Queues all, std::uint64_t ns, Rate* out) {
  const Queue& q = all.q[blockIdx.x];
  std::uint32_t at = 0;
  rated(out, ns, 4, [&](int) {
    write(q, at + threadIdx.x);
    __syncwarp();
    at += 32;
    if (threadIdx.x == 0) ring<false>(q, at);
  });
}

Queues queues(Placement placement) {
  static std::uint64_t* index = nullptr;
  if (!index) must(cudaMalloc(&index, kMostQueues * 128), "malloc");
  Queues all;
  const Memory& m = memory(placement);
  for (int i = 0; i < kMostQueues; ++i) {
    all.q[i] = {m.sq[i], reinterpret_cast<std::uint32_t*>(m.record[i]) + 1, m.doorbell[i],
                index + i * 16, 0x100u + i};
  }
  return all;
}

Row row_of(const char* what, const char* placement, const char* scope, const char* batch) {
  Row row;
  row.what = what;
  row.sharing = "thread";
  row.placement = placement;
  row.scope = scope;
  row.batch = batch;
  return row;
}

}  // namespace

void floor_rows() {
  for (const bool host : {false, true}) {
    for (const bool system : {false, true}) {
      if (host && !system) continue;
      const Placement placement = host ? Placement::host : Placement::device;
      const Queues all = queues(placement);
      for (const int every : {1, 32}) {
        if (system) {
          issue<true><<<1, 1>>>(all.q[0], every, cycle_log(), clock_words());
        } else {
          issue<false><<<1, 1>>>(all.q[0], every, cycle_log(), clock_words());
        }
        must(cudaGetLastError(), "floor");
        must(cudaDeviceSynchronize(), "floor");
        Row row = row_of("floor", host ? "host" : "device", system ? "system" : "device",
                         every == 1 ? "1" : "32");
        row.verified = verify(placement, 0, kCalls, 0x100);
        add_times(std::move(row), kCalls);
      }
    }
  }
  const Queues all = queues(Placement::device);
  issue_warp<<<1, 32>>>(all.q[0], cycle_log(), clock_words());
  must(cudaDeviceSynchronize(), "floor");
  Row row = row_of("floor, each lane", "device", "device", "32 a call");
  row.threads = 32;
  row.verified = verify(Placement::device, 0, std::uint64_t{kCalls} * 32, 0x100);
  add_times(std::move(row), kCalls);
  for (const int count : {1, 8, 132}) {
    reset_rate();
    rate_warp<<<count, 32>>>(all, 8'000'000, rate_words());
    must(cudaDeviceSynchronize(), "floor");
    Row rate = row_of("floor rate, each lane", "device", "device", "warp");
    rate.threads = count * 32;
    rate.queues = count;
    rate.verified = true;
    add_rate(std::move(rate));
  }
}

}  // namespace gda_bench
