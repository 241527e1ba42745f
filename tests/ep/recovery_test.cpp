// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan tsan
// What a late rank leaves behind: nothing of it may show in a later batch, and no batch between a timeout and agree()
// may give a row that is wrong.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

#include "ep/scenario.hpp"
#include "thread_ranks.hpp"

namespace marrow::ep_test {
namespace {

using std::chrono::milliseconds;

using Parameters = std::map<std::string, std::string>;

Scenario small(int ranks) {
  Scenario s;
  s.config.experts.assign(static_cast<std::size_t>(ranks), 3);
  s.config.max_tokens = 4;
  s.config.hidden = 64;
  s.config.top_k = 2;
  s.config.payload = ep::Payload::bf16;
  s.config.deadline = milliseconds(400);
  s.tokens = {4, 3};
  return s;
}

/// Runs body(communicator) as threads; parameters(rank) are each rank's.
template <class Of, class Body>
void run(int ranks, Of&& parameters, Body&& body) {
  const auto results = test::as_threads(ranks, [&](int rank, const UniqueId& id) {
    Config config;
    config.parameters = parameters(rank);
    config.parameters["MARROW_WAIT_TIMEOUT"] = "20s";
    Communicator comm(id, ranks, rank, config);
    const std::string wrong = body(comm);
    comm.close();
    return wrong;
  });
  for (std::size_t r = 0; r < results.size(); ++r) EXPECT_EQ(results[r], "") << "rank " << r;
}

/// A rank sends so late that the others have given it up, and its puts take longer than agree() talks to the others.
void late_puts(const Parameters& parameters) {
  run(
      2, [&](int) { return parameters; },
      [](Communicator& comm) -> std::string {
        HostMemory memory;
        Scenario s = small(2);
        s.config.deadline = milliseconds(1500);
        s.tokens = {4};
        s.route = [](int rank, int, int, int k) { return std::int64_t{(1 - rank) * 3 + k}; };
        Checker checker(comm, s, memory);
        std::string wrong = checker.run(0, 1);
        if (!wrong.empty()) return "before: " + wrong;
        ep::Group& group = checker.group();
        const Checker::Buffers& b = checker.buffers(0);
        comm.barrier();
        if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(1600));
        group.combine_send({.rows = b.z}, group.handle(0));
        if (comm.rank() == 0) {
          group.combine_receive({b.out}, group.handle(0));
          if (group.report().status != Status::timeout) return "nobody was late";
        }
        (void)group.agree(std::chrono::seconds(20));
        group.reset_report();
        wrong = checker.run(2, 4);
        group.close();
        return wrong;
      });
}

TEST(EpRecovery, PutsOfALateRankLandBeforeOthersStartAnewGda) {
  late_puts({{"MARROW_PATH", "gda"}, {"MARROW_NIC", "softnic"}, {"MARROW_SOFTNIC", "delay=60000"}});
}
TEST(EpRecovery, PutsOfALateRankLandBeforeOthersStartAnewProxy) {
  late_puts({{"MARROW_PATH", "proxy"}, {"MARROW_NETWORK", MARROW_EP_UNORDERED "?delay=200000"}});
}

}  // namespace
}  // namespace marrow::ep_test
