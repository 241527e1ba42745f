// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// What goes wrong on the proxy path: descriptors that name what is not there, a full ring, a peer that
// fails, memory that goes away.
#include <gmock/gmock.h>

#include <chrono>
#include <random>
#include <thread>

#include "proxy/message.hpp"
#include "proxy/networks.hpp"
#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

using ::testing::HasSubstr;

Status post_raw(const DeviceCommunicator& comm, ProxyOperation op) {
  // The ring's own reserve, then a descriptor of our choice over the one it wrote.
  ProxyRing& ring = comm.proxy->rings[0];
  ProxyDescriptor d = proxy_encode(op);
  const std::uint64_t index = ring.producer++;
  --ring.credits;
  const std::uint64_t lap = proxy_lap(index, ring.log_size);
  for (int i = 0; i < 4; ++i) {
    store_cell(&ring.slots[index & ((1u << ring.log_size) - 1)].chunk[i],
               Cell16{d.chunk[i].low, d.chunk[i].high | lap});
  }
  if (op.peer < comm.nranks) comm.proxy->posted[op.peer] = index + 1;
  return Status::ok;
}

MARROW_KERNEL bad_offset(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                         int which, Status* out) {
  Gin gin(comm, 0);
  const int peer = 1 - comm.rank;
  const std::uint64_t end = window.bytes;
  Status status = Status::ok;
  // Past the pathless checks of an unchecked build: only the host can refuse.
  const detail::Knobs knobs;
  using detail::PathProxy;
  switch (which) {
    case 0:
      status = PathProxy::put(comm, 0, {peer, window, end - 7, Region(local), 0, 8}, {}, knobs);
      break;
    case 1:
      status = PathProxy::put(comm, 0, {peer, window, ~std::uint64_t{0} - 3, Region(local), 0, 8},
                              {}, knobs);
      break;
    case 2:
      status = PathProxy::put(comm, 0, {peer, window, 0, Region(local), local.bytes, 1}, {}, knobs);
      break;
    case 3:
      status = PathProxy::get(comm, 0, {peer, window, end, Region(local), 0, 1}, knobs);
      break;
    case 4: {
      const detail::Then then{&window, 4, 1, true};  // not aligned
      status = PathProxy::add(comm, 0, peer, then, knobs);
      break;
    }
    case 5: {
      detail::Knobs counting;
      counting.counter = 8;  // one too many
      status = PathProxy::put(comm, 0, {peer, window, 0, Region(local), 0, 8}, {}, counting);
      break;
    }
    case 6: {
      WindowHandle closed = window;
      closed.id = 77;
      status = PathProxy::put(comm, 0, {peer, closed, 0, Region(local), 0, 8}, {}, knobs);
      break;
    }
    case 7: {
      std::uint64_t old = 0;
      *out = PathProxy::fetch(comm, 0, peer, {window, end - 4, false, 1, 0}, &old, knobs);
      return;
    }
  }
  EXPECT_EQ(status, Status::ok);  // posted
  *out = gin.flush(peer);
}

TEST(ProxyFaults, WhatIsNotThereIsRefusedAndNothingIsWritten) {
  for (int which = 0; which < 8; ++which) {
    run_proxy_ranks(2, [&](ProxyRank& rank) {
      std::memset(rank.window.local, 0x5a, rank.window.bytes);
      rank.bootstrap().barrier();
      Status status = Status::ok;
      if (rank.rank() == 0) {
        rank.run(1, 1, bad_offset, rank.window, rank.local, which, &status);
        EXPECT_EQ(status, Status::invalid) << which;
        const auto errors = rank.errors();
        ASSERT_EQ(errors.size(), 1u) << which;
        EXPECT_EQ(errors[0].second.code(), Code::invalid_argument);
        EXPECT_THAT(errors[0].second.sentence(), HasSubstr("rank 1"));
      }
      rank.bootstrap().barrier();
      for (std::uint64_t i = 0; i < rank.window.bytes; ++i)
        ASSERT_EQ(rank.window.local[i], std::byte{0x5a});
      EXPECT_EQ(rank.rank() == 0, !rank.errors().empty());
    });
  }
}

MARROW_KERNEL good_put(DeviceCommunicator comm, WindowHandle window, int context, Status* out) {
  Gin gin(comm, context);
  Status status = gin.put_value(1 - comm.rank, window, 8, 5, SignalAdd{0, 1});
  *out = worse(status, gin.wait_signal(0, 1));
}

TEST(ProxyFaults, RandomDescriptorsHarmNobody) {
  run_proxy_ranks(2, [&](ProxyRank& rank) {
    std::mt19937_64 random(99 + rank.rank());
    std::memset(rank.local_block.host, 0, rank.local_block.bytes);
    rank.bootstrap().barrier();
    for (int i = 0; i < 900; ++i) {
      ProxyOperation op;
      op.opcode = static_cast<ProxyOpcode>(random() % 32);
      op.peer = static_cast<std::uint16_t>(random() % 4 ? random() : random() % 2);
      op.counter = static_cast<std::int32_t>(random() % 20) - 1;
      op.window = static_cast<std::uint32_t>(random());
      op.region = static_cast<std::uint32_t>(random());
      op.add_window = static_cast<std::uint32_t>(random());
      op.offset = random();
      op.source_offset = random();
      op.bytes = random();
      op.has_add = random() & 1;
      op.add_offset = random();
      op.add_n = random();
      op.result_slot = static_cast<std::uint32_t>(random());
      op.generation = 1;
      post_raw(rank.comm, op);
    }
    rank.bootstrap().barrier();
    // The other context still works.
    Status status = Status::invalid;
    rank.run(1, 1, good_put, rank.window, 1, &status);
    EXPECT_EQ(status, Status::ok);
    // Its ring may have been drained before the other one.
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (rank.errors().empty() && std::chrono::steady_clock::now() < late)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_FALSE(rank.errors().empty());
    for (std::uint64_t i = 0; i < rank.local_block.bytes; ++i)
      ASSERT_EQ(rank.local_block.host[i], std::byte{0});
  });
}

MARROW_KERNEL put_to_failed(DeviceCommunicator comm, WindowHandle window, Status* out) {
  Gin gin(comm, 0);
  std::uint64_t old = 0;
  (void)gin.put_value(2, window, 0, 1);
  out[0] = gin.flush(2);
  out[1] = gin.fetch_add(2, window, 0, 1, &old);
  (void)gin.put_value(1 - comm.rank, window, 8, 5, SignalAdd{0, 1});
  out[2] = worse(gin.flush(1 - comm.rank), gin.wait_signal(0, 1));
}

MARROW_KERNEL endless_fetch(DeviceCommunicator comm, WindowHandle window, Status* out) {
  Gin gin(comm, 0);
  std::uint64_t old = 0;
  Status status = Status::ok;
  while (status == Status::ok) status = gin.fetch_add(2, window, 0, 1, &old);
  *out = status;
}

TEST(ProxyFaults, OperationsToAFailedPeerEndAndOthersWorkOn) {
  run_proxy_ranks(3, [&](ProxyRank& rank) {
    if (rank.rank() != 2) {
      Status status = Status::ok;
      std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        rank.transport().fail_peer(2);
      });
      rank.run(1, 1, endless_fetch, rank.window, &status);
      killer.join();
      EXPECT_EQ(status, Status::peer_failed);
      Status after[3] = {};
      rank.run(1, 1, put_to_failed, rank.window, after);
      EXPECT_EQ(after[0], Status::peer_failed);
      EXPECT_EQ(after[1], Status::peer_failed);
      EXPECT_EQ(after[2], Status::ok);
      EXPECT_TRUE(rank.errors().empty());  // core knew already
    }
  });
}

TEST(ProxyFaults, AClosedBufferIsRefused) {
  run_proxy_ranks(2, [&](ProxyRank& rank) {
    Status status = Status::ok;
    rank.transport().deregister(100);
    rank.transport().deregister(100);  // a number nobody has: ignored
    if (rank.rank() == 0) {
      rank.run(1, 1, bad_offset, rank.window, rank.local, 2, &status);
      EXPECT_EQ(status, Status::invalid);
    }
    rank.transport().register_region(100, rank.local_block);
  });
}

TEST(ProxyFaults, WindowsComeAndGo) {
  run_proxy_ranks(2, [&](ProxyRank& rank) {
    for (std::uint32_t id = 10; id < 30; ++id) {
      const WindowHandle window = rank.make_window(id, 4096);
      Status status = Status::invalid;
      rank.run(1, 1, good_put, window, 0, &status);
      ASSERT_EQ(status, Status::ok);
      Gin gin(rank.comm, 0);
      gin.reset_signal(0);
      int value = 0;
      std::memcpy(&value, window.local + 8, 4);
      ASSERT_EQ(value, 5);
      rank.bootstrap().barrier();
      rank.transport().deregister(id);
    }
  });
}

TEST(Arrivals, WrapReorderAndDuplicates) {
  using proxy::Arrivals;
  std::mt19937 random(3);
  for (const std::uint32_t first : {0u, 0xffffff00u, 0x003fff80u}) {
    std::vector<std::uint32_t> order(600);
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = first + i;
    std::shuffle(order.begin(), order.end(), random);
    Arrivals arrivals(first);
    std::vector<bool> in(order.size());
    for (const std::uint32_t s : order) {
      const std::uint32_t low = proxy::make_immediate(5, s);
      ASSERT_EQ(proxy::stream_of(low), 5u);
      ASSERT_EQ(arrivals.expand(low), s);
      ASSERT_FALSE(arrivals.has(s));
      ASSERT_TRUE(arrivals.add(s));
      ASSERT_FALSE(arrivals.add(s));
      in[s - first] = true;
      std::uint32_t next = 0;
      while (next < in.size() && in[next]) ++next;
      ASSERT_EQ(arrivals.next(), first + next);
    }
    EXPECT_TRUE(arrivals.has_all(first, first + 600));
    EXPECT_FALSE(arrivals.has_all(first, first + 601));
  }
}

}  // namespace
}  // namespace marrow::test
