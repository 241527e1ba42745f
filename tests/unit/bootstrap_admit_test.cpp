// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan-all
// Replacements at the level of the bootstrap, ranks as threads: a rank that is destroyed without close()
// has failed, and a new object takes its place.
#include <gmock/gmock.h>

#include <atomic>
#include <future>

#include "unit/bootstrap_ranks.hpp"

namespace marrow::bootstrap {
namespace {

using namespace testing;  // NOLINT: the helpers of this test
using ::testing::HasSubstr;

Options replacement(int setup_ms = 10000) {
  Options out = options(setup_ms);
  out.replacement = true;
  return out;
}

void expect_all_there(Bootstrap& bootstrap, const std::string& round) {
  const auto all = bootstrap.allgather(bytes(round + std::to_string(bootstrap.rank())));
  for (int r = 0; r < bootstrap.nranks(); ++r) {
    if (bootstrap.mask()[static_cast<std::size_t>(r)]) continue;
    EXPECT_EQ(text(all[static_cast<std::size_t>(r)]), round + std::to_string(r));
  }
}

/// Waits until `rank` counts as failed.
void see_failure(Bootstrap& bootstrap, int rank) {
  const auto end = Clock::now() + milliseconds(10000);
  while (bootstrap.state(rank) != PeerState::failed && Clock::now() < end)
    std::this_thread::sleep_for(milliseconds(1));
}

TEST(Admit, EachRankInTurnIsReplacedAndAllCollectivesWork) {
  constexpr int kRanks = 4;
  const UniqueId id = UniqueId::create();
  std::atomic<int> died{-1};
  std::vector<std::thread> second;
  std::vector<Outcome> seconds(kRanks);
  // Whoever is there in round k: rank k dies, is replaced, and so on.
  const auto rounds = [&](std::unique_ptr<Bootstrap> bootstrap, int begin) {
    const int rank = bootstrap->rank();
    for (int dying = begin; dying < kRanks; ++dying) {
      expect_all_there(*bootstrap, "before ");
      if (rank == dying) {
        bootstrap.reset();
        died = dying;
        return;
      }
      see_failure(*bootstrap, dying);
      std::vector<bool> want(kRanks);
      want[static_cast<std::size_t>(dying)] = true;
      EXPECT_EQ(bootstrap->agree_failures(in(10000)), want);
      bootstrap->admit(dying, in(10000));
      EXPECT_EQ(bootstrap->state(dying), PeerState::alive);
      EXPECT_EQ(bootstrap->mask(), std::vector<bool>(kRanks));
      expect_all_there(*bootstrap, "after ");
      EXPECT_EQ(text(bootstrap->broadcast(dying, bytes("from " + std::to_string(rank)))),
                "from " + std::to_string(dying));
    }
    bootstrap->close();
  };
  std::thread replacing([&] {
    for (int dying = 0; dying < kRanks; ++dying) {
      while (died < dying) std::this_thread::sleep_for(milliseconds(1));
      second.emplace_back([&, dying] {
        try {
          auto bootstrap = std::make_unique<Bootstrap>(id, kRanks, dying, replacement());
          expect_all_there(*bootstrap, "after ");
          EXPECT_EQ(text(bootstrap->broadcast(dying, bytes("from " + std::to_string(dying)))),
                    "from " + std::to_string(dying));
          rounds(std::move(bootstrap), dying + 1);
        } catch (const Error& error) {
          seconds[static_cast<std::size_t>(dying)].error = error;
        }
      });
    }
  });
  const auto outcomes = on_threads(kRanks, [&](int rank) {
    rounds(std::make_unique<Bootstrap>(id, kRanks, rank, options()), 0);
  });
  replacing.join();
  for (std::thread& thread : second) thread.join();
  expect_all_ok(outcomes);
  expect_all_ok(seconds);
}

TEST(Admit, DifferentNamesAreAMismatchOnEveryRank) {
  const UniqueId id = UniqueId::create();
  const auto outcomes = on_threads(4, [&](int rank) {
    auto bootstrap = std::make_unique<Bootstrap>(id, 4, rank, options());
    bootstrap->barrier();
    if (rank >= 2) return;
    for (const int dead : {2, 3}) see_failure(*bootstrap, dead);
    (void)bootstrap->agree_failures(in(10000));
    try {
      bootstrap->admit(2 + rank, in(10000));
      ADD_FAILURE() << "admitted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_THAT(error.what(), HasSubstr("Rank 0 admits rank 2, rank 1 admits rank 3"));
    }
    // Nothing has changed.
    expect_all_there(*bootstrap, "still ");
    bootstrap->close();
  });
  expect_all_ok(outcomes);
}

TEST(Admit, DeadlinesNameWhoDidNotCallAndCallingAgainContinues) {
  const UniqueId id = UniqueId::create();
  std::promise<void> come;
  std::shared_future<void> may_come = come.get_future().share();
  std::vector<std::future<std::string>> joined;
  joined.push_back(std::async(std::launch::async, [&] {
    may_come.wait();
    Bootstrap bootstrap(id, 3, 2, replacement());
    expect_all_there(bootstrap, "whole ");
    bootstrap.close();
    return std::string("ok");
  }));
  const auto outcomes = on_threads(3, [&](int rank) {
    auto bootstrap = std::make_unique<Bootstrap>(id, 3, rank, options());
    bootstrap->barrier();
    if (rank == 2) return;
    see_failure(*bootstrap, 2);
    (void)bootstrap->agree_failures(in(10000));
    if (rank == 1) {
      try {
        bootstrap->admit(2, in(100));
        ADD_FAILURE() << "admitted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_THAT(error.what(), HasSubstr("rank 0 did not call it"));
      }
    }
    bootstrap->barrier();
    try {
      bootstrap->admit(2, in(100));
      ADD_FAILURE() << "admitted";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("no process came"));
    }
    bootstrap->barrier();
    if (rank == 0) come.set_value();
    bootstrap->admit(2, in(10000));
    expect_all_there(*bootstrap, "whole ");
    bootstrap->close();
  });
  expect_all_ok(outcomes);
  EXPECT_EQ(joined[0].get(), "ok");
}

TEST(Admit, OnlyMaskedRanksCanBeReplaced) {
  const UniqueId id = UniqueId::create();
  const auto outcomes = on_threads(2, [&](int rank) {
    Bootstrap bootstrap(id, 2, rank, options());
    for (const int whom : {0, 1}) {
      try {
        bootstrap.admit(whom, in(1000));
        ADD_FAILURE() << "admitted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), HasSubstr("has not failed"));
      }
    }
    EXPECT_THROW(bootstrap.admit(2, in(1000)), Error);
    if (rank == 0) {
      // Another process that says it is rank 1: told so, and the job works on.
      try {
        const Bootstrap other(id, 2, 1, replacement());
        ADD_FAILURE() << "joined";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::mismatch);
        EXPECT_THAT(error.what(), HasSubstr("is alive"));
      }
    }
    bootstrap.barrier();
    bootstrap.close();
  });
  expect_all_ok(outcomes);
}

}  // namespace
}  // namespace marrow::bootstrap
