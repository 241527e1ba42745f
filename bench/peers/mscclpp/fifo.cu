// SPDX-License-Identifier: Apache-2.0
// MSCCL++'s FIFO with its own proxy thread, as installed: 16-byte triggers, a handler that only counts. The same
// producers, clock and machine as the rows beside it. Its source is not part of Marrow.
#include <atomic>
#include <chrono>
#include <mscclpp/fifo.hpp>
#include <mscclpp/proxy.hpp>
#include <thread>

#include "../../proxy/bench.cuh"

namespace proxy_bench {
namespace {

__global__ void push(mscclpp::FifoDeviceHandle fifo, int each) {
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < each; ++i) {
    mscclpp::ProxyTrigger trigger;
    trigger.fst = static_cast<std::uint64_t>(thread) << 32 | static_cast<unsigned>(i);
    trigger.snd = 1;
    (void)fifo.push(trigger, -1);
  }
}
__global__ void push_and_sync(mscclpp::FifoDeviceHandle fifo, int rounds, std::uint64_t* log,
                              floors::Clock* clock) {
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t begin = clock64();
    mscclpp::ProxyTrigger trigger;
    trigger.fst = static_cast<std::uint64_t>(r);
    trigger.snd = 1;
    fifo.sync(fifo.push(trigger, -1), -1);
    log[r] = clock64() - begin;
  }
  *clock = {clock64() - c0, floors::global_ns() - n0};
}

struct Fifo {
  std::atomic<std::uint64_t> handled{0};
  std::uint64_t count = 0;
  mscclpp::Proxy proxy;
  explicit Fifo(int size)
      : proxy(
            [this](mscclpp::ProxyTrigger) {
              handled.store(++count, std::memory_order_relaxed);
              return mscclpp::ProxyHandlerResult::Continue;
            },
            [] {
              pin_self(drain_cpu(0));
              must(cudaSetDevice(0), "device");
            },
            size) {
    proxy.start(true);
  }
};

}  // namespace

double mscclpp_rate(int producers) {
  static cudaStream_t stream = nullptr;
  if (!stream) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Fifo fifo(65536);
  const mscclpp::FifoDeviceHandle handle = fifo.proxy.fifo()->deviceHandle();
  double rate = 0;
  for (int turn = 0; turn < 2; ++turn) {  // the first warms up
    const int each = each_of(producers, total_of(producers) / (turn ? 2 : 8));
    const std::uint64_t all = fifo.handled + std::uint64_t(each) * producers;
    const double ns = timed(stream, [&] {
      push<<<blocks_of(producers), threads_of(producers), 0, stream>>>(handle, each);
    });
    for (int i = 0; i < 2000 && fifo.handled != all; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rate = static_cast<double>(each) * producers * 1e3 / ns;
  }
  fifo.proxy.stop();
  return rate;
}

void mscclpp_rows() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  for (const int size : {static_cast<int>(mscclpp::DEFAULT_FIFO_SIZE), 65536}) {
    Fifo fifo(size);
    const mscclpp::FifoDeviceHandle handle = fifo.proxy.fifo()->deviceHandle();
    const std::string note = "16-byte triggers; FIFO of " + std::to_string(size);
    for (const int producers : {1, 1024, 16896}) {
      if (producers > size) continue;  // it asks for no more threads than slots
      std::vector<double> rates;
      bool right = true;
      for (int repeat = 0; repeat < 4; ++repeat) {
        const std::uint64_t before = fifo.handled;
        const int each = each_of(producers, total_of(producers) / 4);
        const double ns = timed(stream, [&] {
          push<<<blocks_of(producers), threads_of(producers), 0, stream>>>(handle, each);
        });
        const std::uint64_t all = before + std::uint64_t(each) * producers;
        for (int i = 0; i < 2000 && fifo.handled != all; ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        right &= fifo.handled == all;
        if (repeat) rates.push_back(static_cast<double>(each) * producers * 1e3 / ns);
      }
      add({"MSCCL++ FIFO: descriptors", "Mops/s", note, producers, 1, true, "", summary(rates),
           right});
    }
    constexpr int kRounds = 4000;
    std::uint64_t* log = nullptr;
    floors::Clock* clock = nullptr;
    must(cudaMalloc(&log, 8 * kRounds), "malloc");
    must(cudaMalloc(&clock, sizeof(*clock)), "malloc");
    push_and_sync<<<1, 1, 0, stream>>>(handle, kRounds, log, clock);
    must(cudaStreamSynchronize(stream), "round trips");
    floors::Gpu gpu;
    gpu.log = log;
    gpu.clock = clock;
    add({"MSCCL++ FIFO: one way", "ns", "half of: push and sync; FIFO of " + std::to_string(size),
         1, 1, true, "", floors::one_way(gpu, kRounds, 200), true});
    must(cudaFree(log), "free");
    must(cudaFree(clock), "free");
    fifo.proxy.stop();
  }
}

}  // namespace proxy_bench
