// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all tsan
// The CPU device itself: barriers with leavers, warp operations with 1 and 4 lanes and every tile size,
// shared memory, seeded schedules, the accuracy of deadlines, publish and observe, cells.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "groups_kernel.cuh"
#include "marrow/device.cuh"

namespace marrow {
namespace {

/// Lanes and seed of launches made while it lives.
class Schedule {
 public:
  Schedule(int lanes, std::uint64_t seed) {
    setenv("MARROW_CPU_LANES", std::to_string(lanes).c_str(), 1);
    setenv("MARROW_CPU_SEED", std::to_string(seed).c_str(), 1);
  }
  ~Schedule() {
    unsetenv("MARROW_CPU_LANES");
    unsetenv("MARROW_CPU_SEED");
  }
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;
};

class PlatformCpu : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int lanes() const { return std::get<0>(GetParam()); }
  Schedule schedule_{std::get<0>(GetParam()), static_cast<std::uint64_t>(std::get<1>(GetParam()))};
};

constexpr Place kCpu = Place::cpu();

void where_kernel(int* hits) {
  const int at = block_index() * block_size() + thread_index();
  hits[at] += grid_size() * 1000 + lane_index() * 10 + (warp_lanes() == 4 ? 1 : 0);
}
TEST_P(PlatformCpu, EveryThreadRunsOnceAndKnowsItsPlace) {
  std::vector<int> hits(3 * 6);
  launch(kCpu, 3, 6, 0, where_kernel, hits.data());
  for (int i = 0; i < 18; ++i) {
    EXPECT_EQ(hits[i], 3000 + i % 6 % lanes() * 10 + (lanes() == 4 ? 1 : 0)) << i;
  }
}

// Plain words on both sides of the barrier: a barrier that lets somebody through is a race and a wrong sum.
void barrier_kernel(int rounds, std::uint64_t* wrong) {
  auto* slot = dynamic_shared<std::uint64_t>();
  const int n = block_size();
  for (int r = 0; r < rounds; ++r) {
    slot[thread_index()] = static_cast<std::uint64_t>(r) * n + thread_index();
    block_sync();
    std::uint64_t sum = 0;
    for (int i = 0; i < n; ++i) sum += slot[i];
    const std::uint64_t want =
        static_cast<std::uint64_t>(r) * n * n + static_cast<std::uint64_t>(n) * (n - 1) / 2;
    if (sum != want) fetch_add_relaxed<Scope::system>(wrong, 1);
    block_sync();
  }
}
TEST_P(PlatformCpu, BarrierHoldsEverybody) {
  std::uint64_t wrong = 0;
  launch(kCpu, 2, 5, 5 * 8, barrier_kernel, 60, &wrong);
  EXPECT_EQ(wrong, 0u);
}

// Thread i leaves after i rounds, as threads of a GPU block return early.
void leaving_kernel(std::uint64_t* meetings) {
  for (int r = 0; r <= thread_index(); ++r) {
    block_sync();
    fetch_add_relaxed<Scope::system>(meetings, 1);
  }
}
TEST_P(PlatformCpu, ThreadsThatReturnNoLongerCount) {
  for (int again = 0; again < 20; ++again) {
    std::uint64_t meetings = 0;
    launch(kCpu, 1, 7, 0, leaving_kernel, &meetings);
    EXPECT_EQ(meetings, 28u);
  }
}

// 10 threads: with 4 lanes the last warp is cut to 2.
void warp_kernel(std::uint64_t* wrong) {
  const std::uint32_t all = full_mask();
  const int n = count_lanes(all);
  const auto expect = [&](bool good) {
    if (!good) fetch_add_relaxed<Scope::system>(wrong, 1);
  };
  auto* word = dynamic_shared<std::uint64_t>() + thread_index() / warp_lanes() * warp_lanes();
  for (int r = 0; r < 32; ++r) {
    const std::uint32_t odd = warp_ballot(all, (lane_index() + r) % 2);
    for (int lane = 0; lane < n; ++lane)
      expect((odd >> lane & 1) == static_cast<std::uint32_t>((lane + r) % 2));
    expect(odd >> n == 0);
    for (int from = 0; from < n; ++from)
      expect(warp_shuffle(all, lane_index() * 7 + r, from) == from * 7 + r);
    const std::uint32_t like_me = warp_match(all, (lane_index() + r) / 2);
    for (int lane = 0; lane < n; ++lane) {
      expect((like_me >> lane & 1) ==
             static_cast<std::uint32_t>((lane + r) / 2 == (lane_index() + r) / 2));
    }
    word[lane_index()] = static_cast<std::uint64_t>(r);
    warp_sync(all);
    for (int lane = 0; lane < n; ++lane) expect(word[lane] == static_cast<std::uint64_t>(r));
    warp_sync(all);
  }
}
TEST_P(PlatformCpu, WarpOperationsAgreeWithTheirDefinition) {
  std::uint64_t wrong = 0;
  launch(kCpu, 1, 10, 16 * 8, warp_kernel, &wrong);
  EXPECT_EQ(wrong, 0u);
}

void groups_kernel(std::uint64_t* wrong) { groups_agree(wrong); }
TEST_P(PlatformCpu, GroupsMeetAgreeAndHearTheirFirstMember) {
  for (const int threads : {1, 6, 37}) {
    std::uint64_t wrong = 0;
    launch(kCpu, 1, threads, kGroupsSharedBytes, groups_kernel, &wrong);
    EXPECT_EQ(wrong, 0u) << threads << " threads";
  }
}

struct Channel {
  std::uint64_t data[4] = {};
  std::uint64_t flag = 0;
  std::uint64_t taken = 0;
  Cell16 cell{};
};

DeviceCommunicator bare_communicator(ControlBlock* control) {
  DeviceCommunicator comm;
  comm.abi = kAbiVersion;
  comm.nranks = 2;
  comm.contexts = 1;
  comm.control = control;
  comm.wait_ns = 20'000'000'000;
  return comm;
}

// Block 0 writes plain words and publishes, block 1 observes and reads them.
void message_kernel(DeviceCommunicator comm, Channel* channel, std::uint64_t* wrong) {
  for (std::uint64_t r = 1; r <= 120; ++r) {
    if (block_index() == 0) {
      for (std::uint64_t i = 0; i < 4; ++i) channel->data[i] = r * 10 + i;
      if (r % 3 == 0) publish<Scope::system>(Store{&channel->flag, r});
      if (r % 3 == 1) publish_add<Scope::system>(&channel->flag, 1);
      if (r % 3 == 2) {
        Publication<Scope::system> out;
        out.store(&channel->flag, r);
      }
      (void)wait_until(comm, {}, [&] { return observe<Scope::system>(&channel->taken) == r; });
    } else {
      (void)wait_until(comm, {}, [&] { return observe<Scope::system>(&channel->flag) == r; });
      for (std::uint64_t i = 0; i < 4; ++i) {
        if (channel->data[i] != r * 10 + i) fetch_add_relaxed<Scope::system>(wrong, 1);
      }
      publish<Scope::system>(Store{&channel->taken, r});
    }
  }
}
TEST_P(PlatformCpu, PublishIsSeenByObserve) {
  auto control = std::make_unique<ControlBlock>();
  Channel channel;
  std::uint64_t wrong = 0;
  launch(kCpu, 2, 1, 0, message_kernel, bare_communicator(control.get()), &channel, &wrong);
  EXPECT_EQ(wrong, 0u);
}

// A cell's low half belongs to its high half, without any other order.
void cell_kernel(DeviceCommunicator comm, Channel* channel, std::uint64_t* wrong) {
  std::uint64_t last = 0;
  for (std::uint64_t r = 1; r <= 400; ++r) {
    if (block_index() == 0) {
      store_cell(&channel->cell, Cell16{r * 0x10001, r});
      (void)wait_until(comm, {}, [&] { return observe<Scope::system>(&channel->taken) == r; });
    } else {
      Cell16 seen{};
      (void)wait_until(comm, {}, [&] { return (seen = load_cell(&channel->cell)).high == r; });
      if (seen.low != r * 0x10001 || seen.high <= last) fetch_add_relaxed<Scope::system>(wrong, 1);
      last = seen.high;
      publish<Scope::system>(Store{&channel->taken, r});
    }
  }
}
TEST_P(PlatformCpu, CellsAreWhole) {
  auto control = std::make_unique<ControlBlock>();
  Channel channel;
  std::uint64_t wrong = 0;
  launch(kCpu, 2, 1, 0, cell_kernel, bare_communicator(control.get()), &channel, &wrong);
  EXPECT_EQ(wrong, 0u);
}

INSTANTIATE_TEST_SUITE_P(LanesAndSeeds, PlatformCpu,
                         testing::Combine(testing::Values(1, 4), testing::Values(0, 1, 7)),
                         [](const auto& which) {
                           return "lanes" + std::to_string(std::get<0>(which.param)) + "_seed" +
                                  std::to_string(std::get<1>(which.param));
                         });

TEST(PlatformCpuWait, EndsAtItsDeadlineAndNotBefore) {
  auto control = std::make_unique<ControlBlock>();
  const DeviceCommunicator comm = bare_communicator(control.get());
  for (const std::uint64_t ns : {1'000'000u, 5'000'000u, 20'000'000u}) {
    const std::uint64_t start = now_ns();
    EXPECT_EQ(wait_until(comm, Deadline{ns}, [] { return false; }), Status::timeout);
    const std::uint64_t took = now_ns() - start;
    EXPECT_GE(took, ns);
    EXPECT_LT(took, ns + 500'000'000u);  // the machine may be busy
  }
}

TEST(PlatformCpuWait, HostsWordsEndIt) {
  auto control = std::make_unique<ControlBlock>();
  const DeviceCommunicator comm = bare_communicator(control.get());
  const auto wait = [&](int peer) {
    return wait_until(
        comm, Deadline{5'000'000'000}, [] { return false; }, peer);
  };
  const auto set = [&](std::uint64_t state) {
    std::atomic_ref<std::uint64_t>(control->state).store(state, std::memory_order_release);
  };
  set(kControlAborted | kControlPeerFailed);
  EXPECT_EQ(wait(-1), Status::aborted);
  set(kControlPeerFailed);
  EXPECT_EQ(wait(-1), Status::peer_failed);
  control->failed[0] = 1u << 1;
  set(kControlMasked);
  EXPECT_EQ(wait(1), Status::peer_failed) << "a wait that names the failed rank";
  EXPECT_EQ(wait_until(
                comm, Deadline{2'000'000}, [] { return false; }, 0),
            Status::timeout)
      << "another rank";
  EXPECT_EQ(wait_until(
                comm, {}, [] { return true; }, 1),
            Status::ok)
      << "what has come counts, whoever failed";
  // Set while the wait is under way.
  set(kControlOk);
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    set(kControlAborted);
  });
  EXPECT_EQ(wait(0), Status::aborted);
  host.join();
}

TEST(PlatformCpuWait, AnAgreedFailureEndsNoLaterWait) {
  auto control = std::make_unique<ControlBlock>();
  std::uint64_t look[2] = {};
  DeviceCommunicator comm = bare_communicator(control.get());
  comm.look = look;
  for (int i = 0; i < 1000; ++i) {
    // A waiter has just claimed the look, what it will find is not there yet: the last one was a failure,
    // which the survivors have agreed on since.
    look[1] = kControlPeerFailed;
    look[0] = now_ns();
    ASSERT_EQ(control_status(comm), Status::ok);
  }
  std::atomic_ref<std::uint64_t>(control->state)
      .store(kControlPeerFailed, std::memory_order_release);
  EXPECT_EQ(wait_until(comm, Deadline{5'000'000'000}, [] { return false; }), Status::peer_failed);
}

void empty_kernel() {}
TEST(PlatformCpuLaunch, RefusesWhatItCannotRun) {
  const auto code = [](const Place& place, int grid, int block) {
    try {
      launch(place, grid, block, 0, empty_kernel);
      return Code::ok;
    } catch (const Error& error) {
      return error.code();
    }
  };
  EXPECT_EQ(code(Place::gpu(0), 1, 1), Code::invalid_argument);
  EXPECT_EQ(code(kCpu, 0, 1), Code::invalid_argument);
  EXPECT_EQ(code(kCpu, 1, 0), Code::invalid_argument);
  EXPECT_EQ(code(kCpu, 1 << 20, 1 << 20), Code::invalid_argument);
  EXPECT_EQ(code(kCpu, 1, 1), Code::ok);
}

}  // namespace
}  // namespace marrow
