// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Long runs over a small ring: 10^5 put + signal round trips, and several threads and ranks at once
// over faults that only delay and reorder.
#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;

MARROW_KERNEL ping_pong(DeviceCommunicator comm, WindowHandle window, int rounds,
                        std::uint64_t* bad) {
  const Gin<Path::gda> gin(comm, 0);
  auto* words = reinterpret_cast<std::uint64_t*>(window.local);
  for (int i = 1; i <= rounds; ++i) {
    const auto value = static_cast<std::uint64_t>(i);
    Status s = Status::ok;
    if (comm.rank == 0) {
      words[8] = value;
      s = gin.put(1, window, 0, window, 64, 8, SignalAdd{0, 1});
    }
    s = worse(s, gin.wait_signal(0, value));
    if (comm.rank == 1) {
      if (words[0] != value) ++*bad;
      words[8] = value * 3;
      s = worse(s, gin.put(0, window, 0, window, 64, 8, SignalAdd{0, 1}));
    } else if (words[0] != value * 3) {
      ++*bad;
    }
    if (s != Status::ok) {
      *bad += 1000000;
      return;
    }
  }
}

/// Everyone to everyone, from every thread; each word of the target has one writer.
MARROW_KERNEL exchange(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
                       int rounds, Status* out) {
  const Gin<Path::gda> gin(comm, 0);
  const int threads = block_size();
  Status worst = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    for (int peer = 0; peer < comm.nranks; ++peer) {
      const int slot = (comm.rank * threads + thread_index()) * rounds + i;
      const std::uint64_t at = static_cast<std::uint64_t>(slot) * 8;
      const bool last = i + 1 == rounds;
      worst = worse(worst, last ? gin.put(peer, window, at, source, at, 8, SignalAdd{2, 1})
                                : gin.put(peer, window, at, source, at, 8, Doorbell::deferred));
    }
  }
  // Each thread's last put is signalled strongly, and it covers that thread's earlier ones.
  worst = worse(worst, gin.wait_signal(2, static_cast<std::uint64_t>(comm.nranks * threads)));
  out[thread_index()] = worst;
}

class GdaEndurance : public ::testing::TestWithParam<bool> {};

TEST_P(GdaEndurance, HundredThousandRoundTrips) {
  Setting setting;
  setting.sharing = Sharing::thread;
  setting.depth = 32;
  setting.collapsed = GetParam();
  setting.first_index = (std::uint64_t{1} << 32) - 100;
#if defined(MARROW_SANITIZED)
  const int rounds = 10000;
#else
  const int rounds = 100000;
#endif
  run_ranks(setting, [&](Rank& rank) {
    std::uint64_t bad = 0;
    launch(Place::cpu(), 1, 1, 0, ping_pong, rank.comm(), rank.window(), rounds, &bad);
    EXPECT_EQ(bad, 0u);
    EXPECT_EQ(rank.queue(0, 1 - rank.rank()).reserved_index,
              setting.first_index + 2 * static_cast<std::uint64_t>(rounds));
  });
}

TEST_P(GdaEndurance, AllToAllUnderDelayAndReorder) {
  Setting setting;
  setting.ranks = 3;
  setting.depth = 64;
  setting.collapsed = GetParam();
  setting.first_index = 65536 - 40;
  setting.faults = "seed=7,reorder=1,delay=20";
  constexpr int kThreads = 4;
  constexpr int kRounds = 60;
  run_ranks(setting, [&](Rank& rank) {
    const LocalBufferHandle source = rank.local(1 << 16);
    auto* words = reinterpret_cast<std::uint64_t*>(source.local);
    for (std::uint64_t i = 0; i < (1 << 13); ++i)
      words[i] = i * 1000 + static_cast<std::uint64_t>(rank.rank());
    std::vector<Status> out(kThreads, Status::invalid);
    launch(Place::cpu(), 1, kThreads, 0, exchange, rank.comm(), rank.window(), source, kRounds,
           out.data());
    for (const Status s : out) EXPECT_EQ(s, Status::ok) << name(s);
    for (int from = 0; from < 3; ++from) {
      for (int i = 0; i < kThreads * kRounds; ++i) {
        const auto slot = static_cast<std::uint64_t>(from * kThreads * kRounds + i);
        ASSERT_EQ(rank.words()[slot], slot * 1000 + static_cast<std::uint64_t>(from)) << slot;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Queues, GdaEndurance, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "collapsed" : "ring"; });

}  // namespace
}  // namespace marrow
