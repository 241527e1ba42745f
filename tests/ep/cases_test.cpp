// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all tsan-all
// What users of expert-parallel libraries tripped over, case by case, over every path, against the plain
// reference of scenario.hpp. Outputs are poisoned before each call. The same source runs on GPUs.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "ep/cases.hpp"

namespace marrow::ep_test {
namespace {

using std::chrono::milliseconds;

TEST_P(EpCases, TheCasesTakeThePathsThatTheySay) {
  run_ranks(path(), 4, [&](Communicator& comm, Site& site) -> std::string {
    ep::Group group(comm, small(comm.nranks()).config);
    const std::vector<bool> cells = group.cells();
    std::string taken;
    for (const PeerInfo& peer : comm.peers()) {
      if (peer.rank == comm.rank()) continue;
      taken += std::string(taken.empty() ? "" : " ") + name(peer.path);
      if (cells[peer.rank] != (peer.path == Path::lsa)) return "cells to a peer on path " + taken;
    }
    const bool one = path() == "lsa" || path() == "gda" || path() == "proxy";
    if (one && taken.find(path()) == std::string::npos) return "took " + taken;
    if (path() == "alone" && taken.find("lsa") != std::string::npos) return "took " + taken;
    if (path() == "teams" &&
        (taken.find("lsa") == std::string::npos || taken.find("gda") == std::string::npos))
      return "took " + taken;
    group.close();
    (void)site;
    return {};
  });
}

TEST_P(EpCases, Case01_RanksWithoutTokens) {
  Scenario s = small(3);
  for (const std::vector<int>& tokens : {std::vector{0, 6, 6}, {0, 0, 6}, {0, 0, 0}}) {
    s.tokens = tokens;
    s.batches = 3;  // each rank is without in turn
    run(3, s);
  }
}

TEST_P(EpCases, Case02_AllToOneExpertOneRankOrSelf) {
  Scenario s = small(3);
  s.tokens = {6};
  s.config.top_k = 1;
  s.route = [](int, int, int, int) {
    return std::int64_t{4};
  };  // exactly full: R*M rows of one expert
  run(3, s);
  s.config.top_k = 3;
  s.route = [](int, int, int, int k) { return std::int64_t{3 + k}; };  // rank 1
  run(3, s);
  s.route = [](int rank, int, int, int k) { return std::int64_t{rank * 3 + k}; };  // self
  run(3, s);
}

TEST_P(EpCases, Case03_TokensWithoutChoice) {
  Scenario s = bf16(3);
  // None at all; none of a token; none of a rank; some columns. The weights of all these are NaN.
  s.route = [](int, int, int, int) { return std::int64_t{-1}; };
  run(3, s);
  s.route = [](int rank, int batch, int token, int k) {
    if (rank == 1 || token % 2 == 0) return std::int64_t{-1};
    return (token + k + batch) % 3 == 0 ? std::int64_t{-1} : std::int64_t{(rank + k * 2) % 9};
  };
  run(3, s);
}

TEST_P(EpCases, Case04_WhatIsNoChoiceIsIgnoredAndCounted) {
  run_ranks(path(), 3, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = small(comm.nranks());
    s.stream = site.stream();
    s.tokens = {6};
    s.batches = 2;
    const int experts = comm.nranks() * 3;
    s.route = [experts](int, int, int token, int k) -> std::int64_t {
      static constexpr std::int64_t kOdd[] = {-2, std::int64_t{1} << 40, -(std::int64_t{1} << 40),
                                              1 << 16};
      if (token == 0) return kOdd[k];
      if (token == 1) return experts + k;
      return token == 2 ? 1 : (token + k) % experts;
    };
    Checker checker(comm, s, site.memory());
    std::string wrong = checker.run();
    if (!wrong.empty()) return wrong;
    const ep::Report report = checker.group().report(site.stream());
    if (report.out_of_range != 12)
      return std::to_string(report.out_of_range) + " out of range, expected 12";
    if (report.duplicates != 4)
      return std::to_string(report.duplicates) + " duplicates, expected 4";
    if (report.overflow != 0) return "an overflow";
    checker.group().reset_report(site.stream());
    if (checker.group().report(site.stream()).duplicates != 0) return "reset_report did not";
    checker.group().close();
    return {};
  });
}

TEST_P(EpCases, Case05_TooManyTokensAreRefusedAndNobodyHangs) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = bf16(comm.nranks());
    s.stream = site.stream();
    s.config.max_tokens = 7;  // not a multiple of anything
    s.tokens = {7, 0, 1};
    s.batches = 3;
    Checker checker(comm, s, site.memory());
    ep::Group& group = checker.group();
    for (const int tokens : {8, -1}) {
      try {
        group.dispatch_send({.tokens = tokens, .rows = site.memory().allocate(64)}, group.handle(0),
                            site.stream());
        return "too many tokens were taken";
      } catch (const Error& error) {
        if (error.code() != Code::invalid_argument) return error.what();
      }
    }
    std::string wrong = checker.run();  // nothing was sent by the calls that were refused
    if (!wrong.empty()) return wrong;
    // Known on the device alone: that rank sends only the fact, nobody waits in vain.
    Memory& memory = site.memory();
    const std::int32_t too_many = comm.rank() == 0 ? 8 : 2;
    auto* word = static_cast<std::int32_t*>(memory.allocate(4));
    memory.upload(word, &too_many, 4);
    const std::vector<std::int64_t> ids(21, 0);
    auto* list = static_cast<std::int64_t*>(memory.allocate(21 * 8));
    memory.upload(list, ids.data(), 21 * 8);
    void* rows = memory.allocate(7 * 288);
    void* out = memory.allocate(static_cast<std::size_t>(3 * group.capacity()) * 288);
    group.dispatch({.rows = rows, .expert_ids = list, .device_tokens = word}, {out},
                   group.handle(0), site.stream());
    const Status status = group.report(site.stream()).status;
    if ((status == Status::invalid) != (comm.rank() == 0))
      return std::string("device_tokens out of range: status ") + name(status);
    std::int32_t count = 0;
    memory.download(&count, group.handle(0).counts, 4);
    const int want = comm.rank() == 0 && comm.nranks() > 1 ? 2 : 0;
    if (count != want) return "counted " + std::to_string(count) + " rows";
    group.close();
    return {};
  });
}

TEST_P(EpCases, Case06_HiddenSizesAndTopK) {
  // Smallest, odd multiples of 16 bytes, partial groups.
  for (const int hidden : {16, 48, 112, 528}) {
    Scenario s = small(2);
    s.config.hidden = hidden;
    run(2, s);
  }
  for (const int hidden : {8, 24, 1000}) {
    Scenario s = bf16(2);
    s.config.hidden = hidden;
    run(2, s);
  }
  Scenario big = bf16(2);
  big.config.hidden = 16384;
  big.tokens = {2, 1};
  big.config.max_tokens = 2;
  big.batches = 1;
  run(2, big);
  big.config.payload = ep::Payload::fp8;
  run(2, big);
  for (const int top_k : {1, 8, 9, 11, 16, 32}) {
    Scenario s = small(2);
    s.config.hidden = 32;
    s.config.experts = {20, 19};
    s.config.top_k = top_k;
    run(2, s);
  }
}

TEST_P(EpCases, Case07_ExpertsAndRanks) {
  for (const std::vector<int>& experts : {std::vector{1, 1},
                                          {256, 256},
                                          {0, 5},
                                          {7, 0, 1},
                                          {2048},
                                          {1000, 1048},
                                          {1, 2, 3, 4, 5, 6, 7}}) {
    if (on_gpus() && static_cast<int>(experts.size()) > most_ranks()) continue;
    Scenario s = small(static_cast<int>(experts.size()));
    s.config.experts = experts;
    s.config.hidden = 32;
    run(static_cast<int>(experts.size()), s);
  }
}

TEST_P(EpCases, Case07_SixteenRanks) {
  if (most_ranks() < 16) GTEST_SKIP() << "needs 16 ranks";
  Scenario s = small(16);
  s.config.experts.assign(16, 2);
  s.config.hidden = 32;
  s.config.max_tokens = 3;
  s.tokens = {3, 2, 0};
  s.batches = 2;
  run(16, s);
}

TEST_P(EpCases, Case08_ScalesOfEveryKind) {
  // Rows with zero groups, NaN, infinities: scenario.hpp.
  for (const ep::Scales scales : {ep::Scales::f32, ep::Scales::power_of_two, ep::Scales::ue8m0}) {
    for (const ep::ScaleOrder order : {ep::ScaleOrder::row_major, ep::ScaleOrder::column_major}) {
      Scenario s = small(2);
      s.config.hidden = 272;
      s.config.scales = scales;
      s.config.scale_order = order;
      s.batches = 1;
      run(2, s);
    }
  }
}

TEST_P(EpCases, Case08_OpaquePayloads) {
  struct Format {
    std::uint32_t row, scales;
  };
  // NVFP4, MXFP8, int8 with one scale, none at all.
  for (const Format f : {Format{72 * 2, 20}, {160, 8}, {256, 4}, {16, 0}}) {
    Scenario s = small(2);
    s.config.payload = ep::Payload::opaque;
    s.config.row_bytes = f.row;
    s.config.scale_bytes = f.scales;
    s.batches = 1;
    run(2, s);
  }
}

TEST_P(EpCases, Case09_CombineWithAndWithoutWeights) {
  Scenario s = bf16(3);
  s.config.top_k = 8;
  s.config.experts = {5, 5, 5};
  s.absent = 0;
  s.duplicate = 0.2;
  run(3, s);
  s.weighted = false;
  run(3, s);
  s.config.layout = ep::Layout::rank_major;
  run(3, s);
}

/// What experts give need not be numbers: combine is plain arithmetic on it.
TEST_P(EpCases, Case09_InfinitiesAndNaNsOfExperts) {
  Scenario s = bf16(3);
  s.wild = true;
  s.config.top_k = 4;
  s.config.experts = {5, 5, 5};
  run(3, s);
  s.weighted = false;
  run(3, s);
  s.config.layout = ep::Layout::rank_major;
  run(3, s);
}

/// Far peers get rows straight from where the experts left them; what looks like "nothing here" must arrive all the same.
TEST_P(EpCases, Case09_OutputsInWindows) {
  Scenario s = bf16(3);
  s.registered = true;
  s.wild = true;
  s.config.top_k = 5;
  s.config.experts = {5, 4, 3};
  s.batches = 4;
  run(3, s);
  s.config.capacity = 4;  // dropped rows are zeros
  run(3, s);
  s.config.capacity = 0;
  s.config.layout = ep::Layout::rank_major;
  run(3, s);
  s = bf16(2);
  s.registered = true;
  s.split = true;
  s.config.batches_in_flight = 3;
  s.batches = 9;
  run(2, s);
}

TEST_P(EpCases, Case09_OutputsOutsideTheirWindowAreRefused) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = bf16(comm.nranks());
    s.stream = site.stream();
    s.batches = 1;
    Checker checker(comm, s, site.memory());
    if (std::string wrong = checker.run(); !wrong.empty()) return wrong;
    ep::Group& group = checker.group();
    Window window = comm.allocate(static_cast<std::uint64_t>(3 * group.capacity()) * 288);
    auto* at = static_cast<std::byte*>(window.data());
    for (void* rows : {static_cast<void*>(at + 16), static_cast<void*>(checker.buffers(0).z)}) {
      try {
        group.combine_send({.rows = rows, .registered = window.handle()}, group.handle(0),
                           site.stream());
        return "rows outside their window were taken";
      } catch (const Error& error) {
        if (error.code() != Code::invalid_argument) return error.what();
      }
    }
    group.close();
    return {};
  });
}

/// Delays of up to a millisecond, a few of them longer, different on each rank.
std::function<void(int, int)> random_delays(int rank, std::uint64_t seed, int longest_us) {
  return [=](int batch, int which) {
    const std::uint64_t x = mix(mix(mix(seed, rank), batch), which);
    if (x % 4 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(
          static_cast<std::int64_t>((x >> 8) % static_cast<unsigned>(longest_us))));
  };
}

int iterations() {
  const char* text = std::getenv("MARROW_TEST_EP_ITERATIONS");
  return text ? std::atoi(text) : 1000;
}

TEST_P(EpCases, Case10_ReuseWithRandomDelays) {
  for (const bool split : {false, true}) {
    run_ranks(path(), 3, [&](Communicator& comm, Site& site) {
      Scenario s = bf16(comm.nranks());
      s.stream = site.stream();
      s.config.hidden = 32;
      s.config.batches_in_flight = split ? 2 : 1;  // dispatch, dispatch, combine, combine
      s.split = split;
      s.tokens = {6, 0, 3, 1, 4};
      s.batches = iterations();
      s.before = random_delays(comm.rank(), 17, 400);
      Checker checker(comm, s, site.memory());
      std::string wrong = checker.run();
      checker.group().close();
      return wrong;
    });
  }
}

TEST_P(EpCases, Case10_DifferentGroupsInTurn) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    Scenario a = small(comm.nranks());
    Scenario b = bf16(comm.nranks());
    b.config.max_tokens = 3;
    b.config.experts.assign(b.config.experts.size(), 7);
    b.config.layout = ep::Layout::rank_major;
    b.seed = 5;
    a.stream = b.stream = site.stream();
    Checker first(comm, a, site.memory());
    Checker second(comm, b, site.memory());
    for (int batch = 0; batch < 6; ++batch) {
      std::string wrong = first.run(batch, batch + 1);
      if (wrong.empty()) wrong = second.run(batch, batch + 1);
      if (!wrong.empty()) return wrong;
    }
    second.group().close();
    const std::string wrong = first.run(6, 8);
    first.group().close();
    return wrong;
  });
}

TEST_P(EpCases, Case11_ASlowRankIsWaitedForAndNamed) {
  run_ranks(path(), 3, [&](Communicator& comm, Site& site) -> std::string {
    const int slow = comm.nranks() - 1;
    Scenario s = small(comm.nranks());
    s.stream = site.stream();
    s.split = true;
    s.batches = 3;
    // Before its send, its receive, its combine.
    s.before = [&comm, slow](int batch, int which) {
      if (comm.rank() == slow && which == batch) std::this_thread::sleep_for(milliseconds(150));
    };
    Checker checker(comm, s, site.memory());
    const std::string wrong = checker.run();
    if (!wrong.empty()) return wrong;
    const ep::Report report = checker.group().report(site.stream());
    if (comm.rank() != slow) {
      if (report.longest_wait_ns[slow] < 100'000'000)
        return "the longest wait for the slow rank is " +
               std::to_string(report.longest_wait_ns[slow]);
      if (report.dispatch_waited_ns[slow] < 100'000'000) return "the slow rank was not waited for";
      if (report.combine_waited_ns[slow] < 100'000'000)
        return "the slow rank was not waited for in combine";
      for (int other = 0; other < slow; ++other) {
        if (report.combine_waited_ns[other] > report.combine_waited_ns[slow] / 2 ||
            report.dispatch_waited_ns[other] > report.dispatch_waited_ns[slow] / 2)
          return "rank " + std::to_string(other) + " was waited for like the slow one: " +
                 std::to_string(report.dispatch_waited_ns[other]) + " and " +
                 std::to_string(report.combine_waited_ns[other]) + " ns";
      }
    }
    checker.group().close();
    return {};
  });
}

TEST_P(EpCases, Case11_ARankThatIsTooSlowIsGivenUpAndComesBack) {
  run_ranks(path(), 3, [&](Communicator& comm, Site& site) -> std::string {
    if (comm.nranks() < 2) return {};
    const int slow = comm.nranks() - 1;
    Scenario s = small(comm.nranks());
    s.stream = site.stream();
    s.config.deadline = milliseconds(100);
    s.batches = 1;
    s.combines = false;
    Checker checker(comm, s, site.memory());
    ep::Group& group = checker.group();
    std::string wrong = checker.run();
    if (!wrong.empty()) return wrong;
    comm.barrier();
    if (comm.rank() == slow) {
      std::this_thread::sleep_for(milliseconds(600));
      (void)checker.run(1, 2);
    } else {
      const auto start = std::chrono::steady_clock::now();
      wrong = checker.run(1, 2);
      if (wrong != "status timeout") return "instead of a timeout: '" + wrong + "'";
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(5))
        return "the deadline was long";
      if (!group.report(site.stream()).failed[slow]) return "the slow rank is not marked";
    }
    // Nobody has failed: after agree() all work on.
    const std::vector<bool> failed = group.agree(std::chrono::seconds(20), site.stream());
    for (const bool f : failed)
      if (f) return "a slow rank was agreed to have failed";
    group.reset_report(site.stream());
    checker.scenario().combines = true;
    wrong = checker.run(2, 5);
    if (wrong.empty()) group.close();
    return wrong;
  });
}

TEST_P(EpCases, Case13_HandlesAreCheckedAndReused) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = bf16(comm.nranks());
    s.stream = site.stream();
    s.config.handles = 5;  // results of older batches live on
    Checker checker(comm, s, site.memory());
    std::string wrong = checker.run();
    if (!wrong.empty()) return wrong;
    ep::Group& group = checker.group();
    for (const int index : {-1, 5}) {
      try {
        (void)group.handle(index);
        return "handle " + std::to_string(index) + " was given";
      } catch (const Error& error) {
        if (error.code() != Code::invalid_argument) return error.what();
      }
    }
    void* out = site.memory().allocate(6 * 288);
    void* z = site.memory().allocate(static_cast<std::size_t>(3 * group.capacity()) * 288);
    for (int i = 0; i < 20; ++i)
      group.combine({.rows = z}, {out}, group.handle(i % 2), site.stream());
    if (group.report(site.stream()).status != Status::ok) return "combining handles again failed";
    try {
      group.combine_receive({out}, group.handle(0), site.stream());
      return "a receive without a send";
    } catch (const Error& error) {
      if (error.code() != Code::invalid_argument) return error.what();
    }
    wrong = checker.run(2, 6);
    if (wrong.empty()) group.close();
    return wrong;
  });
}

/// The reference's own arithmetic, against numbers that were worked out by hand.
TEST(EpReference, KnownNumbers) {
  EXPECT_EQ(to_e4m3(1.0f), 0x38);
  EXPECT_EQ(to_e4m3(-1.0f), 0xb8);
  EXPECT_EQ(to_e4m3(448.0f), 0x7e);
  EXPECT_EQ(to_e4m3(1e9f), 0x7e);      // saturated
  EXPECT_EQ(to_e4m3(17.0f), 0x58);     // between 16 and 18: the even one
  EXPECT_EQ(to_e4m3(19.0f), 0x5a);     // between 18 and 20
  EXPECT_EQ(to_e4m3(0x1p-9f), 0x01);   // the smallest
  EXPECT_EQ(to_e4m3(0x1p-10f), 0x00);  // half of it: even
  EXPECT_EQ(to_e4m3(0x3p-10f), 0x02);
  EXPECT_EQ(to_e4m3(0x7.8p-9f), 0x08);  // up to the smallest normal number
  EXPECT_EQ(to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(to_e4m3(std::nanf("")), 0x7f);
  EXPECT_EQ(to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(to_bf16(1.00390625f), 0x3f80);  // 1 + 2^-8, between two: even
  EXPECT_EQ(to_bf16(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8
}

TEST_P(EpCases, Case02_CapacityOverflowIsCountedAndNothingIsOverwritten) {
  run_ranks(path(), 3, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = bf16(comm.nranks());
    s.stream = site.stream();
    s.tokens = {6};
    s.config.top_k = 1;
    s.config.capacity = comm.nranks() * 6 - 1;  // full and one more
    s.route = [](int, int, int, int) { return std::int64_t{1}; };
    s.batches = 1;
    Checker checker(comm, s, site.memory());
    const std::string wrong = checker.run();
    if (!wrong.empty()) return wrong;
    const std::uint64_t dropped = checker.group().report(site.stream()).overflow;
    if (dropped != (comm.rank() == 0 ? 1u : 0u)) return std::to_string(dropped) + " rows dropped";
    checker.group().close();
    return {};
  });
}

class EpStress : public testing::TestWithParam<const char*> {};

TEST_P(EpStress, Case18_FullQueuesAndNetworksThatReorder) {
  if (on_gpus()) GTEST_SKIP() << "the faults are of the CPU's engines";
  for (const ep::Payload payload : {ep::Payload::bf16, ep::Payload::fp8}) {
    Scenario s = small(3);
    s.config.payload = payload;
    s.config.max_tokens = 40;  // more rows than a queue holds
    s.config.hidden = 64;
    s.config.batches_in_flight = 2;
    s.config.threads = 2;
    s.split = true;
    s.tokens = {40, 31, 0, 40, 7};
    s.batches = 8;
    run_scenario(GetParam(), 3, s);
    s.registered = true;
    run_scenario(GetParam(), 3, s);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, EpStress,
                         testing::Values("narrow_gda", "narrow_proxy", "unordered"),
                         [](const auto& which) { return std::string(which.param); });
INSTANTIATE_TEST_SUITE_P(Paths, EpCases, testing::ValuesIn(paths()),
                         [](const auto& which) { return which.param; });

}  // namespace
}  // namespace marrow::ep_test
