// SPDX-License-Identifier: Apache-2.0
// Memory that the network cannot read: what a put costs when the kernel writes it to pinned memory, and when a
// copy engine does, by size and by who calls. Two ranks, on two GPUs where there are, over shm with
// MARROW_PROXY_STAGE=always: the network's own part is one memcpy between pinned slots, so the difference is
// the staging's. The default of MARROW_PROXY_STAGE_KERNEL_BYTES comes from here (bench/gpu/staging.sh).
#include <barrier>
#include <cstring>
#include <thread>

#include "bench.cuh"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "scene.cuh"

namespace proxy_bench {
namespace {

using namespace marrow;
using Proxy = Gin<Path::proxy>;

constexpr std::uint64_t kMost = std::uint64_t{64} << 20;
constexpr int kRounds = 120;
constexpr int kWarmup = 20;

/// Its own part: until the source may be reused.
template <class Coop>
__global__ void put_and_flush(const __grid_constant__ DeviceCommunicator comm,
                              const __grid_constant__ WindowHandle to,
                              const __grid_constant__ LocalBufferHandle from, std::uint64_t bytes,
                              std::uint64_t* log, floors::Clock* clock, int* failed) {
  const Proxy gin(comm, 0);
  const Coop coop;
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < kRounds; ++r) {
    const std::uint64_t begin = clock64();
    Status status = gin.put(1, to, 0, from, 0, bytes, coop);
    status = worse(status, gin.flush(coop));
    if (threadIdx.x == 0) log[r] = clock64() - begin;
    if (status != Status::ok) {
      *failed = static_cast<int>(status);
      return;
    }
  }
  if (threadIdx.x == 0) *clock = {clock64() - c0, floors::global_ns() - n0};
}

/// There and back: each way a put into GPU memory and its signal.
template <class Coop>
__global__ void ping(const __grid_constant__ DeviceCommunicator comm,
                     const __grid_constant__ WindowHandle to,
                     const __grid_constant__ LocalBufferHandle from, std::uint64_t bytes,
                     std::uint64_t before, std::uint64_t* log, floors::Clock* clock, int* failed) {
  const Proxy gin(comm, 0);
  const Coop coop;
  const int peer = 1 - comm.rank;
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < kRounds; ++r) {
    const std::uint64_t begin = clock64();
    Status status = Status::ok;
    if (comm.rank == 0) status = gin.put(peer, to, 0, from, 0, bytes, SignalAdd{0, 1}, coop);
    status = worse(status, gin.wait_signal(0, before + r + 1, coop));
    if (comm.rank == 1)
      status = worse(status, gin.put(peer, to, 0, from, 0, bytes, SignalAdd{0, 1}, coop));
    if (threadIdx.x == 0) log[r] = clock64() - begin;
    if (status != Status::ok) {
      *failed = static_cast<int>(status);
      return;
    }
  }
  if (threadIdx.x == 0) *clock = {clock64() - c0, floors::global_ns() - n0};
}

/// One large put and its signal, again and again; rank 1 waits.
__global__ void large(const __grid_constant__ DeviceCommunicator comm,
                      const __grid_constant__ WindowHandle to,
                      const __grid_constant__ LocalBufferHandle from, std::uint64_t bytes,
                      int rounds, std::uint64_t before, std::uint64_t* log, int* failed) {
  const Proxy gin(comm, 0);
  Status status = Status::ok;
  for (int r = 0; r < rounds && status == Status::ok; ++r) {
    const std::uint64_t begin = floors::global_ns();
    if (comm.rank == 0) {
      status = gin.put(1, to, 0, from, 0, bytes, SignalAdd{1, 1});
      status = worse(status, gin.wait_signal(2, before + r + 1));
    } else {
      status = gin.wait_signal(1, before + r + 1);
      status = worse(status, gin.signal(0, SignalAdd{2, 1}));
    }
    log[r] = floors::global_ns() - begin;
  }
  if (status != Status::ok) *failed = static_cast<int>(status);
}

__global__ void fill(std::uint32_t* words, std::uint64_t count, std::uint32_t seed) {
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x)
    words[i] = static_cast<std::uint32_t>(i) * 2654435761u ^ seed;
}
__global__ void compare(const std::uint32_t* words, std::uint64_t count, std::uint32_t seed,
                        int* failed) {
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x)
    if (words[i] != (static_cast<std::uint32_t>(i) * 2654435761u ^ seed)) *failed = kWrongData;
}

struct Rank : Scene {
  LocalBufferHandle local;
  std::barrier<>& meet;
  std::uint64_t pings = 0;

  Rank(Communicator& communicator, DeviceCommunicator device, WindowHandle win, cudaStream_t on,
       LocalBufferHandle source, std::barrier<>& both)
      : Scene(communicator, device, win, on, kRounds), local(source), meet(both) {}
};

std::string label(const char* what, std::uint64_t bytes) {
  char text[96];
  std::snprintf(text, sizeof(text), "%s, %llu bytes", what, static_cast<unsigned long long>(bytes));
  return text;
}

void add_row(const std::string& what, const char* note, int threads, Summary s,
             const char* unit = "ns") {
  add({what, unit, note, threads, 1, true, "shm", std::move(s), true});
}

template <class Coop>
void by_size(Rank& r, bool kernel, int threads) {
  const char* const way = kernel ? "kernel writes" : "copy engine";
  for (std::uint64_t bytes = 32; bytes <= (kernel ? 65536u : 262144u); bytes *= 2) {
    if (kernel && threads == 1 && bytes > 16384) continue;
    if (bytes < 512 && bytes != 64) continue;
    if (r.handle.rank == 0) {
      put_and_flush<Coop><<<1, threads, 0, r.stream>>>(r.handle, r.window, r.local, bytes, r.log,
                                                       r.clock, r.failed);
      r.check("put and flush");
      add_row(label("staged put and flush", bytes), way, threads, r.times(kRounds, kWarmup, 1));
    }
    r.meet.arrive_and_wait();
    ping<Coop><<<1, threads, 0, r.stream>>>(r.handle, r.window, r.local, bytes, r.pings, r.log,
                                            r.clock, r.failed);
    r.pings += kRounds;
    r.check("put and signal");
    compare<<<1, 256, 0, r.stream>>>(reinterpret_cast<const std::uint32_t*>(r.window.local),
                                     bytes / 4, static_cast<std::uint32_t>(1 - r.handle.rank),
                                     r.failed);
    r.check("data");
    if (r.handle.rank == 0)
      add_row(label("staged put and signal one way", bytes), way, threads,
              r.times(kRounds, kWarmup, 2));
    r.meet.arrive_and_wait();
  }
}

void bandwidth(Rank& r) {
  constexpr int kTimes = 12;
  std::uint64_t before = 0;
  for (std::uint64_t bytes = std::uint64_t{1} << 20; bytes <= kMost; bytes *= 4) {
    large<<<1, 1, 0, r.stream>>>(r.handle, r.window, r.local, bytes, kTimes, before, r.log,
                                 r.failed);
    before += kTimes;
    r.check("large puts");
    if (r.handle.rank == 1) {
      compare<<<64, 256, 0, r.stream>>>(reinterpret_cast<const std::uint32_t*>(r.window.local),
                                        bytes / 4, 0, r.failed);
      r.check("data");
    } else {
      std::vector<std::uint64_t> ns(kTimes);
      must(cudaMemcpyAsync(ns.data(), r.log, kTimes * 8, cudaMemcpyDeviceToHost, r.stream), "copy");
      must(cudaStreamSynchronize(r.stream), "copy");
      std::vector<double> rates;
      for (int i = 2; i < kTimes; ++i)
        rates.push_back(static_cast<double>(bytes) / static_cast<double>(ns[i]));
      add_row(label("staged put and signal", bytes), "copy engine", 1, summary(std::move(rates)),
              "GB/s");
    }
    r.meet.arrive_and_wait();
  }
}

/// Two ranks; body(rank) runs on both.
void with_two(bool kernel, const std::function<void(Rank&)>& body) {
  int gpus = 0;
  must(cudaGetDeviceCount(&gpus), "GPUs");
  const UniqueId id = UniqueId::create();
  std::barrier<> meet(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        const int gpu = rank % gpus;
        pin_self(drain_cpu(2 + rank));
        must(cudaSetDevice(gpu), "device");
        cudaStream_t stream = nullptr;
        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        Config config;
        config.place = Place::gpu(gpu, stream);
        config.parameters["MARROW_PATH"] = "proxy";
        config.parameters["MARROW_LSA_SIZE"] = std::to_string(1);
        config.parameters["MARROW_NETWORK"] = "shm";
        config.parameters["MARROW_PROXY_STAGE"] = "always";
        config.parameters["MARROW_PROXY_STAGE_KERNEL_BYTES"] = std::to_string(kernel ? 65536 : 0);
        config.parameters["MARROW_PROXY_STAGE_THREAD_BYTES"] = std::to_string(65536);
        config.parameters["MARROW_PROXY_CPUS"] = std::to_string(drain_cpu(rank));
        Communicator comm(id, 2, rank, config);
        Window window = comm.allocate(kMost, Memory::device);
        void* source = nullptr;
        must(cudaMalloc(&source, kMost), "malloc");
        fill<<<64, 256, 0, stream>>>(static_cast<std::uint32_t*>(source), kMost / 4,
                                     static_cast<std::uint32_t>(rank));
        LocalBuffer local = comm.register_local(source, kMost);
        DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1,
                                                                   .signals = 8,
                                                                   .counters = 8,
                                                                   .barriers = 1,
                                                                   .packets = 0,
                                                                   .sharing = Sharing::device});
        Rank here(comm, device.handle(), window.handle(), stream, local.handle(), meet);
        must(cudaStreamSynchronize(stream), "fill");
        meet.arrive_and_wait();
        body(here);
        meet.arrive_and_wait();
        device.close();
        window.close();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

void staging_rows() {
  for (const bool kernel : {true, false}) {
    with_two(kernel, [&](Rank& r) {
      by_size<Thread>(r, kernel, 1);
      if (kernel) {  // for a copy engine it does not matter who calls
        by_size<Warp>(r, kernel, 32);
        by_size<Block>(r, kernel, 256);
      } else {
        bandwidth(r);
      }
    });
  }
}

}  // namespace proxy_bench
