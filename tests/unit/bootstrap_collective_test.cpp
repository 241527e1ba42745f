// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan-all
// What works when nothing goes wrong, and what misuse is told.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "base/unix_fds.hpp"
#include "unit/bootstrap_ranks.hpp"
#include "unit/silent_strangers.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test
using ::testing::HasSubstr;

TEST(UniqueId, SurvivesBroadcastAndRefusesDamage) {
  UniqueId id = UniqueId::create();
  EXPECT_EQ(UniqueId::from_bytes(id.bytes()), id);
  EXPECT_NE(UniqueId::create(), id);
  std::vector<std::byte> copy(id.bytes().begin(), id.bytes().end());
  copy[20] ^= std::byte{1};
  EXPECT_THROW(UniqueId::from_bytes(copy), Error);
  copy.pop_back();
  EXPECT_THROW(UniqueId::from_bytes(copy), Error);
  EXPECT_THROW(UniqueId::from_bytes(UniqueId().bytes()), Error);
  copy.assign(id.bytes().begin(), id.bytes().end());
  copy[4] = std::byte{9};
  try {
    UniqueId::from_bytes(copy);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::version);
    EXPECT_THAT(error.what(), HasSubstr("version 9"));
  }
}

class Collectives : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Values(1, 2, 3, 7, 16));

TEST_P(Collectives, AllgatherBroadcastBarrierAndDescriptors) {
  const int n = GetParam();
  UniqueId id = UniqueId::create();
  expect_all_ok(on_threads(n, [&](int rank) {
    Bootstrap bootstrap(id, n, rank, options());
    EXPECT_EQ(bootstrap.rank(), rank);
    EXPECT_EQ(bootstrap.nranks(), n);
    for (int round = 0; round < 3; ++round) {
      std::string mine(static_cast<std::size_t>(rank * 1000 * round),
                       static_cast<char>('a' + rank));
      auto all = bootstrap.allgather(bytes(mine));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(n));
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(
            text(all[static_cast<std::size_t>(r)]),
            std::string(static_cast<std::size_t>(r * 1000 * round), static_cast<char>('a' + r)));
      }
      bootstrap.barrier();
      int from = round % n;
      EXPECT_EQ(text(bootstrap.broadcast(from, bytes("from " + std::to_string(rank)))),
                "from " + std::to_string(from));
    }
    base::Fd memory = base::memfd("bootstrap-test", 4096);
    base::Mapping own = base::Mapping::of_fd(memory.get(), 4096);
    *own.as<int>() = 100 + rank;
    std::array<int, 2> fds = {memory.get(), memory.get()};
    auto received = bootstrap.exchange_fds(fds);
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(bootstrap.same_process(r));
      EXPECT_TRUE(bootstrap.same_host(r));
      EXPECT_EQ(bootstrap.pid(r), ::getpid());
      auto& of_peer = received[static_cast<std::size_t>(r)];
      ASSERT_EQ(of_peer.size(), 2u);
      EXPECT_EQ(*base::Mapping::of_fd(of_peer[1].get(), 4096).as<int>(), 100 + r);
    }
    for (int r = 0; r < n; ++r) EXPECT_EQ(bootstrap.state(r), PeerState::alive);
    bootstrap.close();
    bootstrap.close();
    for (int r = 0; r < n; ++r) EXPECT_EQ(bootstrap.state(r), PeerState::alive);
    EXPECT_THROW(bootstrap.barrier(), Error);
  }));
}

TEST(Bootstrap, LargePayloadsPass) {
  UniqueId id = UniqueId::create();
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    std::vector<std::byte> mine(3'000'000 + static_cast<std::size_t>(rank), std::byte(rank));
    auto all = bootstrap.allgather(mine);
    for (std::size_t r = 0; r < 3; ++r) {
      ASSERT_EQ(all[r].size(), 3'000'000 + r);
      EXPECT_EQ(all[r].back(), std::byte(r));
    }
    bootstrap.close();
  }));
}

TEST(Bootstrap, ProcessesPassDescriptorsToo) {
  UniqueId id = UniqueId::create();
  Processes ranks(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    base::Fd memory = base::memfd("bootstrap-test", 4096);
    int fd = memory.get();
    auto received = bootstrap.exchange_fds(std::span(&fd, rank == 1 ? 0 : 1));
    if (received[1].size() != 0 || received[2].size() != 1) return 1;
    *base::Mapping::of_fd(received[static_cast<std::size_t>(rank == 0 ? 2 : 0)][0].get(), 4096)
         .as<int>(sizeof(int) * static_cast<std::size_t>(rank)) = 7;
    bootstrap.barrier();
    base::Mapping own = base::Mapping::of_fd(fd, 4096);
    if (rank == 0 && (*own.as<int>(4) != 7 || *own.as<int>(8) != 7)) return 2;
    if (rank == 2 && *own.as<int>(0) != 7) return 3;
    if (bootstrap.same_process((rank + 1) % 3) || !bootstrap.same_host((rank + 1) % 3)) return 4;
    bootstrap.close();
    return 0;
  });
  take_listener(decode(id).credentials.session);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r), 0);
}

TEST(Bootstrap, DifferentCollectivesAreNamedOnEveryRank) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(4, [&](int rank) {
    Bootstrap bootstrap(id, 4, rank, options());
    bootstrap.barrier();
    if (rank == 2) {
      bootstrap.allgather({});
    } else {
      bootstrap.broadcast(1, {});
    }
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::mismatch);
    EXPECT_THAT(outcome.what(), HasSubstr("allgather"));
    EXPECT_THAT(outcome.what(), HasSubstr("broadcast from rank 1"));
    EXPECT_THAT(outcome.what(), HasSubstr("Ranks call different collectives"));
  }
}

TEST(Bootstrap, ACallThatNobodyJoinsTimesOutAndNamesThem) {
  UniqueId id = UniqueId::create();
  std::vector<Outcome> late(4);
  expect_all_ok(on_threads(4, [&](int rank) {
    Bootstrap bootstrap(id, 4, rank, options());
    if (rank == 0 || rank == 3) {
      try {
        bootstrap.barrier(in(100));
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_THAT(error.what(), HasSubstr("ranks 1, 2 did not call it"));
      }
    } else {
      std::this_thread::sleep_for(milliseconds(400));
      bootstrap.barrier();
    }
    bootstrap.close();
  }));
}

TEST(Bootstrap, RevokeReachesAllAndCloseStillWorks) {
  UniqueId id = UniqueId::create();
  std::atomic<int> told = 0;
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    bootstrap.on_revoke([&](int by, const std::string& sentence) {
      EXPECT_EQ(by, 1);
      EXPECT_EQ(sentence, "the user pressed stop");
      ++told;
    });
    bootstrap.barrier();
    if (rank == 1) bootstrap.revoke("the user pressed stop");
    try {
      for (;;) bootstrap.barrier();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::aborted);
      EXPECT_THAT(error.what(), HasSubstr("Rank 1 revoked: the user pressed stop"));
    }
    EXPECT_EQ(bootstrap.revoked(), "the user pressed stop");
    bootstrap.close();
  }));
  EXPECT_EQ(told, 3);
}

TEST(Bootstrap, ARankThatLeavesWithoutCloseIsAFailureAndTheRestAgrees) {
  for (int leaver : {0, 2, 3}) {
    UniqueId id = UniqueId::create();
    std::vector<bool> expected(5);
    expected[static_cast<std::size_t>(leaver)] = true;
    expect_all_ok(on_threads(5, [&](int rank) {
      Bootstrap bootstrap(id, 5, rank, options());
      std::atomic<int> failed = -1;
      bootstrap.on_change([&](int peer, PeerState state, const std::string&) {
        if (state == PeerState::failed) failed = peer;
      });
      bootstrap.barrier();
      if (rank == leaver) return;
      try {
        for (;;) bootstrap.allgather(bytes("x"));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::peer_failed);
        EXPECT_THAT(error.what(), HasSubstr("Rank " + std::to_string(leaver)));
        EXPECT_THAT(error.what(), HasSubstr("left without close()"));
      }
      EXPECT_EQ(bootstrap.agree_failures(), expected);
      auto all = bootstrap.allgather(bytes("y"));
      EXPECT_EQ(text(all[1]), "y");
      EXPECT_EQ(text(all[static_cast<std::size_t>(leaver)]), "");
      EXPECT_THROW(bootstrap.broadcast(leaver, {}), Error);
      int fd = STDIN_FILENO;
      auto received = bootstrap.exchange_fds(std::span(&fd, 1));
      EXPECT_EQ(received[static_cast<std::size_t>(leaver)].size(), 0u);
      EXPECT_EQ(received[4].size(), 1u);
      bootstrap.close();
      EXPECT_EQ(failed, leaver);
    }));
  }
}

TEST(Bootstrap, AgreementWaitsForAllAndNamesWhoDoesNotCall) {
  UniqueId id = UniqueId::create();
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(400));
    } else {
      try {
        bootstrap.agree_failures(in(50));
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_THAT(error.what(), HasSubstr("rank 2 did not call it"));
      }
    }
    EXPECT_EQ(bootstrap.agree_failures(), std::vector<bool>(3));
    bootstrap.barrier();
    bootstrap.close();
  }));
}

TEST(Bootstrap, AStrangerWhoConnectsAndClosesIsNoPeerThatFailed) {
  std::atomic<bool> over{false};
  std::atomic<int> visits{0};
  std::thread stranger([&] {
    while (!over) {
      for (const std::string& name : test::own_unix_sockets("marrow-fds-")) {
        try {
          base::unix_connect(name, base::Deadline::after(milliseconds(5)));
          ++visits;
        } catch (const Error&) {
        }
      }
    }
  });
  UniqueId id = UniqueId::create();
  expect_all_ok(on_threads(2, [&](int rank) {
    Bootstrap bootstrap(id, 2, rank, options());
    int fd = STDIN_FILENO;
    for (int i = 0; i < 200; ++i) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(i % 3));
      EXPECT_EQ(bootstrap.exchange_fds(std::span(&fd, 1)).size(), 2u);
    }
    bootstrap.close();
  }));
  over = true;
  stranger.join();
  EXPECT_GT(visits, 0);
}

TEST(Bootstrap, StrangersWhoSayNothingHoldNobodyUp) {
  UniqueId id = UniqueId::create();
  std::vector<base::Fd> strangers;
  expect_all_ok(on_threads(3, [&](int rank) {
    Bootstrap bootstrap(id, 3, rank, options());
    // Ranks 0 and 1 listen already and wait for rank 2's name: the strangers are first.
    if (rank == 2) {
      std::vector<std::string> names;
      for (int i = 0; i < 2000 && names.size() < 2; ++i) {
        std::this_thread::sleep_for(milliseconds(1));
        names = test::own_unix_sockets("marrow-fds-");
      }
      EXPECT_EQ(names.size(), 2u);
      for (const std::string& name : names)
        for (base::Fd& one : test::silent_strangers(name)) strangers.push_back(std::move(one));
    }
    const int fd = STDIN_FILENO;
    const auto start = Clock::now();
    const auto received = bootstrap.exchange_fds(std::span(&fd, 1));
    if (rank == 2) {
      EXPECT_LT(Clock::now() - start, milliseconds(1000));
    }
    for (const auto& of_one : received) EXPECT_EQ(of_one.size(), 1u);
    bootstrap.barrier();
    bootstrap.close();
  }));
  EXPECT_FALSE(strangers.empty());
}

TEST(Bootstrap, WhoSendsNoDescriptorsInTimeIsNamed) {
  UniqueId id = UniqueId::create();
  auto outcomes = on_threads(2, [&](int rank) {
    Bootstrap bootstrap(id, 2, rank, options());
    if (rank == 1) {
      // As exchange_fds begins, but nobody of this name ever connects.
      bootstrap.allgather(bytes(std::string(16, 't') + std::string(8, '\0')));
      bootstrap.barrier();
      return;
    }
    const int fd = STDIN_FILENO;
    const auto start = Clock::now();
    try {
      bootstrap.exchange_fds(std::span(&fd, 1), in(300));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::timeout);
      EXPECT_THAT(error.what(), HasSubstr("Rank 1 of this host did not send"));
    }
    EXPECT_LT(Clock::now() - start, milliseconds(2000));
    bootstrap.barrier();
  });
  EXPECT_EQ(outcomes[0].what() + outcomes[1].what(), "");
}

TEST(Bootstrap, FiftyCyclesLeakNothing) {
  auto mappings = [] {
    std::ifstream file("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
  };
  auto cycle = [] {
    UniqueId id = UniqueId::create();
    expect_all_ok(on_threads(3, [&](int rank) {
      Bootstrap bootstrap(id, 3, rank, options());
      int fd = STDIN_FILENO;
      bootstrap.exchange_fds(std::span(&fd, 1));
      bootstrap.close();
    }));
  };
  for (int i = 0; i < 5; ++i) cycle();  // thread stacks and arenas that the C library keeps
  int descriptors = entries("/proc/self/fd");
  int threads = entries("/proc/self/task");
  auto maps = mappings();
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  EXPECT_LE(mappings(), maps + 8);
}

TEST(Bootstrap, ArgumentsAreChecked) {
  UniqueId id = UniqueId::create();
  EXPECT_THROW(Bootstrap(id, 0, 0), Error);
  EXPECT_THROW(Bootstrap(UniqueId(), 1, 0), Error);
  Bootstrap one(id, 1, 0, options());
  EXPECT_THROW(one.state(1), Error);
  EXPECT_THROW(one.broadcast(-1, {}), Error);
  EXPECT_EQ(one.agree_failures(), std::vector<bool>{false});
  one.barrier();
}

}  // namespace
}  // namespace marrow::bootstrap
