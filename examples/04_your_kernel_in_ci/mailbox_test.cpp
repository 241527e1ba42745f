// SPDX-License-Identifier: Apache-2.0
// The kernel as a unit test: two ranks as threads, no GPU, any schedule. Run it under
// ThreadSanitizer with several MARROW_CPU_SEED: a missing release is a data race there, not a
// once-a-week corruption on a cluster.
#include <gtest/gtest.h>

#include <marrow/marrow.hpp>
#include <thread>

#include "mailbox.cuh"

TEST(Mailbox, EveryMessageArrivesWhole) {
  constexpr int kRounds = 200;
  const marrow::UniqueId id = marrow::UniqueId::create();
  std::uint64_t sum[2] = {};
  marrow::Status status[2] = {};
  const auto rank = [&](int r) {
    marrow::Communicator comm(id, 2, r);
    marrow::Window window = comm.allocate(sizeof(MailboxSlot));
    auto device = comm.device_communicator();
    marrow::launch(comm.place(), 1, 1, 0, mailbox, device.handle(), window.handle(), kRounds,
                   &sum[r], &status[r]);
    comm.close();
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  EXPECT_EQ(status[0], marrow::Status::ok);
  EXPECT_EQ(status[1], marrow::Status::ok);
  std::uint64_t expected = 0;
  for (std::uint64_t tag = 1; tag <= kRounds; ++tag) expected += 60 * tag + 15;
  EXPECT_EQ(sum[1], expected);
}
