// SPDX-License-Identifier: Apache-2.0
// The floor: a ring of 64-byte descriptors in pinned host memory, filled by a plain kernel and drained by a
// CPU thread that looks at each descriptor (lap bit of each 16-byte chunk, index) and does nothing with it.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "bench.cuh"
#include "core_probe.hpp"

namespace proxy_bench {
namespace {

struct alignas(64) Slot {
  std::uint64_t word[8];
};
struct BareRing {
  Slot* slots;              ///< pinned host memory
  std::uint64_t* consumed;  ///< likewise
  std::uint64_t* answered;  ///< likewise
  unsigned long long* head;
  std::uint64_t* seen;  ///< consumed, as last read
};

__device__ __forceinline__ std::uint64_t read_system(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store(Slot* slot, std::uint64_t index) {
  const std::uint64_t lap = (index / kRing & 1) ? 0 : std::uint64_t{1} << 63;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("{.reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t;}" ::"l"(
                     &slot->word[2 * i]),
                 "l"(index), "l"(lap)
                 : "memory");
  }
}

/// Every thread takes an index at a time; a full ring is waited for at a cached word, which whoever waits renews.
__global__ void produce(const BareRing* rings, int count, int each, int* failed) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const BareRing ring = rings[warp % count];
  for (int i = 0; i < each; ++i) {
    const std::uint64_t index = atomicAdd(ring.head, 1ull);
    auto* seen = reinterpret_cast<volatile std::uint64_t*>(ring.seen);
    if (index - *seen >= kRing) {
      const bool room = floors::spin_until([&] {
        const std::uint64_t now = read_system(ring.consumed);
        *seen = now;
        return static_cast<std::int64_t>(index - now) < static_cast<std::int64_t>(kRing);
      });
      if (!room) {
        *failed = 1;
        return;
      }
    }
    store(ring.slots + index % kRing, index);
  }
}

/// One thread: a descriptor, until the CPU's answer to it is seen.
__global__ void ask(const BareRing* rings, std::uint64_t first, int rounds, std::uint64_t* log,
                    floors::Clock* clock, int* failed) {
  const BareRing ring = rings[0];
  const std::uint64_t c0 = clock64(), n0 = floors::global_ns();
  for (int r = 0; r < rounds; ++r) {
    const std::uint64_t begin = clock64();
    store(ring.slots + (first + r) % kRing, first + r);
    if (!floors::spin_until([&] { return read_system(ring.answered) >= first + r + 1; })) {
      *failed = 1;
      return;
    }
    log[r] = clock64() - begin;
  }
  *clock = {clock64() - c0, floors::global_ns() - n0};
}

/// One thread: descriptors one after the other, index in a register.
__global__ void issue(const BareRing* rings, std::uint64_t first, int count, std::uint64_t* log) {
  const BareRing ring = rings[0];
  const std::uint64_t begin = floors::global_ns();
  for (int i = 0; i < count; ++i) store(ring.slots + (first + i) % kRing, first + i);
  log[0] = floors::global_ns() - begin;
}

struct Bare {
  BareRing ring{};
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> taken{0}, wrong{0};
  std::thread thread;
  bool answers = false, shared_ = false;

  /// @param shared  slots as a communicator's are: a shared mapping that is registered; else cudaHostAlloc's
  void open(bool shared = false) {
    shared_ = shared;
    if (shared) {
      const int fd = ::memfd_create("bare-ring", 0);
      must(fd >= 0 && ::ftruncate(fd, sizeof(Slot) * kRing) == 0 ? cudaSuccess : cudaErrorUnknown,
           "memfd");
      void* pages =
          ::mmap(nullptr, sizeof(Slot) * kRing, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      ::close(fd);
      must(cudaHostRegister(pages, sizeof(Slot) * kRing, cudaHostRegisterMapped), "register");
      ring.slots = static_cast<Slot*>(pages);
    } else {
      must(cudaHostAlloc(&ring.slots, sizeof(Slot) * kRing, cudaHostAllocMapped), "pinned memory");
    }
    must(cudaHostAlloc(&ring.consumed, 4096, cudaHostAllocMapped), "pinned memory");
    ring.answered = ring.consumed + 64;
    must(cudaMalloc(&ring.head, 256), "malloc");
    must(cudaMalloc(&ring.seen, 256), "malloc");
    reset();
  }
  void close() {
    if (shared_) {
      (void)cudaHostUnregister(ring.slots);
      ::munmap(ring.slots, sizeof(Slot) * kRing);
    } else {
      (void)cudaFreeHost(ring.slots);
    }
    (void)cudaFreeHost(ring.consumed);
    (void)cudaFree(ring.head);
    (void)cudaFree(ring.seen);
  }
  void reset() {
    std::memset(ring.slots, 0, sizeof(Slot) * kRing);
    std::memset(ring.consumed, 0, 4096);
    must(cudaMemset(ring.head, 0, 256), "memset");
    must(cudaMemset(ring.seen, 0, 256), "memset");
    taken = 0;
  }
  void start(int cpu, bool answer) {
    answers = answer;
    stop = false;
    thread = std::thread([this, cpu] {
      pin_self(cpu);
      drain();
    });
  }
  void end() {
    stop = true;
    thread.join();
  }
  void drain() {
    std::uint64_t index = 0, sum = 0, published = 0, bad = 0;
    const Slot* slots = ring.slots;
    for (std::uint32_t idle = 0;;) {
      const Slot& slot = slots[index % kRing];
      const std::uint64_t lap = (index / kRing & 1) ? 0 : std::uint64_t{1} << 63;
      std::uint64_t high[4];
      for (int i = 0; i < 4; ++i)
        high[i] = __atomic_load_n(&slot.word[2 * i + 1], __ATOMIC_ACQUIRE);
      if (((high[0] ^ lap) | (high[1] ^ lap) | (high[2] ^ lap) | (high[3] ^ lap)) >> 63) {
        if ((++idle & 1023) == 0) {
          if (stop) break;
          taken.store(index, std::memory_order_relaxed);
        }
        if (published != index) {
          __atomic_store_n(ring.consumed, index, __ATOMIC_RELEASE);
          published = index;
        }
        continue;
      }
      bad += slot.word[0] != index;
      sum += slot.word[6];
      ++index;
      if (answers) __atomic_store_n(ring.answered, index, __ATOMIC_RELEASE);
      if (index - published == 1024) {
        __atomic_store_n(ring.consumed, index, __ATOMIC_RELEASE);
        published = index;
      }
    }
    taken = index;
    wrong = bad + (sum == 1);
  }
};

}  // namespace

struct BareRings::Parts {
  cudaStream_t stream = nullptr;
  std::vector<std::unique_ptr<Bare>> bare;
  BareRing* rings = nullptr;
  int* failed = nullptr;
};
BareRings::BareRings() : parts_(new Parts) {
  must(cudaStreamCreateWithFlags(&parts_->stream, cudaStreamNonBlocking), "stream");
  must(cudaMalloc(&parts_->rings, sizeof(BareRing) * kMostRings), "malloc");
  must(cudaMalloc(&parts_->failed, sizeof(int)), "malloc");
  must(cudaMemset(parts_->failed, 0, sizeof(int)), "memset");
}
BareRings::~BareRings() {
  for (const auto& one : parts_->bare) one->close();
  (void)cudaFree(parts_->rings);
  (void)cudaFree(parts_->failed);
  (void)cudaStreamDestroy(parts_->stream);
  delete parts_;
}
double BareRings::rate(int count, int producers, int first) {
  Parts& p = *parts_;
  while (static_cast<int>(p.bare.size()) < count) {
    p.bare.push_back(std::make_unique<Bare>());
    p.bare.back()->open();
    must(cudaMemcpy(p.rings + p.bare.size() - 1, &p.bare.back()->ring, sizeof(BareRing),
                    cudaMemcpyHostToDevice),
         "copy");
  }
  for (int i = 0; i < count; ++i) {
    p.bare[i]->reset();
    p.bare[i]->start(drain_cpu(first + i), false);
  }
  must(cudaDeviceSynchronize(), "reset");
  const int each = each_of(producers, total_of(producers) * (producers == 1 ? 1 : count));
  const double ns = timed(p.stream, [&] {
    produce<<<blocks_of(producers), threads_of(producers), 0, p.stream>>>(p.rings, count, each,
                                                                          p.failed);
  });
  std::uint64_t taken = 0;
  for (int i = 0; i < count; ++i) p.bare[i]->end();
  for (int i = 0; i < count; ++i) {
    taken += p.bare[i]->taken;
    right_ &= p.bare[i]->wrong == 0;
  }
  int bad = 0;
  must(cudaMemcpy(&bad, p.failed, sizeof(int), cudaMemcpyDeviceToHost), "copy");
  if (bad) {
    std::fprintf(stderr, "bare ring: a wait gave up\n");
    std::exit(1);
  }
  const std::uint64_t posted = std::uint64_t(each) * producers;
  right_ &= taken == posted;
  return static_cast<double>(posted) * 1e3 / ns;
}

void bare_placement(const std::vector<int>& drain) {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  BareRing* rings = nullptr;
  int* failed = nullptr;
  must(cudaMalloc(&rings, sizeof(BareRing) * kMostRings), "malloc");
  must(cudaMalloc(&failed, sizeof(int)), "malloc");
  must(cudaMemset(failed, 0, sizeof(int)), "memset");
  const int most = static_cast<int>(drain.size());
  for (int again = 0; again < 2; ++again) {
    for (const bool shared : {false, true}) {
      std::vector<std::unique_ptr<Bare>> bare;
      for (int i = 0; i < most; ++i) {
        bare.push_back(std::make_unique<Bare>());
        bare.back()->open(shared);
        must(cudaMemcpy(rings + i, &bare.back()->ring, sizeof(BareRing), cudaMemcpyHostToDevice),
             "copy");
      }
      for (int count = 1; count <= most; count *= 2) {
        std::string rates;
        std::uint64_t stolen = placement::stolen_ms(drain[0]);
        for (int repeat = 0; repeat < 3; ++repeat) {
          for (int i = 0; i < count; ++i) {
            bare[i]->reset();
            bare[i]->start(drain[i], false);
          }
          must(cudaDeviceSynchronize(), "reset");
          const int each = each_of(1024, total_of(1024) * count);
          const double ns = timed(stream, [&] {
            produce<<<blocks_of(1024), threads_of(1024), 0, stream>>>(rings, count, each, failed);
          });
          for (int i = 0; i < count; ++i) bare[i]->end();
          char text[32];
          std::snprintf(text, sizeof(text), " %6.1f", static_cast<double>(each) * 1024 * 1e3 / ns);
          rates += text;
        }
        const std::string how =
            placement::probe(drain[0], ::sched_getcpu(), bare[0]->ring.slots, sizeof(Slot) * kRing);
        std::printf(
            "bare, %d on CPUs %s of cores by %s%s M/s; waits on CPU %d, %llu ms stolen; %s; ring: "
            "%s\n",
            count, placement::text(drain).c_str(), shared ? "memfd     " : "cudaMalloc",
            rates.c_str(), ::sched_getcpu(),
            static_cast<unsigned long long>(placement::stolen_ms(drain[0]) - stolen), how.c_str(),
            placement::text(placement::pages(bare[0]->ring.slots, sizeof(Slot) * kRing)).c_str());
        std::fflush(stdout);
      }
      for (const auto& one : bare) one->close();
    }
  }
}

void bare_rows() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Bare bare;
  bare.open();
  BareRing* rings = nullptr;
  must(cudaMalloc(&rings, sizeof(BareRing)), "malloc");
  must(cudaMemcpy(rings, &bare.ring, sizeof(BareRing), cudaMemcpyHostToDevice), "copy");
  int* failed = nullptr;
  std::uint64_t* log = nullptr;
  floors::Clock* clock = nullptr;
  must(cudaMalloc(&failed, sizeof(int)), "malloc");
  must(cudaMalloc(&log, 8 * 20000), "malloc");
  must(cudaMalloc(&clock, sizeof(*clock)), "malloc");
  must(cudaMemset(failed, 0, sizeof(int)), "memset");
  const auto check = [&] {
    int bad = 0;
    must(cudaMemcpy(&bad, failed, sizeof(int), cudaMemcpyDeviceToHost), "copy");
    if (bad) {
      std::fprintf(stderr, "bare ring: a wait gave up\n");
      std::exit(1);
    }
  };

  bare.reset();
  bare.start(drain_cpu(0), true);
  must(cudaDeviceSynchronize(), "reset");
  constexpr int kRounds = 4000;
  ask<<<1, 1, 0, stream>>>(rings, 0, kRounds, log, clock, failed);
  must(cudaStreamSynchronize(stream), "round trips");
  check();
  floors::Gpu gpu;
  gpu.log = log;
  gpu.clock = clock;
  add({"bare ring: one way", "ns", "half of: descriptor there, 8-byte answer back", 1, 1, true, "",
       floors::one_way(gpu, kRounds, 200), true});
  std::vector<double> each;
  for (int repeat = 0; repeat < 30; ++repeat) {
    constexpr int kCalls = 512;
    issue<<<1, 1, 0, stream>>>(rings, kRounds + std::uint64_t{kCalls} * repeat, kCalls, log);
    must(cudaStreamSynchronize(stream), "issue");
    std::uint64_t ns = 0;
    must(cudaMemcpy(&ns, log, 8, cudaMemcpyDeviceToHost), "copy");
    if (repeat >= 5) each.push_back(static_cast<double>(ns) / kCalls);
  }
  bare.end();
  // What any thread costs that only sleeps.
  for (const int sleep_us : {100, 1000}) {
    std::vector<double> shares;
    std::thread([&] {
      pin_self(drain_cpu(0));
      // As long as ours may.
      ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(sleep_us) * 500, 0UL, 0UL, 0UL);
      const auto cpu_ns = [] {
        timespec t{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
      };
      for (int repeat = 0; repeat < 3; ++repeat) {
        const double before = cpu_ns();
        const auto from = std::chrono::steady_clock::now();
        std::chrono::duration<double, std::nano> passed{};
        while (passed.count() < 4e8) {
          std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
          passed = std::chrono::steady_clock::now() - from;
        }
        shares.push_back((cpu_ns() - before) / passed.count());
      }
    }).join();
    add({"bare thread that sleeps: share of a core", "ratio",
         "SLEEP_US=" + std::to_string(sleep_us) + "; may last half as long again; thread CPU time",
         0, 1, false, "", summary(shares), true});
  }
  add({"bare ring: issue", "ns", "a loop of 512, index in a register", 1, 1, true, "",
       summary(each), bare.wrong == 0});
}

}  // namespace proxy_bench
