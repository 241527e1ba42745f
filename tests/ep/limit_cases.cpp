// SPDX-License-Identifier: Apache-2.0
// Cases of what adds up: groups that come and go, batch numbers that wrap, offsets past 4 GiB, a real router.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ep/cases.hpp"
#include "ep/routing.hpp"

namespace marrow::ep_test {
namespace {

int entries(const char* folder) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) n += !entry.path().empty();
  return n;
}

TEST_P(EpCases, Case16_GroupsComeAndGoWithoutLeaks) {
  run_ranks(path(), 2, [&](Communicator& comm, Site& site) -> std::string {
    Scenario s = small(comm.nranks());
    s.stream = site.stream();
    s.batches = 1;
    s.combines = false;
    int fds = 0;
    int threads = 0;
    for (int i = 0; i < 25; ++i) {
      {
        Checker one(comm, s, site.memory());
        Checker other(comm, s, site.memory());  // two at once
        std::string wrong = one.run();
        if (wrong.empty()) wrong = other.run();
        if (!wrong.empty()) return wrong;
        one.group().close();
        other.group().close();
      }
      comm.barrier();  // nobody is making the next one
      if (i == 2) {
        fds = entries("/proc/self/fd");
        threads = entries("/proc/self/task");
      }
      comm.barrier();
    }
    if (entries("/proc/self/fd") > fds + 2 || entries("/proc/self/task") > threads + 2)
      return "descriptors or threads leak: " + std::to_string(entries("/proc/self/fd") - fds) +
             ", " + std::to_string(entries("/proc/self/task") - threads);
    return {};
  });
}

TEST_P(EpCases, Case17_BatchNumbersWrap) {
  for (const std::uint64_t first : {std::uint64_t{65533}, (std::uint64_t{1} << 32) - 3,
                                    (std::uint64_t{1} << 33) - 5, (std::uint64_t{1} << 31) - 2}) {
    Scenario s = bf16(2);
    s.config.hidden = 32;
    s.config.first_batch = first;
    s.batches = 9;
    run(2, s);
    s.config.payload = ep::Payload::opaque;
    s.config.row_bytes = 48;
    s.batches = 5;
    run(2, s);
  }
}

TEST_P(EpCases, Case19_OffsetsPast4GiB) {
  if (!on_gpus()) GTEST_SKIP() << "takes 7 GiB a rank: on GPUs; the plan's offsets: ep_shape_test";
  Scenario s = bf16(2);
  s.config.max_tokens = 65536;  // rank 1's rows begin at slot 65536, the combined rows past 4 GiB
  s.config.hidden = 8192;
  s.config.top_k = 1;
  s.config.capacity = 16;
  s.tokens = {4, 3};
  s.batches = 5;
  run(2, s);
}

TEST_P(EpCases, RealRouting) {
  const char* named = std::getenv("MARROW_TEST_EP_ROUTING");
  const std::string file = named ? named : MARROW_EP_ROUTING_FILE;
  const auto routing = real_routing(file, 4000);
  if (routing.empty() && !named && on_gpus())
    GTEST_SKIP() << "no router log at " << file << "; MARROW_TEST_EP_ROUTING names one";
  ASSERT_FALSE(routing.empty()) << "no routing in " << file;
  run_ranks(path(), 4, [&](Communicator& comm, Site& site) {
    const int R = comm.nranks();
    Scenario s = small(R);
    s.stream = site.stream();
    s.config.experts.assign(static_cast<std::size_t>(R), 64 / R);
    s.config.max_tokens = 32;
    s.config.top_k = 8;
    s.config.hidden = 64;
    s.tokens = {32};
    s.batches = 4;
    s.route = [&routing, R](int rank, int batch, int token, int k) -> std::int64_t {
      // The first tokens are a warm-up that all choose the same; then what the router said.
      const std::size_t at =
          (static_cast<std::size_t>((batch * R + rank) * 32 + token) * 7) % routing.size();
      return routing[at][static_cast<std::size_t>(k)];
    };
    Checker checker(comm, s, site.memory());
    std::string wrong = checker.run();
    checker.group().close();
    return wrong;
  });
}

}  // namespace
}  // namespace marrow::ep_test
