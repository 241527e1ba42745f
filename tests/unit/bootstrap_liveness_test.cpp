// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Deaths, stops and agreements between processes that are really killed and stopped. What the ranks
// saw comes back through shared memory.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "base/mapping.hpp"
#include "unit/bootstrap_ranks.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test

constexpr int kMaxRanks = 16;

std::int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

/// Seen by rank r, written by it, read by the test.
struct Seen {
  std::atomic<int> phase{0};  // 1: set up
  std::atomic<std::int64_t> failed_at[kMaxRanks];
  std::atomic<int> slow[kMaxRanks];
  std::atomic<int> alive_again[kMaxRanks];
  std::atomic<std::uint32_t> mask[4];  // of agreement 0, 1, ...; bit 31: valid
  std::atomic<int> rounds{0};
};

class Shared {
 public:
  Shared() : mapping_(base::Mapping::anonymous(sizeof(Seen) * kMaxRanks, true)) {
    for (int r = 0; r < kMaxRanks; ++r) new (&(*this)[r]) Seen;
  }
  Seen& operator[](int rank) { return mapping_.as<Seen>()[rank]; }
  bool wait(const std::function<bool()>& done, int ms) {
    auto end = Clock::now() + milliseconds(ms);
    while (!done()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  bool wait_up(int n) {
    return wait(
        [&] {
          for (int r = 0; r < n; ++r) {
            if ((*this)[r].phase < 1) return false;
          }
          return true;
        },
        20000);
  }

 private:
  base::Mapping mapping_;
};

void watch(Bootstrap& bootstrap, Seen& seen) {
  bootstrap.on_change([&seen](int peer, PeerState state, const std::string& sentence) {
    if (state == PeerState::failed) seen.failed_at[peer] = now_ns();
    if (state == PeerState::slow) ++seen.slow[peer];
    if (state == PeerState::alive) ++seen.alive_again[peer];
    if (state != PeerState::alive && sentence.find("Rank") == std::string::npos) ::_exit(70);
  });
}

std::uint32_t bits(const std::vector<bool>& mask) {
  std::uint32_t out = 1u << 31;
  for (std::size_t i = 0; i < mask.size(); ++i) out |= static_cast<std::uint32_t>(mask[i]) << i;
  return out;
}

/// A rank that barriers until somebody dies, then agrees, then goes on with the survivors; `deaths`
/// agreements in all. Returns 0 if every step behaved.
int survivor(const UniqueId& id, int n, int rank, Shared& shared, int deaths,
             const char* peer_timeout = nullptr) {
  Seen& seen = shared[rank];
  Bootstrap bootstrap(id, n, rank, options(20000, peer_timeout));
  watch(bootstrap, seen);
  bootstrap.barrier();
  seen.phase = 1;
  std::vector<bool> before(static_cast<std::size_t>(n));
  for (int death = 0; death < deaths; ++death) {
    try {
      for (;;) {
        bootstrap.allgather(bytes("round"), in(20000));
        ++seen.rounds;
        std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
    } catch (const Error& error) {
      if (error.code() != Code::peer_failed) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        return 1;
      }
    }
    std::vector<bool> mask = bootstrap.agree_failures(in(10000));
    seen.mask[death] = bits(mask);
    if (mask[static_cast<std::size_t>(rank)] || mask != bootstrap.mask()) return 2;
    bool grown = mask != before;
    for (std::size_t i = 0; i < before.size(); ++i) grown = grown && (mask[i] || !before[i]);
    if (!grown) return 3;
    before = mask;
  }
  auto all = bootstrap.allgather(bytes("s" + std::to_string(rank)), in(10000));
  for (int r = 0; r < n; ++r) {
    auto i = static_cast<std::size_t>(r);
    if (text(all[i]) != (before[i] ? "" : "s" + std::to_string(r))) return 4;
  }
  bootstrap.close(in(10000));
  return 0;
}

/// Kills `victims` at once under load; every survivor must notice in time, agree and go on.
void kill_and_check(int n, const std::vector<int>& victims, int limit_ms) {
  Shared shared;
  UniqueId id = UniqueId::create();
  Processes ranks(n, [&](int rank) { return survivor(id, n, rank, shared, 1); });
  take_listener(decode(id).credentials.session);
  ASSERT_TRUE(shared.wait_up(n));
  std::this_thread::sleep_for(milliseconds(30));
  std::int64_t killed_at = now_ns();
  for (int victim : victims) ranks.send(victim, SIGKILL);
  std::uint32_t expected = 1u << 31;
  for (int victim : victims) expected |= 1u << victim;
  for (int r = 0; r < n; ++r) {
    bool victim = std::count(victims.begin(), victims.end(), r) != 0;
    EXPECT_EQ(ranks.wait(r), victim ? -SIGKILL : 0) << "rank " << r;
    if (victim) continue;
    for (int v : victims) {
      std::int64_t took = (shared[r].failed_at[v] - killed_at) / 1'000'000;
      EXPECT_NE(shared[r].failed_at[v], 0) << "rank " << r << " about " << v;
      EXPECT_LT(took, limit_ms) << "rank " << r << " about " << v;
    }
    // Killed at once, they may still be agreed on one after the other.
    EXPECT_EQ(shared[r].mask[0] & expected, shared[r].mask[0]);
    for (int other = 0; other < n; ++other) {
      if (std::count(victims.begin(), victims.end(), other) == 0) {
        EXPECT_EQ(shared[r].mask[0], shared[other].mask[0]);
      }
    }
  }
}

/// Barriers until a peer dies. @return false when they ended in another way
bool work_until_a_death(Bootstrap& bootstrap) {
  try {
    for (;;) bootstrap.barrier(in(10000));
  } catch (const Error& error) {
    return error.code() == Code::peer_failed;
  }
}

TEST(Liveness, AKilledMemberIsNoticedAndTheRestGoesOn) { kill_and_check(4, {2}, 2000); }
TEST(Liveness, AKilledRootIsNoticedAndTheRestGoesOn) { kill_and_check(4, {0}, 2000); }
TEST(Liveness, SixteenRanksLoseTheRoot) { kill_and_check(16, {0}, 2000); }
TEST(Liveness, TheLastRankStandsAlone) { kill_and_check(2, {0}, 2000); }

TEST(Liveness, TheRootAndItsHeirDieTogether) {
  // The survivors may see the two deaths in one or in two agreements.
  for (const std::vector<int>& victims : {std::vector{0, 1}, {0, 3}, {0, 1, 2, 4}}) {
    Shared shared;
    UniqueId id = UniqueId::create();
    const int n = 6;
    std::uint32_t expected = 1u << 31;
    for (int victim : victims) expected |= 1u << victim;
    Processes ranks(n, [&](int rank) {
      Seen& seen = shared[rank];
      Bootstrap bootstrap(id, n, rank, options(20000));
      watch(bootstrap, seen);
      bootstrap.barrier();
      seen.phase = 1;
      for (int step = 0; step < 4; ++step) {
        if (!work_until_a_death(bootstrap)) return 1;
        std::uint32_t mask = bits(bootstrap.agree_failures(in(10000)));
        seen.mask[step] = mask;
        if (mask == expected) {
          bootstrap.barrier(in(10000));
          bootstrap.close(in(10000));
          return 0;
        }
      }
      return 2;
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(n));
    std::int64_t killed_at = now_ns();
    for (int victim : victims) ranks.send(victim, SIGKILL);
    for (int r = 0; r < n; ++r) {
      bool victim = std::count(victims.begin(), victims.end(), r) != 0;
      EXPECT_EQ(ranks.wait(r), victim ? -SIGKILL : 0) << "rank " << r;
      if (victim) continue;
      for (int v : victims) EXPECT_LT(shared[r].failed_at[v] - killed_at, 2'000'000'000) << r << v;
      for (int step = 0; step < 4; ++step) EXPECT_EQ(shared[r].mask[step], shared[5].mask[step]);
    }
  }
}

TEST(Liveness, DeathsAtRandomMomentsNeverSplitTheSurvivors) {
  // Also during agreements, and of the root: whoever lives agrees on the same masks in the same order.
  std::mt19937 random(7);
  for (int trial = 0; trial < 12; ++trial) {
    Shared shared;
    UniqueId id = UniqueId::create();
    const int n = 5;
    Processes ranks(n, [&](int rank) {
      Seen& seen = shared[rank];
      Bootstrap bootstrap(id, n, rank, options(20000));
      bootstrap.barrier();
      seen.phase = 1;
      for (int step = 0; step < 4; ++step) {
        if (!work_until_a_death(bootstrap)) return 1;
        seen.mask[step] = bits(bootstrap.agree_failures(in(10000)));
        seen.rounds = step + 1;
        if (__builtin_popcount(seen.mask[step] & 0x7fffffff) == 3) {
          bootstrap.close(in(10000));
          return 0;
        }
      }
      return 2;
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(n));
    std::vector<int> order = {0, 1, 2, 3, 4};
    std::shuffle(order.begin() + trial % 2, order.end(), random);  // every second one: 0 dies first
    for (int i = 0; i < 3; ++i) {
      ranks.send(order[static_cast<std::size_t>(i)], SIGKILL);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(ranks.wait(order[static_cast<std::size_t>(i)]), i < 3 ? -SIGKILL : 0)
          << "trial " << trial << " rank " << order[static_cast<std::size_t>(i)];
    }
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(shared[order[3]].mask[step], shared[order[4]].mask[step]) << "trial " << trial;
    }
  }
}

TEST(Liveness, ADecisionThatOneSurvivorHasSeenBindsAll) {
  // Rank 4 dies; the root dies when it has told `told` of the others that {4} is agreed.
  for (int told = 1; told <= 3; ++told) {
    Shared shared;
    UniqueId id = UniqueId::create();
    const int n = 5;
    Processes ranks(n, [&](int rank) {
      Options setup = options(20000);
      int count = 0;
      setup.after_decision_sent = [&] {
        if (rank == 0 && ++count == told) ::raise(SIGKILL);
      };
      Bootstrap bootstrap(id, n, rank, setup);
      bootstrap.barrier();
      shared[rank].phase = 1;
      for (int step = 0; step < 2; ++step) {
        if (!work_until_a_death(bootstrap)) return 1;
        shared[rank].mask[step] = bits(bootstrap.agree_failures(in(10000)));
      }
      bootstrap.barrier(in(10000));
      bootstrap.close(in(10000));
      return 0;
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(n));
    ranks.send(4, SIGKILL);
    for (int r = 0; r < n; ++r) EXPECT_EQ(ranks.wait(r), r % 4 == 0 ? -SIGKILL : 0) << r;
    for (int r = 1; r < 4; ++r) {
      EXPECT_EQ(shared[r].mask[0], 1u << 31 | 1u << 4) << "told " << told << " rank " << r;
      EXPECT_EQ(shared[r].mask[1], 1u << 31 | 1u << 4 | 1u) << "told " << told << " rank " << r;
    }
  }
}

TEST(Liveness, AStoppedRankIsSlowAndLosesNothing) {
  for (int victim : {0, 2}) {
    Shared shared;
    UniqueId id = UniqueId::create();
    const int n = 3;
    Processes ranks(n, [&](int rank) {
      Seen& seen = shared[rank];
      Bootstrap bootstrap(id, n, rank, options(20000, "2500ms"));  // slow after 750 ms
      watch(bootstrap, seen);
      bootstrap.barrier();
      seen.phase = 1;
      for (int i = 0; i < 60; ++i) {
        auto all = bootstrap.allgather(bytes(std::to_string(i * 10 + rank)), in(20000));
        for (int r = 0; r < n; ++r) {
          if (text(all[static_cast<std::size_t>(r)]) != std::to_string(i * 10 + r)) return 1;
        }
        ++seen.rounds;
        std::this_thread::sleep_for(milliseconds(10));
      }
      std::this_thread::sleep_for(milliseconds(600));  // two heartbeats: slow peers are alive again
      bootstrap.close(in(10000));
      return 0;
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(n));
    std::this_thread::sleep_for(milliseconds(50));
    ranks.send(victim, SIGSTOP);
    int watcher = victim == 0 ? 1 : 0;
    EXPECT_TRUE(shared.wait([&] { return shared[watcher].slow[victim] > 0; }, 4000));
    ranks.send(victim, SIGCONT);
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
      EXPECT_EQ(shared[r].rounds, 60);
      for (int p = 0; p < n; ++p) EXPECT_EQ(shared[r].failed_at[p], 0) << r << " about " << p;
    }
    EXPECT_GT(shared[watcher].alive_again[victim], 0);
    if (victim == 2) {
      EXPECT_GT(shared[1].slow[2], 0) << "the root tells the others";
    }
  }
}

TEST(Liveness, SilenceBeyondTheTimeoutIsFailureAndTheSleeperWithdraws) {
  for (int victim : {0, 2}) {
    Shared shared;
    UniqueId id = UniqueId::create();
    const int n = 4;
    Processes ranks(n, [&](int rank) {
      if (rank != victim) return survivor(id, n, rank, shared, 1, "1s");
      Seen& seen = shared[rank];
      Bootstrap bootstrap(id, n, rank, options(20000, "1s"));
      bootstrap.barrier();
      seen.phase = 1;
      try {
        for (;;) bootstrap.allgather(bytes("round"), in(20000));
      } catch (const Error& error) {
        if (error.code() != Code::aborted) std::fprintf(stderr, "sleeper: %s\n", error.what());
        return error.code() == Code::aborted ? 0 : 1;
      }
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(n));
    std::int64_t stopped_at = now_ns();
    ranks.send(victim, SIGSTOP);
    for (int r = 0; r < n; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
      EXPECT_GT(shared[r].failed_at[victim] - stopped_at, 900'000'000) << r;
      EXPECT_EQ(shared[r].mask[0], 1u << 31 | 1u << victim);
    }
    ranks.send(victim, SIGCONT);
    EXPECT_EQ(ranks.wait(victim), 0);
  }
}

TEST(Liveness, AKilledRankIsNoticedThoughItsForkedChildLives) {
  for (int victim : {0, 1}) {
    Shared shared;
    UniqueId id = UniqueId::create();
    Processes ranks(3, [&](int rank) {
      Bootstrap bootstrap(id, 3, rank, options(20000));
      watch(bootstrap, shared[rank]);
      bootstrap.barrier();
      if (rank == victim) {
        pid_t worker = ::fork();  // a data loader worker, say: outlives its parent
        if (worker == 0) {
          std::this_thread::sleep_for(milliseconds(15000));
          ::_exit(0);
        }
        shared[rank].rounds = worker;
      }
      shared[rank].phase = 1;
      try {
        for (;;) bootstrap.barrier(in(10000));
      } catch (const Error& error) {
        if (error.code() != Code::peer_failed) return 1;
      }
      bootstrap.agree_failures(in(10000));
      bootstrap.close(in(10000));
      return 0;
    });
    take_listener(decode(id).credentials.session);
    ASSERT_TRUE(shared.wait_up(3));
    std::int64_t killed_at = now_ns();
    ranks.send(victim, SIGKILL);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(ranks.wait(r), r == victim ? -SIGKILL : 0);
      if (r != victim) {
        EXPECT_LT(shared[r].failed_at[victim] - killed_at, 2'000'000'000) << r;
      }
    }
    ASSERT_GT(shared[victim].rounds, 1);  // 0 would be this test's process group
    ::kill(shared[victim].rounds, SIGKILL);
  }
}

TEST(Liveness, AForkedChildMayDestroyItsCopy) {
  UniqueId id = UniqueId::create();
  Bootstrap bootstrap(id, 1, 0, options());
  pid_t child = ::fork();
  if (child == 0) {
    bootstrap.~Bootstrap();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  bootstrap.barrier();
}

TEST(Liveness, AWholeJobMayBeStoppedForLongerThanTheTimeout) {
  Shared shared;
  UniqueId id = UniqueId::create();
  Processes ranks(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options(20000, "1s"));
    watch(bootstrap, shared[rank]);
    bootstrap.barrier();
    shared[rank].phase = 1;
    std::this_thread::sleep_for(milliseconds(2000));
    bootstrap.close();
    return 0;
  });
  take_listener(decode(id).credentials.session);
  ASSERT_TRUE(shared.wait_up(3));
  for (int r = 0; r < 3; ++r) ranks.send(r, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(1500));
  for (int r = 0; r < 3; ++r) ranks.send(r, SIGCONT);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r), 0) << r;
}

}  // namespace
}  // namespace marrow::bootstrap
