// SPDX-License-Identifier: Apache-2.0
// Marrow's proxy path through the public API: into the null network (what the proxy itself costs), over shm, and
// idle. Rank 0's kernels and progress threads are measured; the other ranks are there to be peers, asleep.
#include <barrier>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "bench.cuh"
#include "core_probe.hpp"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "null_network.hpp"
#include "scene.cuh"

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
  std::vector<int> wait_on;  ///< CPUs of the threads that launch and wait; empty: host_cpu()
  std::string cpus;          ///< MARROW_PROXY_CPUS of rank 0; empty: drain_cpu(0) ..
};

/// A communicator of threads + 1 ranks on GPU 0; body(comm) runs on rank 0.
void with_ranks(const Options& options, const std::function<void(Scene&)>& body,
                Memory memory = Memory::host) {
  const int nranks = options.threads + 1;
  const UniqueId id = UniqueId::create();
  std::barrier done(nranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < nranks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        pin_self(options.wait_on.empty() ? std::vector<int>{host_cpu()} : options.wait_on);
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
        std::string list;
        for (int t = 0; t < options.threads; ++t) {
          list += (t ? "," : "") +
                  std::to_string(idle ? host_cpu() : drain_cpu(t + (rank ? options.threads : 0)));
        }
        config.parameters["MARROW_PROXY_CPUS"] =
            rank == 0 && !options.cpus.empty() ? options.cpus : list;
        Communicator comm(id, nranks, rank, config);
        Window window = comm.allocate(1 << 20, memory);
        DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1,
                                                                   .signals = 8,
                                                                   .counters = 8,
                                                                   .barriers = 1,
                                                                   .packets = 0,
                                                                   .sharing = options.sharing});
        if (rank == 0) {
          Scene scene(comm, device.handle(), window.handle(), stream, 20000);
          body(scene);
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

/// The busiest progress thread: the others belong to ranks that sleep.
placement::Task busiest() {
  placement::Task out;
  for (const placement::Task& task : placement::tasks("marrow-proxy")) {
    if (out.id == 0 || task.used_ns > out.used_ns) out = task;
  }
  return out;
}

/// Fills `rings` of ours once, the first is of peer 1. @return Mops/s
double rate(Scene& s, int rings, int producers, int scale) {
  // Awake when it begins: how long that takes is a row of its own.
  produce<<<1, 32 * rings, 0, s.stream>>>(s.handle, s.window, rings, 1, s.failed);
  finish<<<1, 1, 0, s.stream>>>(s.handle, rings, s.failed);
  const int each = each_of(producers, total_of(producers) * scale);
  const double ns = timed(s.stream, [&] {
    produce<<<blocks_of(producers), threads_of(producers), 0, s.stream>>>(s.handle, s.window, rings,
                                                                          each, s.failed);
  });
  finish<<<1, 1, 0, s.stream>>>(s.handle, rings, s.failed);
  s.check("descriptors");
  return static_cast<double>(each) * producers * 1e3 / ns;
}

std::vector<double> quotients(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out;
  for (std::size_t i = 0; i < a.size(); ++i) out.push_back(a[i] / b[i]);
  return out;
}

/// Ours and its floor in turns, on the same CPUs.
void rates() {
  constexpr int kTurns = 4;  // the first only warms up
  BareRings bare;
  for (const int threads : {1, 2, 4, 8}) {
    Options options;
    options.threads = threads;
    options.sleep_us = 2000;  // out of the way while the bare rings are drained
    with_ranks(options, [&](Scene& s) {
      for (const int producers : {1, 32, 1024, 16896}) {
        if (threads > 1 && producers < 1024) continue;
        const bool scaling = threads > 1 && producers == 1024;
        const int scale = producers == 1 ? 1 : threads;
        std::vector<double> ours, floor, ours_one, floor_one, fifo;
        for (int turn = 0; turn < kTurns; ++turn) {
          const double bare_now = bare.rate(threads, producers);
          const double now = rate(s, threads, producers, scale);
          if (turn == 0) continue;
          floor.push_back(bare_now);
          ours.push_back(now);
          if (scaling) {
            floor_one.push_back(bare.rate(1, producers, 1));
            ours_one.push_back(rate(s, 1, producers, 1));
          }
#if defined(MARROW_BENCH_MSCCLPP)
          if (threads == 1 && producers == 1024) fifo.push_back(mscclpp_rate(producers));
#endif
        }
        const std::string how = placement::probe(drain_cpu(0), host_cpu(), nullptr, 0);
        add({"bare ring: descriptors", "Mops/s", "in turns with ours; index and lap bits checked",
             producers, threads, true, "", summary(floor), bare.right()});
        add({"proxy: descriptors", "Mops/s", "put_value of 8 bytes; all completed; " + how,
             producers, threads, true, "null", summary(ours), true});
        add({"proxy / bare ring, each turn", "ratio", "of the two rows before it", producers,
             threads, true, "null", summary(quotients(ours, floor)), true});
        if (!fifo.empty()) {
          add({"MSCCL++ FIFO: descriptors, in turns", "Mops/s", "16-byte triggers; FIFO of 65536",
               producers, threads, true, "", summary(fifo), true});
          add({"proxy / MSCCL++ FIFO, each turn", "ratio", "FIFO of 65536", producers, threads,
               true, "null", summary(quotients(ours, fifo)), true});
        }
        if (scaling) {
          add({"proxy: descriptors, one of several threads", "Mops/s", "in the same turns",
               producers, threads, true, "null", summary(ours_one), true});
          add({"bare ring: descriptors, one of several", "Mops/s", "in the same turns", producers,
               threads, true, "", summary(floor_one), bare.right()});
          add({"proxy: gain by threads / bare ring's, each turn", "ratio",
               "all threads against one of them, for both", producers, threads, true, "null",
               summary(quotients(quotients(ours, ours_one), quotients(floor, floor_one))), true});
        }
      }
    });
  }
  Options small;
  small.ring = 1024;
  small.sleep_us = 2000;
  with_ranks(small, [&](Scene& s) {
    for (const int producers : {1024, 16896}) {
      std::vector<double> ours, floor;
      for (int turn = 0; turn < kTurns; ++turn) {
        const double bare_now = bare.rate(1, producers);
        const double now = rate(s, 1, producers, 1);
        if (turn == 0) continue;
        floor.push_back(bare_now);
        ours.push_back(now);
      }
      add({"proxy: descriptors, default ring", "Mops/s", "MARROW_PROXY_RING=1024", producers, 1,
           true, "null", summary(ours), true});
      add({"proxy / bare ring, default ring, each turn", "ratio", "the bare ring has 65536 slots",
           producers, 1, true, "null", summary(quotients(ours, floor)), true});
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
         s.times(kRounds, 200, 2), true});
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
           true, "null", s.times(kRounds, 2, 1), true});
      const placement::Task before = busiest();
      const auto from = std::chrono::steady_clock::now();
      std::this_thread::sleep_for(std::chrono::milliseconds(1200));
      const std::chrono::duration<double, std::nano> passed =
          std::chrono::steady_clock::now() - from;
      // Ours is the busier of the two ranks': the other sleeps 50 ms at a time.
      const double share =
          static_cast<double>(placement::task(before.id).used_ns - before.used_ns) / passed.count();
      add({"proxy: share of a core when idle", "ratio",
           "MARROW_PROXY_SLEEP_US=" + std::to_string(sleep_us) + "; thread CPU time over 1.2 s", 0,
           1, false, "null", summary({share}), true});
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
                 "shm", s.times(kRounds, 30, 1), false});
          }
          constexpr int kRounds = 1000;
          round_trips<<<1, 1, 0, s.stream>>>(s.handle, s.window, kRounds, 0, s.log, s.clock,
                                             s.failed);
          s.check("values over shm");
          add({"proxy: put_value and flush over shm", "ns", std::string("to ") + place + " memory",
               1, 1, true, "shm", s.times(kRounds, 100, 1), false});
          (void)cudaStreamSynchronize(s.stream);
        },
        memory);
  }
}

/// The same rate with the threads in other places, each with a new communicator: what it depends on.
void placements() {
  const auto n = static_cast<int>(cpus().size());
  struct Case {
    std::string name;
    int drain;
    std::vector<int> wait_on;
    std::string cpus;
  };
  std::vector<Case> cases;
  for (const int at : {0, n / 4, n / 2, 3 * n / 4}) {
    const int drain = drain_cpu(at);
    cases.push_back({"waits on another core", drain, {host_cpu()}, std::to_string(drain)});
    std::vector<int> same = placement::siblings(drain);
    std::erase(same, drain);
    if (at == 0 && !same.empty())
      cases.push_back({"waits on the same core", drain, {same[0]}, std::to_string(drain)});
  }
  cases.push_back({"waits and drains anywhere", drain_cpu(0), cpus(), "none"});
  for (int again = 0; again < 3; ++again) {
    for (const Case& at : cases) {
      Options options;
      options.wait_on = at.wait_on;
      options.cpus = at.cpus;
      with_ranks(options, [&](Scene& s) {
        std::string rates;
        std::string first;
        const auto before = busiest();
        if (at.cpus != "none") first = placement::probe(at.drain, ::sched_getcpu(), nullptr, 0);
        const std::uint64_t stolen = placement::stolen_ms(at.drain);
        for (int repeat = 0; repeat < 4; ++repeat) {
          const int each = each_of(1024, total_of(1024));
          const double ns = timed(s.stream, [&] {
            produce<<<blocks_of(1024), threads_of(1024), 0, s.stream>>>(s.handle, s.window, 1, each,
                                                                        s.failed);
          });
          finish<<<1, 1, 0, s.stream>>>(s.handle, 1, s.failed);
          s.check("descriptors");
          char text[32];
          std::snprintf(text, sizeof(text), " %6.1f", static_cast<double>(each) * 1024 * 1e3 / ns);
          if (repeat) rates += text;
        }
        const auto after = busiest();
        const auto [address, bytes] = placement::mapping("memfd:marrow-host");
        const std::string how = placement::probe(after.cpu, ::sched_getcpu(), address, bytes);
        std::printf(
            "proxy, %-26s%s M/s (before: %s); waits on CPU %d, drains on CPU %d, pushed off %llu "
            "times, %llu ms stolen; %s; ring: %s\n",
            at.name.c_str(), rates.c_str(), first.c_str(), ::sched_getcpu(), after.cpu,
            static_cast<unsigned long long>(after.pushed - before.pushed),
            static_cast<unsigned long long>(placement::stolen_ms(at.drain) - stolen), how.c_str(),
            placement::text(placement::pages(address, bytes)).c_str());
        std::fflush(stdout);
      });
    }
  }
}

}  // namespace

void marrow_placement() {
  null_network::add();
  bare_placement({drain_cpu(0), drain_cpu(1), drain_cpu(2), drain_cpu(3)});
  if (const std::vector<int> same = placement::siblings(drain_cpu(0)); same.size() > 1)
    bare_placement({same[0], same[1]});
  placements();
}

void marrow_rows(const std::string& only) {
  null_network::add();
  if (wanted(only, "rates")) rates();
  if (wanted(only, "latencies")) latencies();
  if (wanted(only, "shm")) over_shm();
}

}  // namespace proxy_bench
