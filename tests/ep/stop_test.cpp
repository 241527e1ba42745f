// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan tsan
// Pieces of the kernels on memory of the test's own, one rank: what they do when something does not come.
#include <gtest/gtest.h>

#include <vector>

#include "ep/kernels/receive.cuh"
#include "ep/launches.hpp"

namespace marrow::ep {
namespace {

/// One rank of `ranks`, of which nobody else is there.
class Alone {
 public:
  explicit Alone(int ranks, int batches_in_flight = 2) {
    Config config;
    config.experts.assign(static_cast<std::size_t>(ranks), 2);
    config.max_tokens = 4;
    config.hidden = 64;
    config.top_k = 2;
    config.payload = Payload::bf16;
    config.batches_in_flight = batches_in_flight;
    config.deadline = std::chrono::milliseconds(20);
    const Config all = checked(config, ranks, false);
    shape = make_plan(all, 0, std::vector<bool>(static_cast<std::size_t>(ranks), false)).shape;
    const Plan plan = make_plan(all, 0, std::vector<bool>(static_cast<std::size_t>(ranks), false));
    memory.resize(plan.memory.total / 16 + 1);
    block.state = kControlOk;
    comm.rank = 0;
    comm.nranks = ranks;
    comm.control = &block;
    comm.wait_ns = 1000000000;
    window.local = reinterpret_cast<std::byte*>(memory.data());
    target = {Place::cpu(), 1, 1, nullptr};
    calls.reset(target, comm, window, shape, 0, nullptr, nullptr);
  }
  Control& control() { return *at<Control>(window.local, shape.control); }
  ep::Run run() {
    return ep::Run(comm, window, shape, shape.handles, 0, now_ns(), control().any_failed != 0);
  }
  bool given_up(int rank) { return at<std::uint32_t>(window.local, shape.given_up)[rank] != 0; }

  struct alignas(16) Wide {
    std::byte bytes[16];
  };
  const Launches& calls = launches(Place::cpu());
  Shape shape;
  DeviceCommunicator comm{};
  WindowHandle window{};
  Target target{};
  ControlBlock block{};
  std::vector<Wide> memory;
};

TEST(EpStop, AWeightThatDoesNotComeIsNoSilentZero) {
  Alone a(2);
  EXPECT_EQ(wait_for_weight(a.run(), 1, 0, 0), 0.0f);
  EXPECT_EQ(a.control().status, static_cast<std::uint64_t>(Status::timeout));
  EXPECT_TRUE(a.given_up(1));
}

TEST(EpStop, GivingUpChangesNothingWithinAKernel) {
  Alone a(2);
  const ep::Run r = a.run();
  r.set_failed(1, Status::timeout);
  const ep::Run again = a.run();  // of the same kernel, later: another block
  EXPECT_FALSE(r.is_failed(1));
  EXPECT_FALSE(again.is_failed(1));
  EXPECT_EQ(a.control().stopped, static_cast<std::uint64_t>(Status::timeout));
}

TEST(EpStop, ASourceInTimeForAnotherBlockIsWaitedForOnce) {
  Alone a(2);
  a.shape.deadline_ns = 3'000'000'000;
  ep::Run r = a.run();
  r.start = now_ns() - 2 * a.shape.deadline_ns;                 // its waits are used up
  *at<std::uint64_t>(a.window.local, a.shape.verdict + 8) = 2;  // batch 0: in time
  const std::uint64_t start = now_ns();
  for (int row = 0; row < 3; ++row) EXPECT_FALSE(wait_for_source(r, 1, [] { return false; }));
  EXPECT_LT(now_ns() - start, a.shape.deadline_ns);
  EXPECT_TRUE(a.given_up(1));
}

TEST(EpStop, ReplaysThatGoPastTheBatchesInFlightAreInvalid) {
  Alone a(1);
  std::vector<Alone::Wide> rows(64);
  const std::vector<std::int64_t> ids(8, -1);
  const DispatchInput in{.tokens = 4, .rows = rows.data(), .expert_ids = ids.data()};
  const auto send = [&] {
    a.calls.dispatch(a.target, a.comm, a.window, a.shape, in, {}, a.shape.handles, Phase::send);
    return static_cast<Status>(a.control().status);
  };
  EXPECT_EQ(send(), Status::ok);
  EXPECT_EQ(send(), Status::ok);
  EXPECT_EQ(send(), Status::invalid);  // F is 2
  Alone b(1);
  b.calls.dispatch(b.target, b.comm, b.window, b.shape, {}, {}, b.shape.handles, Phase::receive);
  EXPECT_EQ(static_cast<Status>(b.control().status), Status::invalid);
  Alone c(1);
  std::vector<Alone::Wide> out(64);
  for (int i = 0; i < 3; ++i)
    c.calls.combine(c.target, c.comm, c.window, c.shape, {.rows = rows.data()}, {}, c.shape.handles,
                    Phase::send);
  EXPECT_EQ(static_cast<Status>(c.control().status), Status::invalid);
}

}  // namespace
}  // namespace marrow::ep
