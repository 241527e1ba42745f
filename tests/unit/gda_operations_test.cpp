// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Every operation of the gda path against softnic, over both kinds of completion queue, all sharing
// modes, small rings that wrap many times, and indices that start near the wrap of 16 and 32 bits.
#include <cstdlib>

#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;

struct Result {
  Status status[16] = {};
  std::uint64_t value[16] = {};
};

void fill(std::byte* at, std::uint64_t bytes, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i)
    at[i] = static_cast<std::byte>((i * 131 + seed * 17 + (i >> 8)) & 0xff);
}
bool holds(const std::byte* at, std::uint64_t bytes, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (at[i] != static_cast<std::byte>((i * 131 + seed * 17 + (i >> 8)) & 0xff)) return false;
  }
  return true;
}

// --- kernels --------------------------------------------------------------------------------------

MARROW_KERNEL put_sizes(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                        Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  constexpr std::uint64_t kSizes[] = {0, 1, 7, 8, 15, 16, 4096, 100003};
  std::uint64_t at = 0;
  for (int i = 0; i < 8; ++i) {
    out->status[i] = gin.put(peer, window, at, source, at, kSizes[i], SignalAdd{i, 3});
    at += kSizes[i];
  }
  for (int i = 0; i < 8; ++i)
    out->status[8 + (i & 7)] = worse(out->status[8 + (i & 7)], gin.wait_signal(i, 3));
  out->value[0] = at;
}

MARROW_KERNEL all_operations(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle target,
                             Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  struct Three {
    std::uint64_t a, b, c;
  };
  out->status[0] = gin.put_value(peer, window, 0, std::uint8_t{0x5a});
  out->status[1] = gin.put_value(peer, window, 8, Three{1, 2, 3}, SignalAdd{0, 1});
  out->status[2] = gin.wait_signal(0, 1);
  out->value[0] = load_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(window.local) + 3);
  // get back what we put there
  out->status[3] = gin.get(peer, window, 0, target, 0, 32);
  out->status[4] = gin.flush(Index(peer));
  out->value[1] = reinterpret_cast<std::uint64_t*>(target.local)[2];
  // atomics on a word that only we use
  const std::uint64_t word = 1024;
  out->status[5] = gin.add(peer, window, word, 40);
  out->status[6] = gin.fetch_add(peer, window, word, 2, &out->value[2]);
  out->status[7] = gin.compare_swap(peer, window, word, 42, 7, &out->value[3]);
  out->status[8] = gin.compare_swap(peer, window, word, 42, 9, &out->value[4]);
  out->status[9] = gin.fetch_add(peer, window, word, 0, &out->value[5]);
  // signals, packets, counters
  out->status[10] = gin.signal(peer, SignalAt{window, 2048, 5});
  out->status[11] = gin.send_packet(peer, 3, 0x123456789abcdef0ull, 77);
  out->status[12] = gin.receive_packet(3, 77, &out->value[6]);
  out->status[13] = gin.put(peer, window, 4096, target, 0, 32, CounterInc{2});
  out->status[14] = gin.put(peer, window, 4096, target, 0, 0, CounterInc{2});
  out->status[14] = worse(out->status[14], gin.wait_counter(2, 2));
  out->status[15] = worse(gin.flush_remote(), gin.flush());
  out->value[7] = gin.read_counter(2);
}

MARROW_KERNEL ping_pong(DeviceCommunicator comm, WindowHandle window, int rounds, Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = 1 - comm.rank;
  auto* words = reinterpret_cast<std::uint64_t*>(window.local);
  std::uint64_t bad = 0;
  for (int i = 1; i <= rounds; ++i) {
    if (comm.rank == 0) {
      words[8] = static_cast<std::uint64_t>(i);
      Status s = gin.put(peer, window, 0, window, 64, 8, SignalAdd{0, 1});
      s = worse(s, gin.wait_signal(0, static_cast<std::uint64_t>(i)));
      if (s != Status::ok) {
        out->status[0] = s;
        break;
      }
      if (words[0] != static_cast<std::uint64_t>(i) * 3) ++bad;
    } else {
      Status s = gin.wait_signal(0, static_cast<std::uint64_t>(i));
      if (s != Status::ok) {
        out->status[0] = s;
        break;
      }
      if (words[0] != static_cast<std::uint64_t>(i)) ++bad;
      words[8] = words[0] * 3;
      s = gin.put(peer, window, 0, window, 64, 8, SignalAdd{0, 1});
      if (s != Status::ok) {
        out->status[0] = s;
        break;
      }
    }
  }
  out->value[0] = bad;
}

/// Every thread puts its own words; nothing but queue space paces it.
MARROW_KERNEL flood(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                    int rounds, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const auto t = static_cast<std::uint64_t>(thread_index());
  Status worst = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    const std::uint64_t at =
        (t * static_cast<std::uint64_t>(rounds) + static_cast<std::uint64_t>(i)) * 8;
    worst = worse(worst, gin.put(peer, window, at, source, at, 8, SignalAdd{1, 1}));
    if (i % 7 == 3) worst = worse(worst, gin.add(peer, window, window.bytes - 8, 1));
    if (i % 50 == 11) worst = worse(worst, gin.flush());
    std::uint64_t old = 0;
    if (i % 20 == 5) worst = worse(worst, gin.fetch_add(peer, window, window.bytes - 16, 1, &old));
    if (i % 25 == 6)
      worst = worse(worst, gin.put_value(peer, window, at,
                                         reinterpret_cast<std::uint64_t*>(source.local)[at / 8],
                                         CounterInc{1}));
  }
  worst = worse(worst, gin.flush());
  out[t] = worst;
}

MARROW_KERNEL deferred(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                       int count, std::uint64_t round, Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status s = Status::ok;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(i) * 8;
    s = worse(s, gin.put(peer, window, at, source, at, 8, Doorbell::deferred));
  }
  out->status[0] = s;
  out->status[1] = gin.flush();  // rings
  for (int i = 0; i < count; ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(i) * 8;
    s = worse(s, gin.put(peer, window, 65536 + at, source, at, 8, Doorbell::deferred));
  }
  out->status[2] = worse(s, gin.signal(peer, SignalAdd{0, 1}));  // rings
  out->status[3] = gin.wait_signal(0, round);
}

/// A warp posts together: lane l of round i owns word i * lanes + l.
MARROW_KERNEL each_lane(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                        int rounds, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const auto lane = static_cast<std::uint64_t>(lane_index());
  const auto lanes = static_cast<std::uint64_t>(warp_lanes());
  Status worst = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    const std::uint64_t at = (static_cast<std::uint64_t>(i) * lanes + lane) * 8;
    const Doorbell bell = i % 3 == 1 ? Doorbell::deferred : Doorbell::now;
    if (i % 4 == 0) {
      worst = worse(worst, gin.put(peer, window, at, source, at, 8, EachLane{}, SignalAdd{1, 1}));
    } else if (i % 4 == 1) {
      worst = worse(worst, gin.put_value(peer, window, at,
                                         reinterpret_cast<std::uint64_t*>(source.local)[at / 8],
                                         EachLane{}, bell));
    } else {
      worst = worse(worst, gin.put(peer, window, at, source, at, 8, EachLane{}, bell));
    }
    if (i % 5 == 2)
      worst = worse(worst, gin.add(peer, window, window.bytes - 8, lane + 1, EachLane{}));
    if (i % 7 == 3)  // one lane has nothing to put
      worst = worse(worst, gin.put(peer, window, at, source, at, lane == 1 ? 0 : 8, EachLane{}));
    if (i % 9 == 4)
      worst = worse(worst, gin.put(peer, window, at, source, at, 8, EachLane{}, CounterInc{1}));
  }
  worst = worse(worst, gin.signal(peer, SignalAdd{2, 1}, EachLane{}));
  worst = worse(worst, gin.flush(Warp{}));
  out[lane] = worst;
}

MARROW_KERNEL fence_twice(DeviceCommunicator comm, WindowHandle window, Result* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  out->status[0] = gin.flush_remote();  // nothing outstanding
  out->status[1] = gin.put_value(peer, window, 0, std::uint64_t{7});
  out->status[2] = gin.flush_remote();
  out->status[3] = gin.flush_remote();
}

// --- tests ----------------------------------------------------------------------------------------

class GdaOperations : public QueueTest {};

TEST_P(GdaOperations, PutOfAnySizeThenSignal) {
  run_ranks(setting(3), [](Rank& rank) {
    const LocalBufferHandle source = rank.local(1 << 18);
    fill(source.local, 1 << 18, static_cast<unsigned>(rank.rank()));
    Result result;
    launch(Place::cpu(), 1, 1, 0, put_sizes, rank.comm(), rank.window(), source, &result);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(result.status[i], Status::ok) << i;
    const unsigned from = static_cast<unsigned>((rank.rank() + 2) % 3);
    EXPECT_TRUE(holds(rank.window().local, result.value[0], from));
    EXPECT_EQ(rank.window().local[result.value[0]], std::byte{0});
    EXPECT_TRUE(rank.queues().errors().empty());
  });
}

TEST_P(GdaOperations, EachDoesWhatItSays) {
  for (const int ranks : {1, 2}) {
    run_ranks(setting(ranks), [](Rank& rank) {
      const LocalBufferHandle target = rank.local(4096);
      Result r;
      launch(Place::cpu(), 1, 1, 0, all_operations, rank.comm(), rank.window(), target, &r);
      for (int i = 0; i < 16; ++i)
        EXPECT_EQ(r.status[i], Status::ok) << i << " " << name(r.status[i]);
      EXPECT_EQ(r.value[0], 3u);
      EXPECT_EQ(r.value[1], 2u);
      EXPECT_EQ(r.value[2], 40u);
      EXPECT_EQ(r.value[3], 42u);
      EXPECT_EQ(r.value[4], 7u);
      EXPECT_EQ(r.value[5], 7u);
      EXPECT_EQ(r.value[6], 0x123456789abcdef0ull);
      EXPECT_EQ(r.value[7], 2u);
      rank.barrier();
      EXPECT_EQ(rank.window().local[0], std::byte{0x5a});
      EXPECT_EQ(rank.words()[256], 5u);
      EXPECT_EQ(rank.words()[513], 1u);
      EXPECT_TRUE(rank.queues().errors().empty());
    });
  }
}

TEST_P(GdaOperations, FlushRemoteReadsEachMemoryOnceAndOnlyWhenNeeded) {
  for (const bool two_memories : {false, true}) {
    run_ranks(setting(2), [&](Rank& rank) {
      if (two_memories) {  // as on a NIC that writes to host and device memory
        auto* device = const_cast<GdaDevice*>(rank.comm().gda);
        for (int kind = 0; kind < 2; ++kind) {
          device->fence_base[kind] = rank.window().gda_base;
          device->fence_rkey[kind] = rank.window().gda_rkey;
        }
      }
      const int peer = 1 - rank.rank();
      Result r;
      launch(Place::cpu(), 1, 1, 0, fence_twice, rank.comm(), rank.window(), &r);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(r.status[i], Status::ok) << i;
      EXPECT_EQ(rank.queue(0, peer).reserved_index, GetParam().first + 1 + (two_memories ? 2 : 1));
      EXPECT_EQ(rank.queue(0, rank.rank()).reserved_index, GetParam().first);
      rank.barrier();
      EXPECT_EQ(rank.words()[0], 7u);
    });
  }
}

TEST_P(GdaOperations, PingPong) {
  run_ranks(setting(2), [](Rank& rank) {
    Result r;
    launch(Place::cpu(), 1, 1, 0, ping_pong, rank.comm(), rank.window(), 300, &r);
    EXPECT_EQ(r.status[0], Status::ok);
    EXPECT_EQ(r.value[0], 0u);
  });
}

TEST_P(GdaOperations, ManyThreadsOnOneQueueWithBackPressure) {
  const int threads = GetParam().sharing == Sharing::thread ? 1 : 4;
  constexpr int kRounds = 200;
  for (const char* lanes : {"1", "4"}) {
    ::setenv("MARROW_CPU_LANES", lanes, 1);  // read by launch
    run_ranks(setting(2), [&](Rank& rank) {
      const LocalBufferHandle source = rank.local(1 << 16);
      fill(source.local, 1 << 16, static_cast<unsigned>(rank.rank()));
      std::vector<Status> out(static_cast<std::size_t>(threads), Status::invalid);
      launch(Place::cpu(), 1, threads, 0, flood, rank.comm(), rank.window(), source, kRounds,
             out.data());
      for (const Status s : out) EXPECT_EQ(s, Status::ok) << name(s);
      rank.barrier();
      const auto n = static_cast<std::uint64_t>(threads) * kRounds;
      EXPECT_TRUE(holds(rank.window().local, n * 8, static_cast<unsigned>(1 - rank.rank())));
      EXPECT_EQ(rank.signals()[1], n);
      const std::uint64_t words = rank.window().bytes / 8;
      EXPECT_EQ(rank.words()[words - 1], static_cast<std::uint64_t>(threads) * 29);
      EXPECT_EQ(rank.words()[words - 2], static_cast<std::uint64_t>(threads) * 10);
      EXPECT_EQ(rank.comm().counter[1][1], static_cast<std::uint64_t>(threads) * 8);
    });
  }
  ::unsetenv("MARROW_CPU_LANES");
}

void defer_doorbells(const Setting& setting) {
  run_ranks(setting, [](Rank& rank) {
    const LocalBufferHandle source = rank.local(1 << 16);
    fill(source.local, 1 << 16, static_cast<unsigned>(rank.rank()));
    std::uint64_t round = 0;
    for (const int count : {1, 10, 300}) {
      Result r;
      launch(Place::cpu(), 1, 1, 0, deferred, rank.comm(), rank.window(), source, count, ++round,
             &r);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(r.status[i], Status::ok) << i << " count " << count;
      rank.barrier();
      EXPECT_TRUE(holds(rank.window().local, static_cast<std::uint64_t>(count) * 8,
                        static_cast<unsigned>(1 - rank.rank())));
      EXPECT_TRUE(holds(rank.window().local + 65536, static_cast<std::uint64_t>(count) * 8,
                        static_cast<unsigned>(1 - rank.rank())));
      rank.barrier();
    }
  });
}

TEST_P(GdaOperations, DeferredDoorbells) { defer_doorbells(setting(2)); }

TEST_P(GdaOperations, EachLaneOfAWarpPostsItsOwn) {
  constexpr int kLanes = 4;
  const char* const before = std::getenv("MARROW_CPU_LANES");
  setenv("MARROW_CPU_LANES", "4", 1);
  for (const bool device_release : {false, true}) {
    Setting s = setting(2);
    s.device_release = device_release;
    run_ranks(s, [](Rank& rank) {
      constexpr int kRounds = 120;
      const LocalBufferHandle source = rank.local(kRounds * kLanes * 8);
      fill(source.local, kRounds * kLanes * 8, static_cast<unsigned>(rank.rank()));
      Status status[kLanes];
      launch(Place::cpu(), 1, kLanes, 0, each_lane, rank.comm(), rank.window(), source, kRounds,
             status);
      for (const Status each : status) EXPECT_EQ(each, Status::ok) << name(each);
      rank.barrier();
      const Gin<Path::gda> gin(rank.comm(), 0);
      EXPECT_EQ(gin.wait_signal(2, kLanes), Status::ok);
      EXPECT_EQ(gin.wait_signal(1, kRounds / 4 * kLanes), Status::ok);
      EXPECT_EQ(gin.wait_counter(1, (kRounds + 4) / 9 * kLanes), Status::ok);
      EXPECT_TRUE(
          holds(rank.window().local, kRounds * kLanes * 8, static_cast<unsigned>(1 - rank.rank())));
      EXPECT_EQ(rank.words()[rank.window().bytes / 8 - 1], kRounds / 5 * (1u + 2 + 3 + 4));
      rank.barrier();
      EXPECT_TRUE(rank.queues().errors().empty());
    });
  }
  if (before) {
    setenv("MARROW_CPU_LANES", before, 1);
  } else {
    unsetenv("MARROW_CPU_LANES");
  }
}

TEST_P(GdaOperations, DeferredDoorbellsOnTheShortWay) {
  Setting s = setting(2);
  s.device_release = true;
  defer_doorbells(s);
}

constexpr std::uint64_t k16 = 1u << 16;
constexpr std::uint64_t k32 = std::uint64_t{1} << 32;
INSTANTIATE_TEST_SUITE_P(
    Modes, GdaOperations,
    ::testing::Values(QueueKind{"thread_ring_1024_0", Sharing::thread, false, 1024, 0},
                      QueueKind{"thread_ring_32_near16", Sharing::thread, false, 32, k16 - 5},
                      QueueKind{"thread_collapsed_32_near32", Sharing::thread, true, 32, k32 - 9},
                      QueueKind{"block_ring_32_near32", Sharing::block, false, 32, k32 - 21},
                      QueueKind{"block_collapsed_64_near16", Sharing::block, true, 64, k16 - 70},
                      QueueKind{"device_ring_32_near16", Sharing::device, false, 32, k16 - 33},
                      QueueKind{"device_ring_1024_near32", Sharing::device, false, 1024, k32 - 3},
                      QueueKind{"device_collapsed_32_near16", Sharing::device, true, 32, k16 - 1}),
    kind_name);

}  // namespace
}  // namespace marrow
