// SPDX-License-Identifier: Apache-2.0
// A kernel of yours, with a protocol of its own on Marrow's platform words: one slot per peer, a
// payload by plain stores, a flag that publishes it. nvcc compiles it for the GPU; g++ compiles the
// same lines for CI, where ThreadSanitizer checks the ordering.
#pragma once

#include <marrow/device.cuh>

struct MailboxSlot {
  std::uint64_t payload[6];
  std::uint64_t flag;      // round + 1 when the payload of that round is there
  std::uint64_t consumed;  // round + 1 when the owner has read it
};

// Rank 0 sends `rounds` messages to rank 1, which sums them up.
MARROW_KERNEL mailbox(marrow::DeviceCommunicator comm, marrow::WindowHandle window, int rounds,
                      std::uint64_t* sum, marrow::Status* status) {
  using namespace marrow;
  const Lsa lsa(comm);
  auto* theirs = lsa.pointer<MailboxSlot>(window, 0, 1);
  auto* mine = lsa.pointer<MailboxSlot>(window, 0, 0);
  Status result = Status::ok;
  std::uint64_t total = 0;
  for (int round = 0; round < rounds && result == Status::ok; ++round) {
    const std::uint64_t tag = static_cast<std::uint64_t>(round) + 1;
    if (comm.rank == 0) {
      for (int i = 0; i < 6; ++i) theirs->payload[i] = tag * 10 + static_cast<std::uint64_t>(i);
#if defined(DELETE_RELEASE)
      store_relaxed<Scope::system>(&theirs->flag, tag);  // the bug that the test must see
#else
      publish<Scope::system>(
          Store{&theirs->flag, tag});  // publishes payload; meets the observe below
#endif
      result = wait_until(comm, {}, [&] { return observe<Scope::system>(&mine->consumed) == tag; });
    } else {
      result = wait_until(comm, {}, [&] { return observe<Scope::system>(&theirs->flag) == tag; });
      for (int i = 0; i < 6; ++i) total += theirs->payload[i];
      publish<Scope::system>(
          Store{&mine->consumed, tag});  // our reads are done; meets rank 0's observe
    }
  }
  *sum = total;
  *status = result;
}
