// SPDX-License-Identifier: Apache-2.0
// The kernels of ep with the GPU's division of work, a quad of cells a warp of 32 lanes, on the CPU device, where warps are
// threads that ThreadSanitizer sees. (Built with ep's sources and MARROW_EP_WARP_QUADS; run with MARROW_CPU_LANES=32.)
#include <gtest/gtest.h>

#include "ep/random_scenario.hpp"
#include "thread_ranks.hpp"

namespace marrow::ep_test {
namespace {

void run(int ranks, const Scenario& scenario) {
  const auto results = test::as_threads(ranks, [&](int rank, const UniqueId& id) {
    Communicator comm(id, ranks, rank, {});
    HostMemory memory;
    std::string wrong;
    {
      Checker checker(comm, scenario, memory);
      wrong = checker.run();
      checker.group().close();
    }
    comm.close();
    return wrong;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "") << ranks;
}

Scenario small(int ranks) {
  Scenario s;
  s.config.experts.assign(static_cast<std::size_t>(ranks), 5);
  s.config.max_tokens = 9;
  s.config.hidden = 1040;  // two whole quads of fp8, and a cell
  s.config.top_k = 4;
  s.config.threads = 32;
  s.config.max_sms = 1;
  s.config.deadline = std::chrono::seconds(20);
  s.tokens = {9, 4};
  s.batches = 2;
  return s;
}

TEST(EpWarpQuads, OneBlockDoesBoth) {
  run(2, small(2));
  Scenario s = small(1);
  s.config.threads = 64;
  run(1, s);
}

TEST(EpWarpQuads, OtherBlocksReceive) {
  Scenario s = small(1);
  s.config.max_sms = 4;
  s.config.threads = 32;
  run(1, s);
}

// Blocks of 8 workers: one of them writes tables only.
TEST(EpWarpQuads, WorkersWithPartsOfTheirOwn) {
  Scenario s = small(1);
  s.config.threads = 256;
  s.config.max_sms = 4;
  s.config.top_k = 9;
  s.batches = 1;
  run(1, s);
}

TEST(EpWarpQuads, OpaqueRows) {
  Scenario s = small(2);
  s.config.payload = ep::Payload::opaque;
  s.config.row_bytes = 528;
  s.config.scale_bytes = 36;
  run(2, s);
  s.config.payload = ep::Payload::bf16;
  s.config.scale_bytes = 0;
  s.config.hidden = 264;
  s.config.layout = ep::Layout::rank_major;
  run(2, s);
}

TEST(EpWarpQuads, RandomSizes) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int ranks = 1 + static_cast<int>(seed % 2);
    Scenario s = random_scenario(seed, ranks, 5, seed % 3 == 0 ? 96 : 32);
    s.batches = 1;
    run(ranks, s);
  }
}

}  // namespace
}  // namespace marrow::ep_test

#if MARROW_WITH_CUDA
// The library's, which the sources of ep compiled into this test refer to, is hidden; nothing here runs on a GPU.
namespace marrow::ep {
struct Launches;
const Launches& gpu_launches();
const Launches& gpu_launches() {
  throw Error(Code::unsupported, "ep's kernels for GPUs are not in this test", "use libmarrow");
}
}  // namespace marrow::ep
#endif
