// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Who shares a gda queue: a whole warp whose entries do not fit the ring at once, lanes of which one is
// refused, threads in line behind one that never comes or waits for long, and which puts take the short way.
#include <atomic>
#include <cstdlib>

namespace {
std::atomic<int> g_short_way{0};
}  // namespace
#define MARROW_ON_SHORT_WAY() g_short_way.fetch_add(1, std::memory_order_relaxed)
#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;

constexpr int kWarp = 32;
constexpr std::uint64_t kMilli = 1'000'000;

class Lanes {
 public:
  explicit Lanes(int n) {
    if (const char* const before = std::getenv("MARROW_CPU_LANES")) before_ = before;
    ::setenv("MARROW_CPU_LANES", std::to_string(n).c_str(), 1);  // read by launch
  }
  ~Lanes() {
    if (before_.empty()) {
      ::unsetenv("MARROW_CPU_LANES");
    } else {
      ::setenv("MARROW_CPU_LANES", before_.c_str(), 1);
    }
  }

 private:
  std::string before_;
};

// --- kernels --------------------------------------------------------------------------------------

struct LaneResult {
  Status good = Status::invalid;
  Status refused[5] = {};
  Status after = Status::invalid;
};

/// Lane l puts l % 17 bytes and l % 5 bytes a round, so some of them nothing.
MARROW_KERNEL whole_warp(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                         int rounds, LaneResult* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const auto lane = static_cast<std::uint64_t>(lane_index());
  LaneResult& mine = out[lane];
  mine.good = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    const std::uint64_t at = (static_cast<std::uint64_t>(i) * kWarp + lane) * 32;
    mine.good = worse(
        mine.good, gin.put(peer, window, at, source, at, lane % 17, EachLane{}, SignalAdd{1, 1}));
    mine.good =
        worse(mine.good, gin.put(peer, window, at + 20, source, at + 20, lane % 5, EachLane{}));
    mine.good = worse(mine.good, gin.put(peer, window, at + 28, source, at + 28, 1, EachLane{}));
  }
  // One lane asks for what cannot be: nobody posts, and all say so.
  constexpr std::uint64_t kLong = std::uint64_t{3} << 30;
  const std::uint64_t bytes = lane == 7 ? kLong : 8;
  mine.refused[0] = gin.put(peer, window, 0, source, 0, bytes, EachLane{}, SignalAdd{1, 1});
  mine.refused[1] = gin.put(peer, window, 0, source, 0, bytes, EachLane{});
  mine.refused[2] = gin.get(peer, window, 0, source, 0, bytes, EachLane{});
  LocalBufferHandle foreign = source;
  if (lane == 5) foreign.abi = 0;
  mine.refused[3] = gin.put(peer, window, 0, foreign, 0, 8, EachLane{});
  mine.refused[4] =
      gin.put(peer, window, 0, source, 0, 8, EachLane{}, SignalAdd{lane == 9 ? 1000 : 1, 1});
  mine.after = gin.signal(peer, SignalAdd{2, 1}, EachLane{});
  mine.after = worse(mine.after, gin.flush(Warp{}));
}

MARROW_KERNEL ten_puts(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                       Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status worst = Status::ok;
  for (std::uint64_t i = 0; i < 5; ++i) {
    worst = worse(worst, gin.put(peer, window, i * 8, source, i * 8, 8));
    worst = worse(worst, gin.put(peer, window, i * 8, source, i * 8, 8, SignalAdd{0, 1}));
  }
  *out = worse(worst, gin.flush());
}

MARROW_KERNEL four_ways(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                        Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status* const mine = out + static_cast<std::ptrdiff_t>(thread_index()) * 4;
  mine[0] = gin.put(peer, window, 0, source, 0, 8);
  mine[1] = gin.put_value(peer, window, 0, std::uint64_t{1});
  mine[2] = gin.put(peer, window, 0, source, 0, 8, CounterInc{1});
  mine[3] = gin.put(peer, window, 0, source, 0, 8, EachLane{});
}

/// Thread 0 may wait long for room in the queue; thread 1 stands behind it in the companion's line.
MARROW_KERNEL two_counted(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                          GdaQueue* companion, std::uint64_t behind, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  if (thread_index() == 0) {
    out[0] = gin.put(peer, window, 0, source, 0, 8, CounterInc{1}, Deadline{5000 * kMilli});
  } else {
    while (load_relaxed<Scope::device>(&companion->reserved_index) < behind) relax(100);
    out[1] = gin.put(peer, window, 8, source, 8, 8, CounterInc{1});
  }
}
MARROW_KERNEL one_counted(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                          Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  out[0] = gin.put((comm.rank + 1) % comm.nranks, window, 16, source, 16, 8, CounterInc{1});
  out[1] = gin.wait_counter(1, 2, Deadline{5000 * kMilli});
}

/// Puts until told otherwise, for 10 s at most.
MARROW_KERNEL put_on_and_on(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                            Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const std::uint64_t start = now_ns();
  *out = Status::ok;
  while (*out == Status::ok && now_ns() - start < 10'000 * kMilli)
    *out = gin.put(peer, window, 0, source, 0, 8);
}

// --- tests ----------------------------------------------------------------------------------------

constexpr Sharing kSharings[] = {Sharing::thread, Sharing::block, Sharing::device};

TEST(GdaSharing, AWholeWarpOnASmallRing) {
  const Lanes lanes(kWarp);
  constexpr int kRounds = 3;
  for (const Sharing sharing : kSharings) {
    for (const int depth : {32, 64}) {
      Setting s;
      s.sharing = sharing;
      s.depth = depth;
      s.device_release = true;
      run_ranks(s, [&](Rank& rank) {
        constexpr std::uint64_t kBytes = std::uint64_t{kRounds} * kWarp * 32;
        const LocalBufferHandle source = rank.local(kBytes);
        for (std::uint64_t i = 0; i < kBytes; ++i)
          source.local[i] = static_cast<std::byte>(1 + i % 251);
        std::vector<LaneResult> out(kWarp);
        launch(Place::cpu(), 1, kWarp, 0, whole_warp, rank.comm(), rank.window(), source, kRounds,
               out.data());
        for (const LaneResult& each : out) {
          EXPECT_EQ(each.good, Status::ok) << name(each.good);
          for (int i = 0; i < 5; ++i)
            EXPECT_EQ(each.refused[i], Status::invalid) << i << " " << name(each.refused[i]);
          EXPECT_EQ(each.after, Status::ok) << name(each.after);
        }
        rank.barrier();
        const Gin<Path::gda> gin(rank.comm(), 0);
        EXPECT_EQ(gin.wait_signal(2, kWarp), Status::ok);
        EXPECT_EQ(rank.signals()[1], std::uint64_t{kRounds} * kWarp);
        int wrong = 0;
        for (std::uint64_t i = 0; i < kBytes; ++i) {
          const std::uint64_t lane = i / 32 % kWarp;
          const std::uint64_t at = i % 32;
          const bool there = at < lane % 17 || (at >= 20 && at < 20 + lane % 5) || at == 28;
          wrong += rank.window().local[i] != (there ? source.local[i] : std::byte{0});
        }
        EXPECT_EQ(wrong, 0);
        EXPECT_TRUE(rank.queues().errors().empty());
      });
    }
  }
}

TEST(GdaSharing, WhichPutsTakeTheShortWay) {
  for (const Sharing sharing : kSharings) {
    for (const bool device_release : {false, true}) {
      for (const int lanes : {1, 4}) {
        const Lanes width(lanes);
        Setting s;
        s.sharing = sharing;
        s.device_release = device_release;
        g_short_way = 0;
        run_ranks(s, [&](Rank& rank) {
          const LocalBufferHandle source = rank.local(4096);
          Status status = Status::invalid;
          launch(Place::cpu(), 1, 1, 0, ten_puts, rank.comm(), rank.window(), source, &status);
          EXPECT_EQ(status, Status::ok);
        });
        // A queue of one thread that another processor reads takes the long way; checks do too.
        const bool is_short = !detail::kChecked && (sharing != Sharing::thread || device_release);
        EXPECT_EQ(g_short_way.load(), is_short ? 2 * 10 : 0)
            << static_cast<int>(sharing) << device_release << lanes;
      }
    }
  }
}

TEST(GdaSharing, ALineThatNeverMovesIsATimeout) {
  for (const Sharing sharing : {Sharing::block, Sharing::device}) {
    for (const int threads : {1, 4}) {
      const Lanes width(threads);
      Setting s;
      s.sharing = sharing;
      s.wait_ns = 20 * kMilli;
      run_ranks(s, [&](Rank& rank) {
        const LocalBufferHandle source = rank.local(4096);
        rank.queue(0, 1 - rank.rank()).reserved_index += 1;  // taken by a thread that has died
        std::vector<Status> out(static_cast<std::size_t>(threads) * 4, Status::ok);
        launch(Place::cpu(), 1, threads, 0, four_ways, rank.comm(), rank.window(), source,
               out.data());
        for (std::size_t i = 0; i < out.size(); ++i)
          EXPECT_EQ(out[i], Status::timeout) << "way " << i % 4 << " " << name(out[i]);
      });
    }
  }
}

TEST(GdaSharing, ACountedPutDoesNotHoldUpTheLine) {
  Setting s;
  s.wait_ns = 100 * kMilli;
  run_ranks(s, [&](Rank& rank) {
    const LocalBufferHandle source = rank.local(4096);
    GdaQueue& q = rank.queue(0, 1 - rank.rank());
    GdaQueue* const companion = &q + rank.comm().gda->companion;
    const std::uint64_t before = q.reserved_index;
    std::atomic_ref<std::uint64_t> reserved(q.reserved_index);
    reserved = before + q.mask + 1;  // full
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1000));
      reserved = before;
    });
    Status out[2] = {Status::invalid, Status::invalid};
    launch(Place::cpu(), 1, 2, 0, two_counted, rank.comm(), rank.window(), source, companion,
           companion->reserved_index + 2, out);
    opener.join();
    EXPECT_EQ(out[0], Status::ok) << name(out[0]);
    EXPECT_LE(out[1], Status::timeout) << name(out[1]);  // ok if this machine was slow to start it
    launch(Place::cpu(), 1, 1, 0, one_counted, rank.comm(), rank.window(), source, out);
    EXPECT_EQ(out[0], Status::ok) << name(out[0]);
    EXPECT_EQ(out[1], Status::ok) << "the companion is dead: " << name(out[1]);
  });
}

TEST(GdaSharing, AMaskedPeerStopsThePutsOfARunningKernel) {
  for (const Sharing sharing : kSharings) {
    Setting s;
    s.sharing = sharing;
    s.device_release = true;
    run_ranks(s, [&](Rank& rank) {
      const LocalBufferHandle source = rank.local(4096);
      std::thread host([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        auto& path = const_cast<std::uint8_t&>(rank.comm().path[1 - rank.rank()]);
        std::atomic_ref<std::uint8_t>{path} = kPathFailed;
      });
      Status status = Status::invalid;
      launch(Place::cpu(), 1, 1, 0, put_on_and_on, rank.comm(), rank.window(), source, &status);
      host.join();
      EXPECT_EQ(status, Status::peer_failed) << name(status);
    });
  }
}

}  // namespace
}  // namespace marrow
