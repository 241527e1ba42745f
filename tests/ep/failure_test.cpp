// SPDX-License-Identifier: Apache-2.0
// A rank is killed or stopped at each point of dispatch and combine: the survivors are told in time, agree on
// who it was, work on with its part zero, and take a new process in; every output is compared throughout.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "ep/site.hpp"
#include "multiprocess/ranks.hpp"

namespace marrow::ep_test {
namespace {

using test::Milliseconds;
using test::RankContext;
using test::Ranks;

constexpr int kRanks = 3;
constexpr int kVictim = 2;

/// argument: "path step", step as in Scenario::before.
std::string path_of(const RankContext& self) {
  return self.argument.substr(0, self.argument.find(' '));
}
int step_of(const RankContext& self) { return self.argument.back() - '0'; }

Config config_of(const RankContext& self, Site& site) {
  RankContext plain = self;
  plain.argument = path_of(self);
  Config config = plain.config();
  config.place = site.place();
  return config;
}

Scenario scenario_of(Site& site) {
  Scenario s;
  s.stream = site.stream();
  s.config.max_sms = sms_of_a_rank();
  s.config.experts.assign(kRanks, 3);
  s.config.max_tokens = 5;
  s.config.hidden = 144;
  s.config.top_k = 4;
  s.config.batches_in_flight = 2;
  s.config.deadline = std::chrono::milliseconds(3000);
  s.split = true;
  s.registered = true;
  s.tokens = {5, 3, 0, 4};
  s.absent = 0.05;
  return s;
}

/// Batches with everybody there; afterwards all close.
std::string finish(Communicator& comm, Site& site) {
  Scenario s = scenario_of(site);
  Checker checker(comm, s, site.memory());
  const std::string wrong = checker.run(20, 26);
  if (!wrong.empty()) return "after the replacement: " + wrong;
  checker.close();
  comm.check();
  comm.close();
  return "ok";
}

MARROW_ROLE(ep_rank) {
  const UniqueId id = self.id();
  const auto site = make_site(self.rank);
  Communicator comm(id, self.nranks, self.rank, config_of(self, *site));
  {
    Memory& memory = site->memory();
    Scenario s = scenario_of(*site);
    if (self.rank == kVictim) {
      s.before = [&](int batch, int which) {
        if (batch < 4 || which != step_of(self)) return;
        self.say("now");
        for (;;) pause();
      };
    }
    Checker checker(comm, s, memory);
    std::string wrong = checker.run(0, 4);
    if (!wrong.empty()) return wrong;
    comm.barrier();  // nobody is still in a batch that was to succeed
    wrong = checker.run(4, 6);
    if (wrong.find("status") == std::string::npos) return "a rank died, but: '" + wrong + "'";
    const std::vector<bool> failed =
        checker.group().agree(std::chrono::seconds(20), site->stream());
    for (int r = 0; r < self.nranks; ++r)
      if (failed[r] != (r == kVictim)) return "agreed on the wrong ranks";
    if (checker.group().report(site->stream()).failed != failed)
      return "report() says otherwise than agree()";
    checker.group().reset_report(site->stream());
    checker.scenario().failed = failed;
    wrong = checker.run(10, 16);
    if (!wrong.empty()) return "with the rank masked: " + wrong;
    checker.close();
    // A new Group, too, leaves out whom all have agreed on.
    Scenario masked = scenario_of(*site);
    masked.failed = failed;
    Checker another(comm, masked, memory);
    wrong = another.run(16, 18);
    if (!wrong.empty()) return "a new group with the rank masked: " + wrong;
    another.close();
    if (self.rank == 0) self.say("alone");
  }
  comm.admit(kVictim, std::chrono::seconds(20));
  return finish(comm, *site);
}

MARROW_ROLE(ep_replacement) {
  const auto site = make_site(self.rank);
  Communicator comm =
      Communicator::rejoin(self.made_id(), self.nranks, self.rank, config_of(self, *site));
  return finish(comm, *site);
}

struct How {
  const char* path;
  int step;
  int signal;
};

class EpFailure : public testing::TestWithParam<How> {};

TEST_P(EpFailure, Case12_SurvivorsGoOnAndAReplacementComes) {
  const How& how = GetParam();
  const std::string argument = std::string(how.path) + " " + std::to_string(how.step);
  Ranks ranks("ep_rank", kRanks, argument, {{"MARROW_PEER_TIMEOUT", "1500ms"}});
  ASSERT_TRUE(ranks.all_said({kVictim}, "now"));
  ranks.signal(kVictim, how.signal);
  const std::int64_t start = test::monotonic_ns();
  ASSERT_TRUE(ranks.all_said({0}, "alone"))
      << ranks.result(0, Milliseconds(100)) << ranks.result(1, Milliseconds(100));
  EXPECT_LT(test::monotonic_ns() - start, 15'000'000'000);
  ranks.start("ep_replacement", kVictim, argument);  // a stopped one is killed first
  for (int r = 0; r < kRanks; ++r) EXPECT_EQ(ranks.result(r), "ok") << "rank " << r;
}

std::vector<How> ways() {
  std::vector<How> all;
  for (const char* path : {"lsa", "gda", "proxy", "mixed"})
    for (int step = 0; step < 4; ++step) all.push_back({path, step, SIGKILL});
  for (const char* path : {"lsa", "gda", "proxy"}) all.push_back({path, 1, SIGSTOP});
  return all;
}

std::string name_of(const testing::TestParamInfo<How>& which) {
  static constexpr const char* kSteps[] = {"before_send", "before_receive", "before_combine",
                                           "before_combine_receive"};
  return std::string(which.param.path) +
         (which.param.signal == SIGKILL ? "_killed_" : "_stopped_") + kSteps[which.param.step];
}

INSTANTIATE_TEST_SUITE_P(Ways, EpFailure, testing::ValuesIn(ways()), name_of);

}  // namespace
}  // namespace marrow::ep_test
