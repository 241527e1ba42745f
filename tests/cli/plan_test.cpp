// SPDX-License-Identifier: Apache-2.0
// The demo's plan: every token reaches each of its experts exactly once, on the expert's owner.
#include "cli/demo_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace marrow::cli {
namespace {

void check_plan(int ranks, std::uint64_t tokens, std::uint32_t experts, std::uint32_t top_k,
                std::uint32_t wave_tokens) {
  const Routing routing = generate_routing(7, tokens, experts, top_k);
  ASSERT_EQ(routing.tokens(), tokens);
  const Layout layout{ranks, tokens, experts};
  const std::uint32_t cap = wave_tokens * top_k;
  std::multiset<std::pair<std::uint64_t, std::uint32_t>> delivered;
  for (int source = 0; source < ranks; ++source) {
    for (std::uint32_t wave = 0; std::uint64_t{wave} * wave_tokens < layout.local_tokens(0);
         ++wave) {
      const WavePlan plan = plan_wave(routing, layout, source, wave, wave_tokens, cap);
      ASSERT_EQ(plan.slot.size(), std::size_t{plan.tokens} * top_k);
      for (int d = 0; d < ranks; ++d) {
        ASSERT_LE(plan.rows[d].size(), cap);
        for (const PlannedRow& row : plan.rows[d]) {
          EXPECT_EQ(layout.owner(row.expert), d);
          delivered.emplace(row.token, row.expert);
        }
      }
      for (std::size_t entry = 0; entry < plan.slot.size(); ++entry) {
        const PlannedRow& row = plan.rows.at(plan.slot[entry] / cap).at(plan.slot[entry] % cap);
        EXPECT_EQ(row.token, plan.first_token + entry / top_k);
        EXPECT_EQ(row.expert, routing.id[row.token * top_k + entry % top_k]);
      }
    }
  }
  EXPECT_EQ(delivered.size(), tokens * top_k);
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint32_t k = 0; k < top_k; ++k)
      EXPECT_EQ(delivered.count({t, routing.id[t * top_k + k]}), 1u);
  }
}

TEST(DemoPlan, EveryTokenReachesEachExpertOnce) {
  check_plan(4, 203, 64, 8, 16);
  check_plan(3, 100, 64, 8, 7);  // uneven tokens and experts
  check_plan(7, 5, 9, 2, 1);     // fewer tokens than ranks
  check_plan(1, 40, 4, 4, 40);
}

TEST(DemoPlan, OwnersAreBlocksThatDifferByOneAtMost) {
  for (int ranks = 1; ranks <= 7; ++ranks) {
    for (std::uint32_t experts = static_cast<std::uint32_t>(ranks); experts < 40; ++experts) {
      const Layout layout{ranks, 1, experts};
      std::vector<std::uint32_t> count(static_cast<std::size_t>(ranks));
      int before = 0;
      for (std::uint32_t e = 0; e < experts; ++e) {
        const int owner = layout.owner(e);
        ASSERT_GE(owner, before);
        ASSERT_LT(owner, ranks);
        before = owner;
        ++count[static_cast<std::size_t>(owner)];
      }
      for (const std::uint32_t c : count) {
        EXPECT_GE(c, experts / static_cast<std::uint32_t>(ranks));
        EXPECT_LE(c, experts / static_cast<std::uint32_t>(ranks) + 1);
      }
    }
  }
}

TEST(DemoRouting, IsSkewedSeededAndStartsWithIdenticalTokens) {
  const Routing a = generate_routing(1, 2048, 64, 8), b = generate_routing(1, 2048, 64, 8),
                c = generate_routing(2, 2048, 64, 8);
  EXPECT_EQ(a.id, b.id);
  EXPECT_NE(a.id, c.id);
  std::vector<std::uint64_t> load(64);
  for (const std::uint32_t e : a.id) ++load[e];
  EXPECT_GT(*std::max_element(load.begin(), load.end()), 4 * a.id.size() / 64);
  for (std::uint64_t t = 1; t < 2048 / 16; ++t) {
    EXPECT_TRUE(std::equal(a.id.begin(), a.id.begin() + 8,
                           a.id.begin() + static_cast<std::ptrdiff_t>(t) * 8));
  }
}

}  // namespace
}  // namespace marrow::cli
