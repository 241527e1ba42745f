// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// What the gda path's queues are refused for, that every rank is told, and that the next ones work.
#include <gmock/gmock.h>

#include "gda_support.hpp"

namespace marrow {
namespace {

using namespace gda_test;  // NOLINT: the helpers of this test
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Queues beside the rank's own.
std::unique_ptr<gda::Queues> more_queues(Rank& rank, memory::Arena& arena, int contexts) {
  Requirements needs;
  needs.contexts = contexts;
  needs.counters = 0;
  needs.sharing = Sharing::device;
  return rank.nic().connect(rank.bootstrap(), arena, needs, nullptr);
}

TEST(GdaRefusals, OtherContextsAreAMismatchOnEveryRank) {
  run_ranks(Setting{}, [](Rank& rank) {
    const auto arena = memory::Arena::create(Place::cpu());
    try {
      (void)more_queues(rank, *arena, 1 + rank.rank());
      ADD_FAILURE() << "connected";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("rank " + std::to_string(1 - rank.rank()) + " told"),
                        HasSubstr("rank " + std::to_string(rank.rank()) + " told"),
                        HasSubstr("the same contexts")));
    }
    EXPECT_NE(more_queues(rank, *arena, 2), nullptr);
    rank.barrier();
  });
}

TEST(GdaRefusals, ANicWithoutRoomIsToldToAllAndWhatClosesMakesRoom) {
  Setting setting;
  setting.depth = 32;
  run_ranks(setting, [](Rank& rank) {
    const auto arena = memory::Arena::create(Place::cpu());
    std::vector<std::unique_ptr<gda::Queues>> all;
    std::string said;
    for (int i = 0; i < 1000 && said.empty(); ++i) {
      try {
        all.push_back(more_queues(rank, *arena, 64));
      } catch (const Error& error) {
        said = error.what();
        // The rank that found no room, and the one that is told.
        EXPECT_THAT(said, AnyOf(AllOf(HasSubstr("out_of_memory"), HasSubstr("use fewer contexts")),
                                HasSubstr("rank " + std::to_string(1 - rank.rank()) +
                                          " could not make its queues")));
      }
    }
    EXPECT_NE(said, "");
    rank.barrier();
    ASSERT_FALSE(all.empty());
    all.pop_back();
    rank.barrier();
    EXPECT_NE(more_queues(rank, *arena, 32), nullptr);
    rank.barrier();
  });
}

}  // namespace
}  // namespace marrow
