// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan tsan
// What a late rank leaves behind: nothing of it may show in a later batch, and no batch between a timeout and agree()
// may give a row that is wrong.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
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

/// Batches go on after a timeout without agree(): they give nothing, on every rank within a deadline or two, until agree().
TEST(EpRecovery, NoWrongRowBetweenATimeoutAndAgree) {
  constexpr int kRanks = 3;
  run(
      kRanks, [](int) { return Parameters{}; },
      [](Communicator& comm) -> std::string {
        HostMemory memory;
        Scenario s = small(kRanks);
        s.config.deadline = milliseconds(150);
        s.tokens = {4};
        Checker checker(comm, s, memory);
        std::string wrong = checker.run(0, 1);
        if (!wrong.empty()) return "before: " + wrong;
        ep::Group& group = checker.group();
        const Checker::Buffers& b = checker.buffers(0);
        const ep::Handle h = group.handle(0);
        comm.barrier();
        // Rank 2's rows come long after the others have given it up.
        if (comm.rank() == 2) std::this_thread::sleep_for(milliseconds(500));
        group.combine({.rows = b.z}, {b.out}, h);
        const ep::DispatchInput in{
            .tokens = 4, .rows = b.rows, .expert_ids = b.ids, .weights = b.weights};
        // It has got everything; it learns when it waits for those that have stopped.
        if (comm.rank() == 2) group.dispatch(in, {b.y, b.ys}, h);
        Status status = group.report().status;
        if (status == Status::ok) return "nobody was late";
        group.reset_report();
        for (int batch = 1; batch < 7; ++batch) {
          group.dispatch(in, {b.y, b.ys}, h);
          for (int l = 0; l < group.local_experts(); ++l)
            if (h.counts[l] != 0) return "rows were delivered after a timeout";
          std::memset(b.out, 0xff, 4 * 64 * 2);
          group.combine({.rows = b.z}, {b.out}, h);
          for (int i = 0; i < 4 * 64; ++i)
            if (static_cast<const std::uint16_t*>(b.out)[i] != 0)
              return "a row after a timeout is not zero";
          status = group.report().status;
          if (status == Status::ok) return "status ok while nothing is exchanged";
        }
        comm.barrier();
        for (const bool failed : group.agree(std::chrono::seconds(20)))
          if (failed) return "a slow rank was agreed to have failed";
        if (group.report().status != Status::ok) return "still stopped";
        wrong = checker.run(2, 8);
        group.close();
        return wrong;
      });
}

/// A to B by load/store, B to A by the proxy; rank 2 reaches all by load/store.
TEST(EpRecovery, PathsThatDifferByDirection) {
  run(
      3,
      [](int rank) {
        return Parameters{{"MARROW_NETWORK", "shm"},
                          {"MARROW_PATH", rank == 1 ? "proxy,lsa,lsa" : "lsa,lsa,lsa"}};
      },
      [](Communicator& comm) -> std::string {
        HostMemory memory;
        Scenario s = small(3);
        s.config.deadline = std::chrono::seconds(10);
        Checker checker(comm, s, memory);
        const std::vector<bool> cells = checker.group().cells();
        for (int r = 0; r < 3; ++r)
          if (cells[r] != (r + comm.rank() != 1 || r == comm.rank()))
            return "cells to rank " + std::to_string(r);
        const std::string wrong = checker.run(0, 4);
        checker.group().close();
        return wrong;
      });
}

/// Only the slow rank is named, also where it is waited for first.
void slow_rank_is_named(const Parameters& parameters, int threads = 1) {
  run(
      3, [&](int) { return parameters; },
      [threads](Communicator& comm) -> std::string {
        HostMemory memory;
        Scenario s = small(3);
        s.config.threads = threads;
        s.config.deadline = std::chrono::seconds(10);
        s.batches = 1;
        s.combines = false;
        comm.barrier();
        s.before = [&](int, int which) {
          if (which != 0) return;
          comm.barrier();
          if (comm.rank() == 0) std::this_thread::sleep_for(milliseconds(600));
        };
        Checker checker(comm, s, memory);
        const std::string wrong = checker.run();
        if (!wrong.empty()) return wrong;
        const ep::Report report = checker.group().report();
        checker.group().close();
        if (comm.rank() == 0) return {};
        const std::uint64_t slow = report.dispatch_waited_ns[0];
        const std::uint64_t other = report.dispatch_waited_ns[3 - comm.rank()];
        if (slow < 300'000'000 || other > slow / 2)
          return "waited " + std::to_string(slow) + " for the slow rank, " + std::to_string(other) +
                 " for the other";
        return {};
      });
}
TEST(EpRecovery, OnlyTheSlowRankIsNamedLsa) { slow_rank_is_named({}); }
// Threads wait for other tokens of the slow rank before they look at another rank's first one.
TEST(EpRecovery, OnlyTheSlowRankIsNamedByThreads) { slow_rank_is_named({}, 3); }
TEST(EpRecovery, OnlyTheSlowRankIsNamedProxy) {
  slow_rank_is_named({{"MARROW_PATH", "proxy"}, {"MARROW_NETWORK", "shm"}});
}

TEST(EpRecovery, AReceiveWithAnotherHandleIsRefused) {
  run(
      1, [](int) { return Parameters{}; },
      [](Communicator& comm) -> std::string {
        HostMemory memory;
        Scenario s = small(1);
        s.config.batches_in_flight = 2;
        Checker checker(comm, s, memory);
        ep::Group& group = checker.group();
        const Checker::Buffers& b = checker.buffers(0);
        const std::vector<std::int64_t> ids(8, -1);
        group.dispatch_send({.tokens = 4, .rows = b.rows, .expert_ids = ids.data()},
                            group.handle(0));
        try {
          group.dispatch_receive({b.y, b.ys}, group.handle(1));
          return "handle 1 was taken for handle 0";
        } catch (const Error& error) {
          if (error.code() != Code::invalid_argument) return error.what();
        }
        group.dispatch_receive({b.y, b.ys}, group.handle(0));
        group.close();
        return {};
      });
}

TEST(EpRecovery, RowsBeyond32BitsAreRefused) {
  ep::Config config;
  config.experts = {2048, 0};
  config.max_tokens = 65536;
  config.capacity = 2 * 65536;
  EXPECT_LT(2048LL * 65536 * 2, 1LL << 31);
  (void)ep::Group::memory_needed(config);
  config.experts.assign(64, 0);
  config.experts[5] = 2048;
  config.capacity = 1 << 20;
  try {
    (void)ep::Group::memory_needed(config);
    FAIL() << "2^31 rows were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
  }
}

}  // namespace
}  // namespace marrow::ep_test
