// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// The host core end to end over lsa, ranks as threads: windows, device communicator, errors.
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "core/path_plan.hpp"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"

namespace marrow {
namespace {

/// Runs body(communicator) on n thread ranks; rethrows the lowest rank's failure.
void run_ranks(int n, const std::function<void(Communicator&)>& body, Config config = {}) {
  const UniqueId id = UniqueId::create();
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(n);
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        Communicator comm(id, n, r, config);
        body(comm);
        comm.close();
      } catch (...) {
        failures[r] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

MARROW_KERNEL ring_put(DeviceCommunicator comm, WindowHandle window, std::uint64_t bytes, Status* out) {
  Gin gin(comm, 0);
  const int to = (comm.rank + 1) % comm.nranks;
  Status status = gin.put(to, window, bytes, window, 0, bytes, SignalAdd{0, 1}, Block{});
  status = worse(status, gin.wait_signal(0, 1, Block{}));
  if (thread_index() == 0) *out = status;
}

TEST(Core, RingOfPutsArrives) {
  constexpr std::uint64_t kBytes = 5000;
  for (int n : {1, 2, 4}) {
    run_ranks(n, [&](Communicator& comm) {
      Window window = comm.allocate(2 * kBytes);
      auto device = comm.device_communicator();
      auto* data = static_cast<unsigned char*>(window.data());
      for (std::uint64_t i = 0; i < kBytes; ++i) data[i] = static_cast<unsigned char>(i * 7 + comm.rank());
      Status status = Status::invalid;
      launch(comm.place(), 1, 4, 0, ring_put, device.handle(), window.handle(), kBytes, &status);
      EXPECT_EQ(status, Status::ok);
      const int from = (comm.rank() + comm.nranks() - 1) % comm.nranks();
      for (std::uint64_t i = 0; i < kBytes; ++i) {
        ASSERT_EQ(data[kBytes + i], static_cast<unsigned char>(i * 7 + from)) << "byte " << i;
      }
      comm.check();
    });
  }
}

MARROW_KERNEL all_barriers(DeviceCommunicator comm, int rounds, Status* out) {
  Barrier barrier(comm, team_world(comm), 0);
  Status status = Status::ok;
  for (int i = 0; i < rounds; ++i) status = worse(status, barrier.sync(Block{}));
  if (thread_index() == 0) *out = status;
}

TEST(Core, BarrierRounds) {
  run_ranks(3, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::invalid;
    launch(comm.place(), 1, 2, 0, all_barriers, device.handle(), 200, &status);
    EXPECT_EQ(status, Status::ok);
  });
}

MARROW_KERNEL wait_for_nobody(DeviceCommunicator comm, Deadline deadline, Status* out) {
  Gin gin(comm, 0);
  *out = gin.wait_signal(3, 1, deadline);
}

TEST(Core, WaitPastItsDeadlineReturnsTimeout) {
  run_ranks(1, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::ok;
    launch(comm.place(), 1, 1, 0, wait_for_nobody, device.handle(), Deadline{20'000'000}, &status);
    EXPECT_EQ(status, Status::timeout);
  });
}

TEST(Core, ForeignAbiIsInvalidAndNamed) {
  run_ranks(1, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    DeviceCommunicator handle = device.handle();
    handle.abi = kAbiVersion + 1;
    Status status = Status::ok;
    launch(comm.place(), 1, 1, 0, wait_for_nobody, handle, Deadline{1000}, &status);
    EXPECT_EQ(status, Status::invalid);
    try {
      comm.check();
      FAIL() << "check() did not throw";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::version);
    }
  });
}

TEST(Core, DifferentWindowSizesAreNamed) {
  std::atomic<int> mismatches{0};
  run_ranks(2, [&](Communicator& comm) {
    try {
      comm.allocate(comm.rank() == 0 ? 4096 : 8192);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_NE(std::string(error.what()).find("4096"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("8192"), std::string::npos);
      ++mismatches;
    }
    comm.barrier();
  });
  EXPECT_EQ(mismatches, 2);
}

TEST(Core, RevokeEndsWaits) {
  run_ranks(2, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.revoke("test");
    } else {
      Status status = Status::ok;
      launch(comm.place(), 1, 1, 0, wait_for_nobody, device.handle(), Deadline{}, &status);
      EXPECT_EQ(status, Status::aborted);
      EXPECT_THROW(comm.check(), Error);
    }
  });
}

TEST(Core, StreamFormsMoveDataOnEveryPath) {
  for (const char* path : {"lsa", "gda", "proxy"}) {
    Config config;
    config.parameters["MARROW_PATH"] = path;
    run_ranks(
        2,
        [&](Communicator& comm) {
          Window window = comm.allocate(4096);
          Window source = comm.allocate(4096);
          auto device = comm.device_communicator();
          auto* bytes = static_cast<unsigned char*>(source.data());
          for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<unsigned char>(i + comm.rank());
          const int peer = 1 - comm.rank();
          const LocalBuffer buffer = comm.register_local(bytes, 4096);
          comm.put_on_stream(device, peer, window, 0, buffer, 0, 4096);
          comm.signal_on_stream(device, peer, 5, 3);
          comm.wait_on_stream(device, 5, 3);
          const auto* got = static_cast<const unsigned char*>(window.data());
          for (int i = 0; i < 4096; ++i) ASSERT_EQ(got[i], static_cast<unsigned char>(i + peer)) << path << " byte " << i;
          EXPECT_THROW(comm.signal_on_stream(device, 2, 0), Error);
          comm.barrier();
        },
        config);
  }
}

TEST(PathPlan, LsaSizeSplitsAHost) {
  using namespace core;
  std::vector<RankFacts> facts(4);
  for (auto& f : facts) f.host = 7, f.lsa_limit = 2, f.gda_usable = f.gda_emulated = f.proxy_usable = 1;
  const std::vector<std::vector<Wish>> wishes(4, std::vector<Wish>(4, Wish::automatic));
  const PathPlan plan = plan_paths(facts, wishes, {});
  EXPECT_EQ(plan.path[0][1], Path::lsa);
  EXPECT_EQ(plan.path[0][2], Path::gda);
  EXPECT_EQ(plan.atomic, Path::gda);
  EXPECT_EQ(plan.lsa_size[3], 2);
  EXPECT_EQ(plan.lsa_first[3], 2);
}

TEST(PathPlan, AWishThatCannotBeMetNamesThePair) {
  using namespace core;
  std::vector<RankFacts> facts(2);
  facts[0].host = 1;
  facts[1].host = 2;
  const std::vector<std::vector<Wish>> wishes(2, std::vector<Wish>(2, Wish::automatic));
  EXPECT_THROW(plan_paths(facts, wishes, {}), Error);
  EXPECT_THROW(parse_wishes("lsa,nic", 2), Error);
  EXPECT_THROW(parse_wishes("lsa,gda,gda", 2), Error);
}

}  // namespace
}  // namespace marrow
