// SPDX-License-Identifier: Apache-2.0
// Marrow's proxy path through the public API: into the null network (what the proxy itself costs), over shm, and
// idle. Rank 0's kernels and progress threads are measured; the other ranks are there to be peers, asleep.
#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "bench.cuh"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "null_network.hpp"

namespace proxy_bench {
namespace {

using namespace marrow;
using Proxy = Gin<Path::proxy>;

__global__ void produce(const __grid_constant__ DeviceCommunicator comm,
                        const __grid_constant__ WindowHandle window, int rings, int each,
                        int* failed) {
  const Proxy gin(comm, 0);
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int peer = 1 + thread / 32 % rings;
  Status status = Status::ok;
  for (int i = 0; i < each; ++i)
    status = worse(status, gin.put_value(peer, window, (thread & 511) * 8, std::uint64_t(i)));
  if (status != Status::ok) *failed = static_cast<int>(status);
}
__global__ void finish(const __grid_constant__ DeviceCommunicator comm, int rings, int* failed) {
  const Proxy gin(comm, 0);
  for (int peer = 1; peer <= rings; ++peer) {
    if (const Status status = gin.flush(peer); status != Status::ok)
      *failed = static_cast<int>(status);
  }
}
/// Put and wait until it is complete.
__global__ void round_trips(const __grid_constant__ DeviceCommunicator comm,
                            const __grid_constant__ WindowHandle window, int rounds,
                            std::uint64_t pause_ns, std::uint64_t* log, floors::Clock* clock,
                            int* failed) {
  const Proxy gin(comm, 0, Sharing::thread);
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < rounds; ++r) {
    if (pause_ns) {
      const std::uint64_t from = floors::global_ns();
      while (floors::global_ns() - from < pause_ns) {
      }
    }
    const std::uint64_t begin = clock64();
    Status status = gin.put_value(1, window, 8, std::uint64_t(r));
    status = worse(status, gin.flush(1));
    log[r] = clock64() - begin;
    if (status != Status::ok) {
      *failed = static_cast<int>(status);
      return;
    }
  }
  *clock = {clock64() - c0, floors::global_ns() - n0};
}
__global__ void issue(const __grid_constant__ DeviceCommunicator comm,
                      const __grid_constant__ WindowHandle window, int count, std::uint64_t* log,
                      int* failed) {
  const Proxy gin(comm, 0, Sharing::thread);
  Status status = Status::ok;
  const std::uint64_t begin = floors::global_ns();
  for (int i = 0; i < count; ++i)
    status = worse(status, gin.put_value(1, window, (i & 511) * 8, std::uint64_t(i)));
  log[0] = floors::global_ns() - begin;
  if (status != Status::ok) *failed = static_cast<int>(status);
}
__global__ void issue_shared(const __grid_constant__ DeviceCommunicator comm,
                             const __grid_constant__ WindowHandle window, int count,
                             std::uint64_t* log, int* failed) {
  const Proxy gin(comm, 0, Sharing::device);
  Status status = Status::ok;
  const std::uint64_t begin = floors::global_ns();
  for (int i = 0; i < count; ++i)
    status = worse(status, gin.put_value(1, window, (i & 511) * 8, std::uint64_t(i)));
  log[0] = floors::global_ns() - begin;
  if (status != Status::ok) *failed = static_cast<int>(status);
}
/// Puts of `bytes` from GPU memory, one at a time.
__global__ void put_rounds(const __grid_constant__ DeviceCommunicator comm,
                           const __grid_constant__ WindowHandle to,
                           const __grid_constant__ LocalBufferHandle from, std::uint64_t bytes,
                           int rounds, std::uint64_t* log, floors::Clock* clock, int* failed) {
  const Proxy gin(comm, 0, Sharing::thread);
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t begin = clock64();
    Status status = gin.put(1, to, 0, from, 0, bytes);
    status = worse(status, gin.flush(1));
    log[r] = clock64() - begin;
    if (status != Status::ok) {
      *failed = static_cast<int>(status);
      return;
    }
  }
  *clock = {clock64() - c0, floors::global_ns() - n0};
}

struct Options {
  std::string network = "null";
  int threads = 1;
  Sharing sharing = Sharing::device;
  int sleep_us = 100;
  std::uint32_t ring = kRing;
};

/// A communicator of threads + 1 ranks on GPU 0; body(comm) runs on rank 0.
struct Scene {
  Communicator& comm;
  DeviceCommunicator handle;
  WindowHandle window;
  cudaStream_t stream;
  std::uint64_t* log;
  floors::Clock* clock;
  int* failed;

  void check(const char* what) const {
    must(cudaStreamSynchronize(stream), what);
    int bad = 0;
    must(cudaMemcpyAsync(&bad, failed, sizeof(int), cudaMemcpyDeviceToHost, stream), "copy");
    must(cudaStreamSynchronize(stream), what);
    comm.check();
    if (bad) {
      std::fprintf(stderr, "%s: %s\n", what, name(static_cast<Status>(bad)));
      std::exit(1);
    }
  }
  Summary one_way(int rounds, int warmup, double parts) const {
    std::vector<std::uint64_t> cycles(rounds);
    floors::Clock c;
    must(cudaMemcpyAsync(cycles.data(), log, rounds * 8, cudaMemcpyDeviceToHost, stream), "copy");
    must(cudaMemcpyAsync(&c, clock, sizeof(c), cudaMemcpyDeviceToHost, stream), "copy");
    must(cudaStreamSynchronize(stream), "copy");
    std::vector<double> ns;
    for (int i = warmup; i < rounds; ++i)
      ns.push_back(static_cast<double>(cycles[i]) / c.per_ns() / parts);
    return summary(std::move(ns));
  }
};

void with_ranks(const Options& options, const std::function<void(Scene&)>& body,
                Memory memory = Memory::host) {
  const int nranks = options.threads + 1;
  const UniqueId id = UniqueId::create();
  std::barrier done(nranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < nranks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        must(cudaSetDevice(0), "device");
        cudaStream_t stream = nullptr;
        must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        Config config;
        config.place = Place::gpu(0, stream);
        config.parameters["MARROW_PATH"] = "proxy";
        config.parameters["MARROW_LSA_SIZE"] = "1";
        config.parameters["MARROW_NETWORK"] = options.network;
        config.parameters["MARROW_PROXY_THREADS"] = std::to_string(options.threads);
        config.parameters["MARROW_PROXY_RING"] = std::to_string(rank == 0 ? options.ring : 1024);
        // Peers of the null network have nothing to do; of a real one they have to answer.
        const bool idle = rank != 0 && options.network == "null";
        config.parameters["MARROW_PROXY_SLEEP_US"] =
            std::to_string(idle ? 50000 : options.sleep_us);
        config.parameters["MARROW_PROXY_CPUS"] =
            idle ? "0,1"
                 : std::to_string(kFirstCpu + (rank ? options.threads : 0)) + "-" +
                       std::to_string(kFirstCpu + (rank ? 2 : 1) * options.threads - 1);
        Communicator comm(id, nranks, rank, config);
        Window window = comm.allocate(1 << 20, memory);
        DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1,
                                                                   .signals = 8,
                                                                   .counters = 8,
                                                                   .barriers = 1,
                                                                   .packets = 0,
                                                                   .sharing = options.sharing});
        if (rank == 0) {
          Scene scene{comm, device.handle(), window.handle(), stream, nullptr, nullptr, nullptr};
          must(cudaMalloc(&scene.log, 8 * 20000), "malloc");
          must(cudaMalloc(&scene.clock, sizeof(floors::Clock)), "malloc");
          must(cudaMalloc(&scene.failed, sizeof(int)), "malloc");
          must(cudaMemset(scene.failed, 0, sizeof(int)), "memset");
          body(scene);
          (void)cudaFree(scene.log);
          (void)cudaFree(scene.clock);
          (void)cudaFree(scene.failed);
        }
        done.arrive_and_wait();
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

/// CPU ns that each progress thread of this process has used, by its thread id.
std::vector<std::pair<int, std::uint64_t>> proxy_cpu_ns() {
  std::vector<std::pair<int, std::uint64_t>> found;
  DIR* tasks = ::opendir("/proc/self/task");
  if (!tasks) return found;
  while (const dirent* entry = ::readdir(tasks)) {
    const std::string folder = std::string("/proc/self/task/") + entry->d_name;
    std::string comm;
    std::getline(std::ifstream(folder + "/comm") >> std::ws, comm);
    std::uint64_t ns = 0;
    if (comm == "marrow-proxy" && std::ifstream(folder + "/schedstat") >> ns)
      found.emplace_back(std::atoi(entry->d_name), ns);
  }
  ::closedir(tasks);
  return found;
}

void rates() {
  for (const int threads : {1, 2, 4, 8}) {
    Options options;
    options.threads = threads;
    with_ranks(options, [&](Scene& s) {
      for (const int producers : {1, 32, 1024, 16896}) {
        if (threads > 1 && producers < 1024) continue;
        std::vector<double> rates;
        for (int repeat = 0; repeat < 4; ++repeat) {
          const int each = each_of(producers, total_of(producers) * (producers == 1 ? 1 : threads));
          const double ns = timed(s.stream, [&] {
            produce<<<blocks_of(producers), threads_of(producers), 0, s.stream>>>(
                s.handle, s.window, threads, each, s.failed);
          });
          finish<<<1, 1, 0, s.stream>>>(s.handle, threads, s.failed);
          s.check("descriptors");
          if (repeat) rates.push_back(static_cast<double>(each) * producers * 1e3 / ns);
        }
        add({"proxy: descriptors", "Mops/s", "put_value of 8 bytes; all completed", producers,
             threads, true, "null", summary(rates), true});
      }
    });
  }
  Options small;
  small.ring = 1024;
  with_ranks(small, [&](Scene& s) {
    for (const int producers : {1024, 16896}) {
      std::vector<double> rates;
      for (int repeat = 0; repeat < 4; ++repeat) {
        const int each = each_of(producers, total_of(producers));
        const double ns = timed(s.stream, [&] {
          produce<<<blocks_of(producers), threads_of(producers), 0, s.stream>>>(s.handle, s.window,
                                                                                1, each, s.failed);
        });
        finish<<<1, 1, 0, s.stream>>>(s.handle, 1, s.failed);
        s.check("descriptors");
        if (repeat) rates.push_back(static_cast<double>(each) * producers * 1e3 / ns);
      }
      add({"proxy: descriptors, default ring", "Mops/s", "MARROW_PROXY_RING=1024", producers, 1,
           true, "null", summary(rates), true});
    }
  });
}

template <class Kernel>
Summary issue_times(Scene& s, Kernel kernel) {
  std::vector<double> each;
  for (int repeat = 0; repeat < 30; ++repeat) {
    constexpr int kCalls = 512;
    kernel<<<1, 1, 0, s.stream>>>(s.handle, s.window, kCalls, s.log, s.failed);
    s.check("issue");
    std::uint64_t ns = 0;
    must(cudaMemcpyAsync(&ns, s.log, 8, cudaMemcpyDeviceToHost, s.stream), "copy");
    must(cudaStreamSynchronize(s.stream), "copy");
    if (repeat >= 5) each.push_back(static_cast<double>(ns) / kCalls);
  }
  return summary(std::move(each));
}

void latencies() {
  Options alone;
  alone.sharing = Sharing::thread;
  with_ranks(alone, [&](Scene& s) {
    constexpr int kRounds = 4000;
    round_trips<<<1, 1, 0, s.stream>>>(s.handle, s.window, kRounds, 0, s.log, s.clock, s.failed);
    s.check("round trips");
    add({"proxy: one way", "ns", "half of: put_value and flush", 1, 1, true, "null",
         s.one_way(kRounds, 200, 2), true});
    add({"proxy: issue of an inline put", "ns", "Sharing::thread, a loop of 512", 1, 1, true,
         "null", issue_times(s, issue), true});
  });
  Options shared;
  with_ranks(shared, [&](Scene& s) {
    add({"proxy: issue of an inline put, shared", "ns",
         "Sharing::device, one thread, a loop of 512", 1, 1, true, "null",
         issue_times(s, issue_shared), true});
  });
  for (const int sleep_us : {100, 1000}) {
    Options sleeping = alone;
    sleeping.sleep_us = sleep_us;
    with_ranks(sleeping, [&](Scene& s) {
      constexpr int kRounds = 60;
      round_trips<<<1, 1, 0, s.stream>>>(s.handle, s.window, kRounds, 10'000'000, s.log, s.clock,
                                         s.failed);
      s.check("first after a pause");
      add({"proxy: first put after 10 ms of nothing", "ns",
           "MARROW_PROXY_SLEEP_US=" + std::to_string(sleep_us) + "; put_value and flush", 1, 1,
           true, "null", s.one_way(kRounds, 2, 1), true});
      const auto before = proxy_cpu_ns();
      const auto from = std::chrono::steady_clock::now();
      std::this_thread::sleep_for(std::chrono::seconds(2));
      const std::chrono::duration<double, std::nano> passed =
          std::chrono::steady_clock::now() - from;
      std::vector<double> shares;
      for (const auto& [id, ns] : proxy_cpu_ns()) {
        for (const auto& [old_id, old_ns] : before) {
          if (id == old_id) shares.push_back(static_cast<double>(ns - old_ns) / passed.count());
        }
      }
      // Ours is the busier of the two ranks': the other sleeps 50 ms at a time.
      std::sort(shares.begin(), shares.end());
      if (!shares.empty()) shares.erase(shares.begin(), shares.end() - 1);
      add({"proxy: share of a core when idle", "ratio",
           "MARROW_PROXY_SLEEP_US=" + std::to_string(sleep_us) + "; thread CPU time over 2 s", 0, 1,
           false, "null", summary(shares), true});
    });
  }
}

/// Completion of puts over shm, beside the bare ring's round trip and the copies they contain.
void over_shm() {
  for (const Memory memory : {Memory::host, Memory::device}) {
    Options options;
    options.network = "shm";
    options.sharing = Sharing::thread;
    with_ranks(
        options,
        [&](Scene& s) {
          void* source = nullptr;
          must(cudaMalloc(&source, 1 << 20), "malloc");
          LocalBuffer local = s.comm.register_local(source, 1 << 20);
          const char* place = memory == Memory::host ? "host" : "GPU";
          for (const std::uint64_t bytes : {std::uint64_t{8}, std::uint64_t{4096},
                                            std::uint64_t{65536}, std::uint64_t{1} << 20}) {
            constexpr int kRounds = 300;
            put_rounds<<<1, 1, 0, s.stream>>>(s.handle, s.window, local.handle(), bytes, kRounds,
                                              s.log, s.clock, s.failed);
            s.check("puts over shm");
            add({"proxy: put and flush over shm, " + std::to_string(bytes) + " bytes", "ns",
                 std::string("GPU memory to ") + place + " memory of another rank", 1, 1, true,
                 "shm", s.one_way(kRounds, 30, 1), false});
          }
          constexpr int kRounds = 1000;
          round_trips<<<1, 1, 0, s.stream>>>(s.handle, s.window, kRounds, 0, s.log, s.clock,
                                             s.failed);
          s.check("values over shm");
          add({"proxy: put_value and flush over shm", "ns", std::string("to ") + place + " memory",
               1, 1, true, "shm", s.one_way(kRounds, 100, 1), false});
          (void)cudaStreamSynchronize(s.stream);
        },
        memory);
  }
}

}  // namespace

void marrow_rows(const std::string& only) {
  null_network::add();
  if (only.empty() || only == "rates") rates();
  if (only.empty() || only == "latencies") latencies();
  if (only.empty() || only == "shm") over_shm();
}

}  // namespace proxy_bench
