// SPDX-License-Identifier: Apache-2.0
// What the gda issue bench and its peers share: queues that no NIC reads (rings and records in device or
// pinned host memory, one 8-byte doorbell cell each in pinned host memory, the completed index so far ahead
// that there is always room), the two ways to time posts, and the rows that come out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gda_bench {

void must(cudaError_t result, const char* what);

constexpr int kCalls = 4000;
constexpr std::uint64_t kFarAhead = std::uint64_t{1} << 62;
constexpr std::uint32_t kDepth = 32768;
constexpr int kMostQueues = 132;

enum class Placement { device, host };

/// Memory of `count` queues, as addresses of the GPU. One allocation each, reused by every row.
struct Memory {
  std::byte* sq[kMostQueues];      ///< kDepth blocks of 64 bytes
  std::byte* cq;                   ///< one ring of kDepth entries, shared: nobody writes it
  std::byte* record[kMostQueues];  ///< 64 bytes each
  std::uint64_t* doorbell[kMostQueues];
  std::uint64_t* doorbell_host[kMostQueues];
};
const Memory& memory(Placement placement);

/// What a timed kernel leaves in device memory.
struct Clock {
  std::uint64_t cycles, ns;  ///< of the whole run
};
/// What a rate kernel leaves.
struct Rate {
  unsigned long long operations, first_ns, last_ns;
};
std::uint32_t* cycle_log();  ///< [kCalls] device memory
Clock* clock_words();
Rate* rate_words();
void reset_rate();

struct Row {
  std::string what, sharing, placement, scope, batch, note;
  int threads = 1, queues = 1;
  bool is_rate = false;
  std::vector<double> cycles;  ///< per call (or per batch); empty for a rate
  double per_ns = 1.98;        ///< cycles
  double value = 0;            ///< rate: M WQE/s
  bool verified = false;
};
/// Reads log and clock of the last timed kernel.
void add_times(Row row, int calls, int per_call = 1);
void add_rate(Row row);
const std::vector<Row>& rows();

/// Compares ring, record and doorbell of queue q with `posted` WRITEs of one block each.
/// @param qpn  as in the WQE, not swapped
bool verify(Placement placement, int q, std::uint64_t posted, std::uint32_t qpn,
            bool every_block = true, bool bell_too = true);

/// One put in an otherwise empty kernel.
struct Cost {
  std::string what;
  int registers, stack, blocks_per_sm;  ///< stack in bytes; blocks of 128 threads
};
void add_cost(Cost cost);

void probe_rows();
void marrow_rows();
void unchecked_rows();
void floor_rows();
void gpunetio_rows();  ///< bench/peers/gpunetio

#if defined(__CUDACC__)
__device__ __forceinline__ std::uint64_t global_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

/// All 64 bits, so that nvcc reads it by the same instruction everywhere: of 32 it makes one that takes some 20 cycles
/// more, in some kernels before the call, in others behind it.
__device__ __forceinline__ std::uint64_t cycle64() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

/// Times each of `calls` calls of post(i). Logs in shared memory: a store to the host would make every
/// later system fence dearer.
template <class Post>
__device__ __forceinline__ void timed(std::uint32_t* log, Clock* clock, int calls, Post&& post) {
  __shared__ std::uint64_t cycles[kCalls];
  const std::uint64_t c0 = clock64(), n0 = global_ns();
  for (int i = 0; i < calls; ++i) {
    const std::uint64_t begin = cycle64();
    post(i);
    cycles[i] = cycle64() - begin;
  }
  *clock = {clock64() - c0, global_ns() - n0};
  for (int i = 0; i < calls; ++i) log[i] = static_cast<std::uint32_t>(cycles[i]);
}

/// Calls post(i) for ns nanoseconds of the global timer; sums of all threads.
/// @param per_call  WQEs each
template <class Post>
__device__ __forceinline__ void rated(Rate* rate, std::uint64_t ns, int rounds, Post&& post) {
  const std::uint64_t begin = global_ns();
  std::uint64_t count = 0;
  do {
    for (int i = 0; i < rounds; ++i) post(static_cast<int>(count++));
  } while (global_ns() - begin < ns);
  const std::uint64_t end = global_ns();
  atomicAdd(&rate->operations, static_cast<unsigned long long>(count));
  atomicMin(&rate->first_ns, static_cast<unsigned long long>(begin));
  atomicMax(&rate->last_ns, static_cast<unsigned long long>(end));
}
#endif

}  // namespace gda_bench
