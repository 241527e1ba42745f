// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine on every path, ranks as threads, against the plain reference: what a plain ./test runs under the sanitizers.
#include <gtest/gtest.h>

#include "ep/random_scenario.hpp"
#include "ep/site.hpp"

namespace marrow::ep_test {
namespace {

void run(int ranks, const std::string& path, const Scenario& scenario) {
  run_scenario(path, ranks, scenario);
}

Scenario small(int ranks) {
  Scenario s;
  s.config.experts.assign(static_cast<std::size_t>(ranks), 3);
  s.config.max_tokens = 5;
  s.config.hidden = 272;  // the last group of channels is partial
  s.config.top_k = 4;
  s.config.deadline = std::chrono::seconds(20);
  s.tokens = {5, 0, 3, 1};
  s.batches = 5;
  return s;
}

TEST(EpPaths, EveryPath) {
  for (const char* path : {"lsa", "gda", "proxy", "mixed"}) {
    for (int ranks : {1, 2, 3, 4}) run(ranks, path, small(ranks));
  }
}

TEST(EpPaths, Payloads) {
  Scenario s = small(2);
  s.config.scales = ep::Scales::power_of_two;
  run(2, "lsa", s);
  s.config.scales = ep::Scales::ue8m0;
  s.config.scale_order = ep::ScaleOrder::column_major;
  run(2, "lsa", s);
  s.config.payload = ep::Payload::bf16;
  run(2, "lsa", s);
  run(2, "gda", s);
  s.config.payload = ep::Payload::opaque;
  s.config.row_bytes = 528;
  s.config.scale_bytes = 36;
  run(2, "lsa", s);
  run(2, "proxy", s);
  s.config.scale_order = ep::ScaleOrder::row_major;
  run(2, "lsa", s);
}

TEST(EpPaths, RankMajor) {
  Scenario s = small(3);
  s.config.layout = ep::Layout::rank_major;
  run(3, "lsa", s);
  run(3, "mixed", s);
}

TEST(EpPaths, OutputsInWindows) {
  Scenario s = small(3);
  s.registered = true;
  s.wild = true;
  s.batches = 3;
  for (const char* path : {"lsa", "gda", "proxy", "mixed"}) run(3, path, s);
  s.config.batches_in_flight = 2;
  s.split = true;
  run(3, "narrow_gda", s);
  run(3, "narrow_proxy", s);
}

TEST(EpPaths, SplitPhasesAndSeveralBatchesInFlight) {
  for (int in_flight : {1, 3}) {
    Scenario s = small(3);
    s.config.batches_in_flight = in_flight;
    s.split = true;
    s.batches = 9;
    run(3, "lsa", s);
    run(3, "mixed", s);
  }
}

TEST(EpPaths, SeveralBlocksAndThreads) {
  Scenario s = small(2);
  s.config.max_sms = 5;  // some send, the others receive
  s.config.threads = 2;
  s.config.max_tokens = 40;
  s.tokens = {40, 33};
  s.batches = 3;
  run(2, "lsa", s);
  s.config.layout = ep::Layout::rank_major;
  run(2, "lsa", s);
}

TEST(EpPaths, WhatRoutersGetWrong) {
  Scenario s = small(2);
  s.duplicate = 0.3;
  s.foreign = 0.2;
  s.config.experts = {1, 6};
  run(2, "lsa", s);
  s.config.experts = {0, 5};
  run(2, "gda", s);
  s.absent = 1.0;
  run(2, "lsa", s);
}

TEST(EpPaths, CapacityThatOverflows) {
  Scenario s = small(2);
  s.hot = true;
  s.absent = 0;
  s.config.capacity = 4;
  run(2, "lsa", s);
  run(2, "proxy", s);
}

TEST(EpPaths, PlacedByAKernelOfItsOwn) {
  Scenario s = small(2);
  s.config.experts = {200, 300};
  s.config.max_tokens = 600;  // too many bits for a block's shared memory
  s.config.hidden = 32;
  s.tokens = {60, 7};
  s.batches = 1;
  run(2, "lsa", s);
  s.config.threads = 2;
  s.config.layout = ep::Layout::rank_major;
  s.config.max_tokens = 3300;
  s.tokens = {30, 7};
  run(2, "lsa", s);
}

TEST(EpPaths, RandomSizes) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int ranks = 1 + static_cast<int>(seed % 4);
    const int threads = 1 + static_cast<int>(seed % 3);
    run(ranks, seed % 3 == 0 ? "mixed" : "lsa", random_scenario(seed, ranks, 5, threads));
  }
}

}  // namespace
}  // namespace marrow::ep_test
