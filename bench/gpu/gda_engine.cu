// SPDX-License-Identifier: Apache-2.0
// softnic's GPU engine against a bare engine: one block that polls a doorbell, reads a WQE, copies GPU 0 -> GPU 1 and
// stores a completion, without checking anything. Both are posted to by the same kernel code (a 64-byte entry as
// four 16-byte stores, one release of system scope, a doorbell) and both run in this program; a third row is the
// public API on the engine. Every data byte is checked at the end of a row.
//   marrow_gda_engine [--json FILE] [--one-gpu]    --one-gpu: both ranks on GPU 0; to compare builds, not with limits
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>

#include "../floor/harness.cuh"
#include "marrow/abi/gda_queue.h"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "softnic/gpu_layout.hpp"

namespace floors {
namespace {

constexpr int kQueues = 32;
constexpr int kDepth = 1024;
/// The manager's warp is not one of them.
constexpr int kEngineThreads = marrow::softnic::gpu::kWorkers * 32;
constexpr std::size_t kBytes = std::size_t{16} << 20;  ///< of each side's data

__device__ __forceinline__ std::uint64_t acquire64(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t acquire32(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void release64(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// --- the bare engine -----------------------------------------------------------------------------------

struct alignas(64) BareWqe {
  const std::byte* from;
  std::uint32_t to;  ///< offset in the peer's data
  std::uint32_t bytes;
  std::uint64_t rest[6];
};
struct BareQueue {
  BareWqe ring[kDepth];
  alignas(128) std::uint64_t doorbell;
  alignas(128) std::uint64_t completed;
};

/// One worker of `threads` for one queue.
__global__ void bare_engine(BareQueue* queue, std::byte* peer, const volatile int* stop) {
  __shared__ std::uint64_t producer;
  std::uint64_t consumer = 0;
  for (;;) {
    if (threadIdx.x == 0) {
      std::uint64_t seen = consumer;
      int stopped = 0;
      for (int spins = 0; seen == consumer && !stopped; ++spins) {
        seen = acquire64(&queue->doorbell);
        if ((spins & 1023) == 1023) stopped = *stop;
      }
      producer = stopped ? ~0ull : seen;
    }
    if (blockDim.x > 1) __syncthreads();
    const std::uint64_t end = producer;
    if (end == ~0ull) return;
    for (; consumer != end; ++consumer) {
      const uint4 head = __ldcg(reinterpret_cast<const uint4*>(&queue->ring[consumer % kDepth]));
      const auto* from = reinterpret_cast<const std::byte*>(head.x | std::uint64_t{head.y} << 32);
      if (head.w == 8) {
        if (threadIdx.x == 0)
          *reinterpret_cast<std::uint64_t*>(peer + head.z) =
              *reinterpret_cast<const volatile std::uint64_t*>(from);
      } else {
        const auto* a = reinterpret_cast<const uint4*>(from);
        auto* b = reinterpret_cast<uint4*>(peer + head.z);
        const std::uint32_t n = head.w / 16;
        std::uint32_t i = threadIdx.x;
        for (; i + 7 * blockDim.x < n; i += 8 * blockDim.x) {
          uint4 v[8];
#pragma unroll
          for (int k = 0; k < 8; ++k) v[k] = a[i + k * blockDim.x];
#pragma unroll
          for (int k = 0; k < 8; ++k) b[i + k * blockDim.x] = v[k];
        }
        for (; i < n; i += blockDim.x) b[i] = a[i];
      }
      if (blockDim.x > 1) __syncthreads();
      if (threadIdx.x == 0) release64(&queue->completed, consumer + 1);
    }
    if (blockDim.x > 1) __syncthreads();
  }
}

/// A warp a queue, a lane a WQE of 8 bytes; one completion word for all of them.
__global__ void bare_engine_of_warps(BareQueue* queues, std::byte* peer, const volatile int* stop) {
  const unsigned lane = threadIdx.x % 32;
  BareQueue& queue = queues[threadIdx.x / 32];
  std::uint64_t consumer = 0;
  for (int spins = 0;; ++spins) {
    std::uint64_t end = 0;
    if (lane == 0) end = acquire64(&queue.doorbell);
    __syncwarp();
    end = __shfl_sync(0xffffffffu, end, 0);
    if ((spins & 1023) == 1023 && *stop) return;
    if (end == consumer) continue;
    if (lane < end - consumer) {
      const uint4 head =
          __ldcg(reinterpret_cast<const uint4*>(&queue.ring[(consumer + lane) % kDepth]));
      const auto* from = reinterpret_cast<const std::byte*>(head.x | std::uint64_t{head.y} << 32);
      *reinterpret_cast<std::uint64_t*>(peer + head.z) =
          *reinterpret_cast<const volatile std::uint64_t*>(from);
    }
    __syncwarp();
    consumer = end - consumer > 32 ? consumer + 32 : end;
    if (lane == 0) release64(&queue.completed, consumer);
  }
}

// --- posters: the same code for both, Queue says what an entry and a completion look like ------------------

struct Bare {
  BareQueue* queues;
  const std::byte* from;
  struct At {
    BareQueue* q;
    const std::byte* from;
    std::uint64_t index;
    __device__ void entry(std::uint64_t i, std::uint32_t source, std::uint32_t to,
                          std::uint32_t bytes, uint4 (&w)[4]) const {
      const auto at = reinterpret_cast<std::uint64_t>(from + source);
      w[0] = uint4{static_cast<unsigned>(at), static_cast<unsigned>(at >> 32), to, bytes};
      w[1] = w[2] = w[3] = uint4{};
    }
    __device__ uint4* slot(std::uint64_t i) const {
      return reinterpret_cast<uint4*>(&q->ring[i % kDepth]);
    }
    __device__ void ring(std::uint64_t end) const { release64(&q->doorbell, end); }
    __device__ bool done(std::uint64_t end) const { return acquire64(&q->completed) >= end; }
  };
  __device__ At at(int q) const { return {queues + q, from, 0}; }
};

struct Engine {
  marrow::DeviceCommunicator comm;
  marrow::WindowHandle source, target;
  std::uint64_t* indices;  ///< of each queue, kept between kernels
  /// By value: what a poster reads from memory it would read again after each acquire, which the bare one's need not.
  struct At {
    std::byte* sq;
    std::uint64_t* doorbell;
    const std::uint32_t* cq;
    std::uint64_t target, source;
    std::uint32_t qpn, mask, rkey, lkey;
    std::uint64_t index;
    __device__ void entry(std::uint64_t i, std::uint32_t source, std::uint32_t to,
                          std::uint32_t bytes, uint4 (&w)[4]) const {
      using marrow::mlx5::to_big32;
      const std::uint64_t remote = target + to;
      const std::uint64_t local = this->source + source;
      w[0] = uint4{marrow::mlx5::control_word(marrow::mlx5::kWrite, static_cast<std::uint16_t>(i)),
                   qpn | to_big32(3), std::uint32_t{marrow::mlx5::kCompletionAlways} << 24, 0};
      w[1] = uint4{to_big32(static_cast<std::uint32_t>(remote >> 32)),
                   to_big32(static_cast<std::uint32_t>(remote)), rkey, 0};
      w[2] = uint4{to_big32(bytes), lkey, to_big32(static_cast<std::uint32_t>(local >> 32)),
                   to_big32(static_cast<std::uint32_t>(local))};
      w[3] = uint4{};
    }
    __device__ uint4* slot(std::uint64_t i) const {
      return reinterpret_cast<uint4*>(sq + (i & mask) * 64);
    }
    __device__ void ring(std::uint64_t end) const {
      release64(doorbell,
                std::uint64_t{qpn} << 32 |
                    marrow::mlx5::to_big32(static_cast<std::uint32_t>(end & 0xffff) << 8));
    }
    __device__ bool done(std::uint64_t end) const {
      const std::uint32_t word = acquire32(cq + ((end - 1) & mask) * 16);
      return marrow::mlx5::cqe_valid(word, end - 1, mask + 1) &&
             marrow::mlx5::cqe_opcode(word) == marrow::mlx5::kRequester;
    }
  };
  __device__ At at(int q) const {
    auto* queues =
        reinterpret_cast<marrow::GdaQueue*>(const_cast<marrow::GdaDevice*>(comm.gda) + 1);
    const marrow::GdaQueue& queue = queues[q * comm.nranks + 1];
    return {queue.sq,  queue.doorbell, queue.cq,           target.gda_base[1], source.gda_local,
            queue.qpn, queue.mask,     target.gda_rkey[1], source.gda_lkey,    indices[q]};
  }
};

template <class At>
__device__ void post(const At& at, std::uint64_t i, std::uint32_t source, std::uint32_t to,
                     std::uint32_t bytes) {
  uint4 w[4];
  at.entry(i, source, to, bytes, w);
  uint4* slot = at.slot(i);
#pragma unroll
  for (int k = 0; k < 4; ++k) __stcg(slot + k, w[k]);
}

/// One thread, one operation at a time: post until its completion is seen.
template <class Target>
__global__ void latency(const __grid_constant__ Target target, std::uint32_t bytes, int rounds,
                        std::uint64_t* log, Clock* clock, int* failed) {
  auto at = target.at(0);
  const std::uint64_t first = at.index;
  const std::uint64_t c0 = clock64(), n0 = global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t begin = clock64();
    const auto offset = static_cast<std::uint32_t>(r * std::uint64_t{bytes} % kBytes);
    post(at, first + r, offset, offset, bytes);
    at.ring(first + r + 1);
    if (!spin_until([&] { return at.done(first + r + 1); })) {
      *failed = r + 1;
      return;
    }
    log[r] = clock64() - begin;
  }
  *clock = {clock64() - c0, global_ns() - n0};
}

/// A warp a queue: 32 entries, one doorbell, wait for all of them, again.
template <class Target>
__global__ void rate(const __grid_constant__ Target target, int rounds, std::uint64_t* begin_end,
                     int* failed) {
  const unsigned lane = threadIdx.x;
  auto at = target.at(blockIdx.x);
  const std::uint64_t first = at.index;
  const std::uint32_t area = kBytes / kQueues;
  if (lane == 0) begin_end[blockIdx.x * 2] = global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t i = first + r * 32ull;
    const auto offset =
        static_cast<std::uint32_t>(blockIdx.x * area + (r * 32ull + lane) * 8 % area);
    post(at, i + lane, offset, offset, 8);
    __syncwarp();
    bool good = true;
    if (lane == 0) {
      at.ring(i + 32);
      good = spin_until([&] { return at.done(i + 32); });
      if (!good) *failed = r + 1;
    }
    if (!__shfl_sync(0xffffffffu, good, 0)) return;
  }
  if (lane == 0) begin_end[blockIdx.x * 2 + 1] = global_ns();
}

// --- the public API on the engine -------------------------------------------------------------------------

__global__ void api_latency(const __grid_constant__ marrow::DeviceCommunicator comm,
                            marrow::WindowHandle source, marrow::WindowHandle target,
                            std::uint32_t bytes, int rounds, std::uint64_t* log, Clock* clock,
                            int* failed) {
  const marrow::Gin<marrow::Path::gda> gin(comm, 0);
  const std::uint64_t c0 = clock64(), n0 = global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t begin = clock64();
    const auto offset = static_cast<std::uint32_t>(r * std::uint64_t{bytes} % kBytes);
    marrow::Status status = gin.put(1, target, offset, source, offset, bytes, marrow::Thread{});
    if (status == marrow::Status::ok) status = gin.flush(1, marrow::Thread{});
    if (status != marrow::Status::ok) {
      *failed = r + 1;
      return;
    }
    log[r] = clock64() - begin;
  }
  *clock = {clock64() - c0, global_ns() - n0};
}

__global__ void api_rate(const __grid_constant__ marrow::DeviceCommunicator comm,
                         marrow::WindowHandle source, marrow::WindowHandle target, int rounds,
                         std::uint64_t* begin_end, int* failed) {
  const unsigned lane = threadIdx.x;
  const marrow::Gin<marrow::Path::gda> gin(comm, static_cast<int>(blockIdx.x));
  const std::uint32_t area = kBytes / kQueues;
  if (lane == 0) begin_end[blockIdx.x * 2] = global_ns();
  for (int r = 0; r < rounds; ++r) {
    const auto offset =
        static_cast<std::uint32_t>(blockIdx.x * area + (r * 32ull + lane) * 8 % area);
    marrow::Status status = gin.put(1, target, offset, source, offset, 8, marrow::Thread{});
    __syncwarp();
    if (status == marrow::Status::ok && lane == 0) status = gin.flush(1, marrow::Thread{});
    if (status != marrow::Status::ok) *failed = r + 1;
    if (__any_sync(0xffffffffu, status != marrow::Status::ok)) return;
  }
  if (lane == 0) begin_end[blockIdx.x * 2 + 1] = global_ns();
}

__global__ void fill(std::uint64_t* data, std::size_t words, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x)
    data[i] = seed == 0 ? 0 : (i + seed) * 0x9e3779b97f4a7c15ull;
}
__global__ void compare(const std::uint64_t* data, std::size_t words, std::uint64_t seed,
                        int* wrong) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x)
    if (data[i] != (i + seed) * 0x9e3779b97f4a7c15ull) *wrong = 1;
}

struct Row {
  std::string what, unit, note;
  std::size_t bytes;
  int queues, worker_threads;
  bool emulated;
  Summary summary;
};
std::vector<Row> rows;

void add(Row row) {
  std::printf("%-40s %8zu B %3d queues  %10.1f %-6s p99 %.1f  %s\n", row.what.c_str(), row.bytes,
              row.queues, row.summary.median, row.unit.c_str(), row.summary.p99, row.note.c_str());
  std::fflush(stdout);
  rows.push_back(std::move(row));
}

/// What a row needs on GPU 0, and the data of both sides.
struct Bench {
  cudaStream_t stream{}, worker_stream{};
  std::uint64_t* log{};
  std::uint64_t* begin_end{};
  Clock* clock{};
  int* failed{};
  int* stop{};  ///< host
  std::uint64_t seed = 1;

  void open() {
    must(cudaSetDevice(0), "device");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    must(cudaStreamCreateWithFlags(&worker_stream, cudaStreamNonBlocking), "stream");
    must(cudaMalloc(&log, kMaxRounds * 8), "malloc");
    must(cudaMalloc(&begin_end, kQueues * 16), "malloc");
    must(cudaMalloc(&clock, sizeof(Clock)), "malloc");
    must(cudaMallocHost(&failed, sizeof(int)), "malloc");
    must(cudaMallocHost(&stop, sizeof(int)), "malloc");
  }
  void fresh(std::byte* source) {
    seed += 1000003;
    *failed = 0;
    fill<<<64, 256, 0, stream>>>(reinterpret_cast<std::uint64_t*>(source), kBytes / 8, seed);
    must(cudaStreamSynchronize(stream), "fill");
  }
  void verify(const std::byte* target, std::size_t bytes, const char* what) {
    must(cudaStreamSynchronize(stream), what);
    if (*failed) {
      std::fprintf(stderr, "%s: round %d was not completed\n", what, *failed);
      std::exit(1);
    }
    compare<<<64, 256, 0, stream>>>(reinterpret_cast<const std::uint64_t*>(target), bytes / 8, seed,
                                    failed);
    must(cudaStreamSynchronize(stream), what);
    if (*failed) {
      std::fprintf(stderr, "%s: wrong data\n", what);
      std::exit(1);
    }
  }
  Summary times(int rounds) { return floors::in_ns(log, clock, stream, rounds, rounds / 10, 1); }
  double mops(int rounds) {
    std::vector<std::uint64_t> t(kQueues * 2);
    must(cudaMemcpyAsync(t.data(), begin_end, kQueues * 16, cudaMemcpyDeviceToHost, stream),
         "copy");
    must(cudaStreamSynchronize(stream), "copy");
    std::uint64_t begin = ~0ull, end = 0;
    for (int q = 0; q < kQueues; ++q) {
      begin = std::min(begin, t[q * 2]);
      end = std::max(end, t[q * 2 + 1]);
    }
    return kQueues * 32.0 * rounds / static_cast<double>(end - begin) * 1e3;
  }
};

constexpr int kRateRounds = 2048;  // 32 queues x 32 x 8 bytes x 2048 = kBytes
constexpr int kRepeats = 5;
constexpr int kSmallRounds = 10000, kLargeRounds = 200;
constexpr std::uint32_t kLarge = 1u << 20;
static_assert(std::size_t{kQueues} * 32 * 8 * kRateRounds == kBytes);

void bare_rows(Bench& b, std::byte* source, std::byte* target) {
  BareQueue* queues{};
  must(cudaMalloc(&queues, sizeof(BareQueue) * kQueues), "malloc");
  const Bare bare{queues, source};
  const auto with = [&](auto&& start, auto&& body) {
    must(cudaMemsetAsync(queues, 0, sizeof(BareQueue) * kQueues, b.stream), "memset");
    must(cudaStreamSynchronize(b.stream), "memset");
    *const_cast<volatile int*>(b.stop) = 0;
    start();
    must(cudaGetLastError(), "bare engine");
    body();
    must(cudaStreamSynchronize(b.stream), "bare engine");
    *const_cast<volatile int*>(b.stop) = 1;
    must(cudaStreamSynchronize(b.worker_stream), "bare engine");
  };
  for (const int threads : {1, 1024}) {
    for (const std::uint32_t bytes : {8u, kLarge}) {
      if (threads == 1 && bytes != 8) continue;
      const int rounds = bytes == 8 ? kSmallRounds : kLargeRounds;
      b.fresh(source);
      with([&] { bare_engine<<<1, threads, 0, b.worker_stream>>>(queues, target, b.stop); },
           [&] { latency<<<1, 1, 0, b.stream>>>(bare, bytes, rounds, b.log, b.clock, b.failed); });
      b.verify(target, std::min<std::size_t>(kBytes, std::size_t{bytes} * rounds), "bare engine");
      add({"bare engine: post to completion", "ns", "system scope", bytes, 1, threads, false,
           b.times(rounds)});
    }
  }
  std::vector<double> mops;
  for (int i = 0; i < kRepeats; ++i) {
    b.fresh(source);
    with(
        [&] {
          bare_engine_of_warps<<<1, 32 * kQueues, 0, b.worker_stream>>>(queues, target, b.stop);
        },
        [&] { rate<<<kQueues, 32, 0, b.stream>>>(bare, kRateRounds, b.begin_end, b.failed); });
    b.verify(target, kBytes, "bare engine rate");
    mops.push_back(b.mops(kRateRounds));
  }
  add({"bare engine: rate", "Mops/s", "doorbell per 32, then waited for", 8, kQueues, 32 * kQueues,
       false, summary(mops)});
  must(cudaFree(queues), "free");
}

void engine_rows(Bench& b, marrow::Communicator& comm, marrow::Window& source,
                 marrow::Window& target, std::byte* theirs) {
  auto* mine = static_cast<std::byte*>(source.data());
  auto raw = comm.device_communicator({.contexts = kQueues, .sharing = marrow::Sharing::thread});
  std::uint64_t* indices{};
  must(cudaMallocHost(&indices, kQueues * 8), "malloc");
  std::memset(indices, 0, kQueues * 8);
  const Engine engine{raw.handle(), source.handle(), target.handle(), indices};
  for (const std::uint32_t bytes : {8u, kLarge}) {
    const int rounds = bytes == 8 ? kSmallRounds : kLargeRounds;
    b.fresh(mine);
    latency<<<1, 1, 0, b.stream>>>(engine, bytes, rounds, b.log, b.clock, b.failed);
    b.verify(theirs, std::min<std::size_t>(kBytes, std::size_t{bytes} * rounds), "GPU engine");
    indices[0] += rounds;
    add({"GPU engine: post to completion", "ns", "system scope, the bare engine's poster", bytes, 1,
         kEngineThreads, true, b.times(rounds)});
  }
  std::vector<double> mops;
  for (int i = 0; i < kRepeats; ++i) {
    b.fresh(mine);
    rate<<<kQueues, 32, 0, b.stream>>>(engine, kRateRounds, b.begin_end, b.failed);
    b.verify(theirs, kBytes, "GPU engine rate");
    for (int q = 0; q < kQueues; ++q) indices[q] += 32ull * kRateRounds;
    mops.push_back(b.mops(kRateRounds));
  }
  add({"GPU engine: rate", "Mops/s", "doorbell per 32, then waited for; the bare engine's poster",
       8, kQueues, kEngineThreads, true, summary(mops)});
  comm.check();
  raw.close();
  {
    auto device = comm.device_communicator({.contexts = 1, .sharing = marrow::Sharing::thread});
    for (const std::uint32_t bytes : {8u, kLarge}) {
      const int rounds = bytes == 8 ? kSmallRounds : kLargeRounds;
      b.fresh(mine);
      api_latency<<<1, 1, 0, b.stream>>>(device.handle(), source.handle(), target.handle(), bytes,
                                         rounds, b.log, b.clock, b.failed);
      b.verify(theirs, std::min<std::size_t>(kBytes, std::size_t{bytes} * rounds), "public API");
      add({"GPU engine: put and flush", "ns", "public API, exclusive context", bytes, 1,
           kEngineThreads, true, b.times(rounds)});
    }
    device.close();
  }
  auto device = comm.device_communicator({.contexts = kQueues, .sharing = marrow::Sharing::block});
  mops.clear();
  for (int i = 0; i < kRepeats; ++i) {
    b.fresh(mine);
    api_rate<<<kQueues, 32, 0, b.stream>>>(device.handle(), source.handle(), target.handle(),
                                           kRateRounds, b.begin_end, b.failed);
    b.verify(theirs, kBytes, "public API rate");
    mops.push_back(b.mops(kRateRounds));
  }
  add({"GPU engine: put rate", "Mops/s", "public API, a warp's 32 puts, then flush", 8, kQueues,
       kEngineThreads, true, summary(mops)});
  comm.check();
  device.close();
}

void run_rank(const marrow::UniqueId& id, int rank, int gpu) {
  must(cudaSetDevice(gpu), "device");
  cudaStream_t stream{};
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  marrow::Config config;
  config.place = marrow::Place::gpu(gpu, stream);
  config.parameters = {{"MARROW_PATH", "gda"},
                       {"MARROW_NIC", "softnic"},
                       {"MARROW_SOFTNIC", "engine=gpu"},
                       {"MARROW_GDA_DEPTH", std::to_string(kDepth)}};
  marrow::Communicator comm(id, 2, rank, config);
  marrow::Window source = comm.allocate(kBytes, marrow::Memory::device);
  marrow::Window target = comm.allocate(kBytes, marrow::Memory::device);
  static std::byte* theirs = nullptr;
  if (rank == 1) theirs = static_cast<std::byte*>(target.data());
  comm.barrier();
  if (rank == 0) {
    Bench b;
    b.open();
    bare_rows(b, static_cast<std::byte*>(source.data()), theirs);
    engine_rows(b, comm, source, target, theirs);
  } else {
    // Collective with rank 0's three.
    for (const auto& [contexts, sharing] : {std::pair{kQueues, marrow::Sharing::thread},
                                            {1, marrow::Sharing::thread},
                                            {kQueues, marrow::Sharing::block}}) {
      auto device = comm.device_communicator({.contexts = contexts, .sharing = sharing});
      device.close();
    }
  }
  comm.close();
}

void write_json(const char* path) {
  std::FILE* file = std::fopen(path, "w");
  if (!file) std::exit(1);
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, 0), "properties");
  std::fprintf(file, "[");
  const char* comma = "";
  for (const Row& r : rows) {
    const Summary& m = r.summary;
    std::fprintf(
        file,
        "%s\n{\"what\":\"%s\",\"unit\":\"%s\",\"kind\":\"%s\",%s\"devices\":[{\"role\":\"kernels\","
        "\"device\":\"gpu\",\"name\":\"%s\"}%s],\"parameters\":{\"bytes\":%zu,\"queues\":%d,"
        "\"worker_threads\":%d},\"statistics\":{\"count\":%zu,\"min\":%.3f,\"median\":%.3f,"
        "\"mean\":%.3f,\"p99\":%.3f,\"max\":%.3f,\"stddev\":%.3f},\"verified\":true,\"note\":\"%"
        "s\"}",
        comma, r.what.c_str(), r.unit.c_str(), r.emulated ? "emulated" : "measured",
        r.emulated ? "\"path\":\"gda\"," : "", properties.name,
        r.emulated ? ",{\"role\":\"NIC\",\"device\":\"softnic\",\"name\":\"GPU engine\"}" : "",
        r.bytes, r.queues, r.worker_threads, m.samples.size(), m.min, m.median, m.mean, m.p99,
        m.max, m.stddev, r.note.c_str());
    comma = ",";
  }
  std::fprintf(file, "\n]\n");
  std::fclose(file);
}

}  // namespace
}  // namespace floors

int main(int argc, char** argv) {
  using namespace floors;
  ::alarm(60);
  // A kernel that is loaded when it is first launched would wait for the engines, which never end.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const char* json = nullptr;
  int gpus = 2;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--json") && i + 1 < argc) json = argv[++i];
    if (!std::strcmp(argv[i], "--one-gpu")) gpus = 1;
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < gpus) {
    std::fprintf(stderr, "gda_engine: needs two GPUs\n");
    return 77;
  }
  const marrow::UniqueId id = marrow::UniqueId::create();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&id, rank, gpus] {
      try {
        run_rank(id, rank, rank % gpus);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  if (json) write_json(json);
  return 0;
}
