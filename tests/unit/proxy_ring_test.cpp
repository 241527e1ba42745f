// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan-all
// The ring alone, without network or thread pool: what producers encode is what the reader decodes,
// nothing is read twice or torn across laps, a payload stored before a descriptor is there with it,
// a full ring holds producers back and a timeout leaves nothing behind.
//
// Built with MARROW_PLANT_RING_PUBLISH or MARROW_PLANT_RING_DRAIN it must fail under ThreadSanitizer.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "marrow/device.cuh"
#include "memory/arena.hpp"
#include "proxy/device_rings.hpp"
#include "proxy/ring_reader.hpp"

namespace marrow::proxy {
namespace {

TEST(ProxyDescriptors, RoundTrip) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 2000; ++round) {
    ProxyOperation op;
    op.opcode = static_cast<ProxyOpcode>(1 + random() % 7);
    op.strong = random() & 1;
    op.has_add = random() & 1;
    op.peer = static_cast<std::uint16_t>(random());
    op.counter = static_cast<std::int32_t>(random() % (kProxyMaxCounters + 1)) - 1;
    op.window = static_cast<std::uint32_t>(random() % kProxyMaxWindows);
    op.add_window = static_cast<std::uint32_t>(random() % kProxyMaxRegions);
    op.region = static_cast<std::uint32_t>(random() % kProxyMaxRegions);
    const bool fetch =
        op.opcode == ProxyOpcode::fetch_add || op.opcode == ProxyOpcode::compare_swap;
    if (op.opcode == ProxyOpcode::put_value) {
      op.offset = random() >> 8;
      op.bytes = 1 + random() % 24;
      for (auto& word : op.value) word = random();
      op.add_n = random() >> 1;
      op.add_offset = random() >> 1;
    } else if (fetch) {
      op.offset = random() >> 1;
      op.result_slot = static_cast<std::uint32_t>(random() % kProxyFetchSlots);
      op.generation = static_cast<std::uint32_t>(random());
      op.operand = random();
      op.compare = random();
    } else {
      op.offset = random();
      op.source_offset = random();
      op.bytes = random();
      op.add_n = random();
      op.add_offset = random() >> 1;
    }
    ProxyDescriptor d = proxy_encode(op);
    for (ProxyChunk& chunk : d.chunk) {
      ASSERT_EQ(chunk.high & kProxyLapBit, 0u);
      if (round & 1) chunk.high |= kProxyLapBit;
    }
    const ProxyOperation back = proxy_decode(d);
    ASSERT_EQ(back.opcode, op.opcode);
    ASSERT_EQ(back.strong, op.strong);
    ASSERT_EQ(back.has_add, op.has_add);
    ASSERT_EQ(back.peer, op.peer);
    ASSERT_EQ(back.counter, op.counter);
    ASSERT_EQ(back.window, op.window);
    ASSERT_EQ(back.add_window, op.add_window);
    ASSERT_EQ(back.region, op.region);
    ASSERT_EQ(back.offset, op.offset);
    ASSERT_EQ(back.source_offset, op.source_offset);
    ASSERT_EQ(back.bytes, op.bytes);
    ASSERT_EQ(back.add_n, op.add_n);
    ASSERT_EQ(back.add_offset, op.add_offset);
    ASSERT_EQ(back.operand, op.operand);
    ASSERT_EQ(back.compare, op.compare);
    ASSERT_EQ(back.result_slot, op.result_slot);
    ASSERT_EQ(back.generation, op.generation);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(back.value[i], op.value[i]);
  }
}

TEST(ProxyDescriptors, TheRingOfAPeerIsFoundWithoutDividing) {
  for (std::uint32_t threads = 1; threads <= 64; ++threads) {
    for (std::uint32_t peer = 0; peer < 65536; ++peer)
      ASSERT_EQ(proxy_thread_of(peer, threads, proxy_magic(threads)), peer % threads);
  }
}

/// A communicator of one rank whose ring nobody drains but the test.
struct Bench {
  explicit Bench(std::uint32_t log_size, std::uint64_t first, Sharing sharing = Sharing::device)
      : arena(memory::Arena::create(Place::cpu())) {
    Requirements r;
    r.sharing = sharing;
    r.first_index = first;
    const memory::Block counters = arena->allocate(4096, Memory::host);
    rings = std::make_unique<DeviceRings>(*arena, r, counters, 1, 1, log_size, 0);
    comm.abi = kAbiVersion;
    comm.nranks = 1;
    comm.contexts = 1;
    comm.sharing = sharing;
    comm.wait_ns = 5'000'000'000;
    comm.control =
        reinterpret_cast<ControlBlock*>(arena->allocate(sizeof(ControlBlock), Memory::host).host);
    comm.proxy = rings->device();
  }
  RingReader reader() const {
    return {rings->slots(0, 0), rings->log_size(), rings->first_index()};
  }
  void consumed(std::uint64_t index) {
    std::atomic_ref(*rings->consumed(0, 0)).store(index, std::memory_order_release);
  }

  std::unique_ptr<memory::Arena> arena;
  std::unique_ptr<DeviceRings> rings;
  DeviceCommunicator comm;
};

Status post_put(const DeviceCommunicator& comm, const WindowHandle& window, const Region& source,
                std::uint64_t offset, std::uint64_t bytes, Deadline deadline = {}) {
  detail::Knobs knobs;
  knobs.deadline = deadline;
  return detail::PathProxy::put(comm, 0, {0, window, offset, source, offset, bytes}, {}, knobs);
}

/// Producers write a payload each time and post its place; the reader checks the payload.
void producers_and_reader(std::uint32_t log_size, std::uint64_t first, int producers, int rounds,
                          Sharing sharing) {
  Bench bench(log_size, first, sharing);
  WindowHandle window;
  window.id = 5;
  std::vector<std::uint64_t> payload(static_cast<std::size_t>(producers) * rounds);
  LocalBufferHandle local;
  local.id = 77;
  const Region source(local);
  std::vector<std::thread> threads;
  for (int p = 0; p < producers; ++p) {
    threads.emplace_back([&, p] {
      for (int i = 0; i < rounds; ++i) {
        const auto at = static_cast<std::uint64_t>(p) * rounds + i;
        payload[at] = at * 3 + 1;  // an ordinary store: the ring has to publish it
        ASSERT_EQ(post_put(bench.comm, window, source, at * 8, 8), Status::ok);
      }
    });
  }
  RingReader reader = bench.reader();
  std::vector<int> next(producers);
  ProxyDescriptor d;
  for (int got = 0; got < producers * rounds;) {
    if (!reader.next(&d)) {
      bench.consumed(reader.index());
      std::this_thread::yield();
      continue;
    }
    const ProxyOperation op = proxy_decode(d);
    ASSERT_EQ(op.opcode, ProxyOpcode::put);
    ASSERT_EQ(op.window, 5u);
    ASSERT_EQ(op.region, 77u);
    const std::uint64_t at = op.offset / 8;
    ASSERT_LT(at, payload.size());
    ASSERT_EQ(payload[at], at * 3 + 1);
    ASSERT_EQ(static_cast<int>(at % rounds), next[at / rounds]++)
        << "a producer's descriptors out of order";
    // In lumps, so that the ring is often full and often empty.
    if (++got % 7 == 0) bench.consumed(reader.index());
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reader.index(), first + static_cast<std::uint64_t>(producers) * rounds);
  EXPECT_FALSE(reader.next(&d));
  EXPECT_EQ(detail::PathProxy::ticket(bench.comm, 0, 0), reader.index());
}

TEST(ProxyRing, FourProducers) { producers_and_reader(5, 0, 4, 3000, Sharing::device); }
TEST(ProxyRing, OneExclusiveProducer) { producers_and_reader(5, 0, 1, 5000, Sharing::thread); }
TEST(ProxyRing, StartsInTheMiddleOfALap) { producers_and_reader(5, 13, 3, 500, Sharing::device); }
TEST(ProxyRing, StartsInAnOddLap) { producers_and_reader(4, 16 + 5, 3, 500, Sharing::block); }
TEST(ProxyRing, CrossesSixteenBits) {
  producers_and_reader(5, 65536 - 50, 2, 200, Sharing::device);
}
TEST(ProxyRing, CrossesThirtyTwoBits) {
  producers_and_reader(5, (std::uint64_t{1} << 32) - 45, 2, 200, Sharing::device);
}

TEST(ProxyRing, AFullRingTimesOutAndNothingIsPosted) {
  for (const Sharing sharing : {Sharing::device, Sharing::thread}) {
    Bench bench(5, 9, sharing);
    WindowHandle window;
    LocalBufferHandle local;
    for (int i = 0; i < 32; ++i) ASSERT_EQ(post_put(bench.comm, window, local, i, 1), Status::ok);
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(post_put(bench.comm, window, local, 99, 1, Deadline{1'000'000}), Status::timeout);
    }
    ASSERT_EQ(detail::PathProxy::ticket(bench.comm, 0, 0), 9u + 32);
    RingReader reader = bench.reader();
    ProxyDescriptor d;
    for (int i = 0; i < 32; ++i) {
      ASSERT_TRUE(reader.next(&d));
      ASSERT_EQ(proxy_decode(d).offset, static_cast<std::uint64_t>(i));
    }
    ASSERT_FALSE(reader.next(&d));
    bench.consumed(reader.index());
    for (int i = 0; i < 32; ++i)
      ASSERT_EQ(post_put(bench.comm, window, local, 50 + i, 1), Status::ok);
    ASSERT_EQ(post_put(bench.comm, window, local, 99, 1, Deadline{1'000'000}), Status::timeout);
    for (int i = 0; i < 32; ++i) {
      ASSERT_TRUE(reader.next(&d));
      ASSERT_EQ(proxy_decode(d).offset, static_cast<std::uint64_t>(50 + i));
    }
  }
}

TEST(ProxyRing, PutWithSignalAndValueWithSignalAreOneDescriptor) {
  Bench bench(5, 0);
  WindowHandle window, sync;
  window.id = 1;
  sync.id = 2;
  LocalBufferHandle local;
  const detail::Then then{&sync, 16, 5, true};
  ASSERT_EQ(detail::PathProxy::put(bench.comm, 0, {0, window, 8, Region(local), 0, 100}, then, {}),
            Status::ok);
  const std::uint64_t value[3] = {1, 2, 3};
  ASSERT_EQ(detail::PathProxy::put_value(bench.comm, 0, 0, window, 8, value, 24, then, {}),
            Status::ok);
  EXPECT_EQ(detail::PathProxy::ticket(bench.comm, 0, 0), 2u);
  // An add of more than 63 bits takes its own descriptor.
  const detail::Then large{&sync, 16, ~std::uint64_t{0}, true};
  ASSERT_EQ(detail::PathProxy::put_value(bench.comm, 0, 0, window, 8, value, 24, large, {}),
            Status::ok);
  EXPECT_EQ(detail::PathProxy::ticket(bench.comm, 0, 0), 4u);
  RingReader reader = bench.reader();
  ProxyDescriptor d;
  for (const ProxyOpcode opcode :
       {ProxyOpcode::put, ProxyOpcode::put_value, ProxyOpcode::put_value, ProxyOpcode::add}) {
    ASSERT_TRUE(reader.next(&d));
    ASSERT_EQ(proxy_decode(d).opcode, opcode);
  }
  EXPECT_EQ(proxy_decode(d).add_n, ~std::uint64_t{0});
}

TEST(ProxyRing, FetchSlotsAreGivenBackAfterATimeout) {
  Bench bench(10, 0);
  WindowHandle window;
  detail::Knobs knobs;
  knobs.deadline = Deadline{20'000};
  std::uint64_t old = 0;
  for (std::uint32_t i = 0; i < kProxyFetchSlots + 10; ++i) {
    ASSERT_EQ(detail::PathProxy::fetch(bench.comm, 0, 0, {window, 0, false, 1, 0}, &old, knobs),
              Status::timeout);
  }
  // A result of an earlier generation wakes nobody; the right one does.
  std::thread answer([&] {
    RingReader reader = bench.reader();
    ProxyDescriptor d;
    for (std::uint32_t i = 0; i < kProxyFetchSlots + 10; ++i) ASSERT_TRUE(reader.next(&d));
    while (!reader.next(&d)) std::this_thread::yield();
    const ProxyOperation op = proxy_decode(d);
    ProxyChunk* result = bench.rings->results(0, 0) + op.result_slot;
    store_cell(result, Cell16{1, op.generation - 1});
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    store_cell(result, Cell16{42, op.generation});
  });
  knobs.deadline = {};
  EXPECT_EQ(detail::PathProxy::fetch(bench.comm, 0, 0, {window, 0, false, 1, 0}, &old, knobs),
            Status::ok);
  EXPECT_EQ(old, 42u);
  answer.join();
}

}  // namespace
}  // namespace marrow::proxy
