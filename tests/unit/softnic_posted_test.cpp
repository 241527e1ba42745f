// SPDX-License-Identifier: Apache-2.0
// A kernel on the CPU device posts random WQEs to softnic's CPU engine and compares with its own model; on GPUs the
// same kernel is what tests the GPU engine (tests/gpu/softnic_posted_gpu_test.cu).
#include "unit/softnic_posted.hpp"

namespace marrow::softnic_posted {
namespace {

TEST(SoftnicPosted, RandomWqesAndMistakes) {
  Communicator comm(UniqueId::create(), 1, 0, config(Place::cpu(), ""));
  // Mistakes end most queues early, then none does and indices wrap.
  std::uint64_t posted = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed)
    posted += round(comm, Place::cpu(), 2, 1, seed, 2000, 400, Memory::host);
#if !defined(MARROW_SANITIZED)
  posted += round(comm, Place::cpu(), 1, 1, 7, 400'000, ~0u, Memory::host);
#endif
  std::printf("%llu WQEs\n", static_cast<unsigned long long>(posted));
  EXPECT_GT(posted, 1000u);
}

}  // namespace
}  // namespace marrow::softnic_posted
