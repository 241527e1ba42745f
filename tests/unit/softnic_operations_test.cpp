// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan-all
// Every operation of softnic between two queue pairs of one process: data, completions, order.
#include <gtest/gtest.h>

#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

TEST(SoftnicOperations, WriteReadNopDump) {
  Pair pair("ops");
  std::vector<std::uint8_t> source(70000), target(70000), back(70000);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint8_t>(i * 7 + 1);
  auto* ls = pair.a.region(source.data(), source.size());
  auto* lb = pair.a.region(back.data(), back.size());
  auto* rt = pair.b.region(target.data(), target.size());
  pair.a.write(source.data() + 3, 65537, ls->lkey, Endpoint::u64(target.data() + 5), rt->rkey);
  const Completed written = pair.a.cq.poll();
  ASSERT_TRUE(written.ok()) << int(written.syndrome);
  EXPECT_EQ(written.counter, 0);
  EXPECT_EQ(0, std::memcmp(target.data() + 5, source.data() + 3, 65537));
  EXPECT_EQ(target[4], 0);
  EXPECT_EQ(target[5 + 65537], 0);
  pair.a.read(back.data() + 1, 65537, lb->lkey, Endpoint::u64(target.data() + 5), rt->rkey);
  const Completed got = pair.a.cq.poll();
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.bytes, 65537u);
  EXPECT_EQ(0, std::memcmp(back.data() + 1, source.data() + 3, 65537));
  pair.a.nop();
  EXPECT_TRUE(pair.a.cq.poll().ok());
  Endpoint::Wqe dump;
  dump.add(Endpoint::data(source.data(), 8, ls->lkey));
  pair.a.post(dump, kDump);
  EXPECT_TRUE(pair.a.cq.poll().ok());
}

TEST(SoftnicOperations, InlineAndSeveralBuffers) {
  Pair pair("inline");
  std::vector<std::uint8_t> target(256);
  std::vector<std::uint8_t> source(64);
  for (int i = 0; i < 64; ++i) source[i] = static_cast<std::uint8_t>(100 + i);
  auto* ls = pair.a.region(source.data(), source.size());
  auto* rt = pair.b.region(target.data(), target.size());
  for (std::uint32_t bytes : {0u, 1u, 8u, 12u, 13u, 24u, 28u}) {
    std::fill(target.begin(), target.end(), 0);
    Endpoint::Wqe w;
    w.add(Endpoint::remote(Endpoint::u64(target.data() + 8), rt->rkey));
    const std::uint32_t header = to_big32(bytes | kInlineFlag);
    std::memcpy(w.bytes + 32, &header, 4);
    std::memcpy(w.bytes + 36, source.data(), bytes);
    w.ds = 2 + (bytes + 4 + 15) / 16;
    pair.a.post(w, kWrite);
    ASSERT_TRUE(pair.a.cq.poll().ok()) << bytes;
    EXPECT_EQ(0, std::memcmp(target.data() + 8, source.data(), bytes));
    EXPECT_EQ(target[8 + bytes], 0);
  }
  // Gather of three, scatter of two.
  Endpoint::Wqe gather;
  gather.add(Endpoint::remote(Endpoint::u64(target.data()), rt->rkey))
      .add(Endpoint::data(source.data(), 5, ls->lkey))
      .add(Endpoint::data(source.data() + 10, 11, ls->lkey))
      .add(Endpoint::data(source.data() + 30, 1, ls->lkey));
  pair.a.post(gather, kWrite);
  ASSERT_TRUE(pair.a.cq.poll().ok());
  EXPECT_EQ(target[4], 104);
  EXPECT_EQ(target[5], 110);
  EXPECT_EQ(target[16], 130);
  Endpoint::Wqe scatter;
  scatter.add(Endpoint::remote(Endpoint::u64(target.data()), rt->rkey))
      .add(Endpoint::data(source.data() + 40, 5, ls->lkey))
      .add(Endpoint::data(source.data() + 50, 12, ls->lkey));
  pair.a.post(scatter, kRead);
  ASSERT_TRUE(pair.a.cq.poll().ok());
  EXPECT_EQ(source[44], 104);
  EXPECT_EQ(source[50], 110);
  EXPECT_EQ(source[61], 130);
}

TEST(SoftnicOperations, Atomics) {
  for (const char* options : {"", "atomics=hca"}) {
    Pair pair("atomics", options);
    alignas(16) std::uint64_t word[2] = {40, 0};
    alignas(16) std::uint64_t old[2] = {};
    auto* lo = pair.a.region(old, sizeof old);
    auto* rw = pair.b.region(word, sizeof word);
    const std::uint64_t at = Endpoint::u64(word);
    pair.a.fetch_add(old, lo->lkey, at, rw->rkey, 2);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    EXPECT_EQ(old[0], 40u);
    EXPECT_EQ(word[0], 42u);
    const auto swap = [&](std::uint64_t compare, std::uint64_t value) {
      Endpoint::Wqe w;
      w.add(Endpoint::remote(at, rw->rkey))
          .add(AtomicSegment{to_big64(value), to_big64(compare)})
          .add(Endpoint::data(old, 8, lo->lkey));
      pair.a.post(w, kCompareSwap);
      ASSERT_TRUE(pair.a.cq.poll().ok());
    };
    swap(41, 7);
    EXPECT_EQ(old[0], 42u);
    EXPECT_EQ(word[0], 42u);
    swap(42, 7);
    EXPECT_EQ(word[0], 7u);
    // Masked: two 32-bit fields in one 64-bit add; swap of the low byte only.
    word[0] = 0x00000001ffffffffull;
    Endpoint::Wqe fields;
    fields.add(Endpoint::remote(at, rw->rkey))
        .add(MaskedFetchAdd8Segment{to_big64(0x0000000500000002ull), to_big64(0x80000000ull)})
        .add(Endpoint::data(old, 8, lo->lkey));
    pair.a.post(fields, kMaskedFetchAdd, kCompletionAlways, kMasked8);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    EXPECT_EQ(word[0], 0x0000000600000001ull);
    Endpoint::Wqe small;
    small.add(Endpoint::remote(at + 4, rw->rkey))
        .add(MaskedFetchAdd4Segment{to_big32(3), 0, 0})
        .add(Endpoint::data(old, 4, lo->lkey));
    pair.a.post(small, kMaskedFetchAdd, kCompletionAlways, kMasked4);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    EXPECT_EQ(word[0], 0x0000000900000001ull);
    Endpoint::Wqe masked;
    masked.add(Endpoint::remote(at, rw->rkey))
        .add(MaskedCompareSwap8Segment{to_big64(0xaa), to_big64(0x0000000900000000ull),
                                       to_big64(0xff), to_big64(0xffffffff00000000ull)})
        .add(Endpoint::data(old, 8, lo->lkey));
    ASSERT_EQ(masked.ds, 5u);
    pair.a.post(masked, kMaskedCompareSwap, kCompletionAlways, kMasked8);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    EXPECT_EQ(word[0], 0x00000009000000aaull);
    Endpoint::Wqe masked4;
    masked4.add(Endpoint::remote(at, rw->rkey))
        .add(MaskedCompareSwap4Segment{to_big32(0x55), to_big32(0xaa), to_big32(0xffffffff),
                                       to_big32(0xff)})
        .add(Endpoint::data(old, 4, lo->lkey));
    pair.a.post(masked4, kMaskedCompareSwap, kCompletionAlways, kMasked4);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    EXPECT_EQ(word[0], 0x0000000900000055ull);
    EXPECT_EQ(static_cast<std::uint32_t>(old[0]), 0xaau);
  }
}

// The pattern of put + signal: data of WRITEs is visible to whoever sees the add.
TEST(SoftnicOperations, SignalAfterWrite) {
  QpOptions quiet;
  Pair pair("signal", "", quiet);
  std::vector<std::uint64_t> source(512), target(512);
  alignas(8) std::uint64_t signal = 0, sink = 0;
  auto* ls = pair.a.region(source.data(), source.size() * 8);
  auto* lk = pair.a.region(&sink, 8);
  auto* rt = pair.b.region(target.data(), target.size() * 8);
  auto* rs = pair.b.region(&signal, 8);
  std::atomic<std::uint64_t> seen{0};
  std::thread receiver([&] {
    for (std::uint64_t round = 1; round <= 200; ++round) {
      while (std::atomic_ref<std::uint64_t>(signal).load(std::memory_order_acquire) < round) {
        std::this_thread::yield();
      }
      for (std::uint64_t value : target) ASSERT_EQ(value, round);
      seen.store(round, std::memory_order_release);
    }
  });
  for (std::uint64_t round = 1; round <= 200; ++round) {
    for (auto& value : source) value = round;
    pair.a.write(source.data(), 4096, ls->lkey, Endpoint::u64(target.data()), rt->rkey,
                 kCompletionOnError);
    pair.a.fetch_add(&sink, lk->lkey, Endpoint::u64(&signal), rs->rkey, 1);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    while (seen.load(std::memory_order_acquire) < round) std::this_thread::yield();
  }
  receiver.join();
}

TEST(SoftnicOperations, WriteImmediateConsumesAReceive) {
  QpOptions receiver;
  receiver.receive_queue = true;
  Pair pair("imm", "", {}, receiver);
  alignas(8) std::uint64_t source = 0x1122334455667788ull, target = 0;
  auto* ls = pair.a.region(&source, 8);
  auto* rt = pair.b.region(&target, 8);
  for (std::uint32_t i = 0; i < 40; ++i) {
    Endpoint::Wqe w;
    w.add(Endpoint::remote(Endpoint::u64(&target), rt->rkey))
        .add(Endpoint::data(&source, 8, ls->lkey));
    pair.a.post(w, kWriteImmediate, kCompletionAlways, 0, 0xabc0 + i);
    if (i % 8 == 3)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // receiver not ready
    pair.b.post_receive();
    const Completed received = pair.b.receive_cq.poll();
    ASSERT_TRUE(received.arrived);
    EXPECT_EQ(received.opcode, kResponderWriteImmediate);
    EXPECT_EQ(received.immediate, 0xabc0 + i);
    EXPECT_EQ(received.bytes, 8u);
    EXPECT_EQ(received.counter, static_cast<std::uint16_t>(i));
    EXPECT_EQ(target, source);
    ASSERT_TRUE(pair.a.cq.poll().ok());
  }
}

TEST(SoftnicOperations, WaitHoldsTheCompanion) {
  Pair main("waitmain");
  QpOptions companion_options;
  Endpoint companion(main.job, "", companion_options);
  companion.connect(companion.qpn, companion.lid());  // to itself, as counters are
  alignas(8) std::uint64_t counter = 0, sink = 0;
  auto* lk = companion.region(&sink, 8);
  auto* rc = companion.region(&counter, 8);
  const auto count_after = [&](std::uint16_t index) {
    Endpoint::Wqe w;
    WaitSegment wait{0, to_big32(index), to_big32(main.a.cq.number)};
    w.add(wait);
    companion.post(w, kWait, kCompletionOnError);
    companion.fetch_add(&sink, lk->lkey, Endpoint::u64(&counter), rc->rkey, 1);
  };
  count_after(0);
  count_after(2);
  EXPECT_FALSE(companion.cq.poll(std::chrono::milliseconds(20)).arrived);
  EXPECT_EQ(std::atomic_ref(counter).load(), 0u);
  main.a.nop();
  ASSERT_TRUE(companion.cq.poll().ok());
  EXPECT_EQ(std::atomic_ref(counter).load(), 1u);
  EXPECT_FALSE(companion.cq.poll(std::chrono::milliseconds(20)).arrived);
  main.a.nop();
  main.a.nop();
  ASSERT_TRUE(companion.cq.poll().ok());
  EXPECT_EQ(std::atomic_ref(counter).load(), 2u);
}

TEST(SoftnicOperations, DoorbellConventions) {
  for (const bool record : {true, false}) {
    QpOptions options;
    options.record = record;
    Pair pair("bells", "", options);
    using Bell = Endpoint::Bell;
    for (const Bell bell : {Bell::both, Bell::record_only, Bell::next_index, Bell::last_wqe}) {
      if (!record && bell == Bell::record_only) continue;
      for (int i = 0; i < 100; ++i) {
        Endpoint::Wqe w;
        pair.a.post(w, kNop, kCompletionAlways, 0, 0, false);
        pair.a.ring(bell);
        ASSERT_TRUE(pair.a.cq.poll().ok()) << int(bell) << " " << i;
      }
    }
    // Batches under one doorbell, and a doorbell of the past.
    for (int i = 0; i < 32; ++i) {
      Endpoint::Wqe w;
      pair.a.post(w, kNop, kCompletionAlways, 0, 0, false);
    }
    pair.a.ring(Bell::next_index);
    for (int i = 0; i < 32; ++i) ASSERT_TRUE(pair.a.cq.poll().ok());
    std::atomic_ref<std::uint64_t>(*static_cast<std::uint64_t*>(pair.a.uar->reg_addr))
        .store(doorbell_value(pair.a.qpn, static_cast<std::uint16_t>(pair.a.producer - 5)),
               std::memory_order_release);
    EXPECT_FALSE(pair.a.cq.poll(std::chrono::milliseconds(5)).arrived);
    EXPECT_EQ(pair.a.state(), static_cast<unsigned>(kReadyToSend));
  }
}

TEST(SoftnicOperations, IndexWrapsInBothQueueKinds) {
  for (const bool collapsed : {false, true}) {
    QpOptions options;
    options.collapsed = collapsed;
    options.start = 0xffe0;
    options.start_by_command = collapsed;
    Pair pair("wrap", collapsed ? "" : "start_index=0xffe0", options, options);
    alignas(8) std::uint64_t word = 0, sink = 0;
    auto* lk = pair.a.region(&sink, 8);
    auto* rw = pair.b.region(&word, 8);
    for (std::uint64_t i = 0; i < 200; ++i) {
      const auto index = pair.a.fetch_add(&sink, lk->lkey, Endpoint::u64(&word), rw->rkey, 1);
      EXPECT_EQ(index, static_cast<std::uint16_t>(0xffe0 + i));
      const Completed done = collapsed ? pair.a.cq.poll_counter(index) : pair.a.cq.poll();
      ASSERT_TRUE(done.ok()) << i << " syndrome " << int(done.syndrome);
      EXPECT_EQ(done.counter, index);
      ASSERT_EQ(sink, i);
    }
    // Full ring at once, across the wrap of the ring itself.
    std::uint16_t last = 0;
    for (int i = 0; i < 32; ++i) {
      Endpoint::Wqe w;
      last = pair.a.post(w, kNop, kCompletionAlways, 0, 0, false);
    }
    pair.a.ring();
    if (collapsed) {
      ASSERT_TRUE(pair.a.cq.poll_counter(last).ok());
    } else {
      for (int i = 0; i < 32; ++i) ASSERT_TRUE(pair.a.cq.poll().ok());
    }
  }
}

TEST(SoftnicOperations, LongWqeWrapsInTheRing) {
  Pair pair("longwqe");
  std::vector<std::uint8_t> target(1024), source(1024);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint8_t>(i);
  auto* rt = pair.b.region(target.data(), target.size());
  for (int round = 0; round < 40; ++round) {
    const std::uint32_t bytes = 19 * 16 - 32 - 4;  // ds 19: five blocks
    Endpoint::Wqe w;
    w.add(Endpoint::remote(Endpoint::u64(target.data()), rt->rkey));
    const std::uint32_t header = to_big32(bytes | kInlineFlag);
    std::memcpy(w.bytes + 32, &header, 4);
    std::memcpy(w.bytes + 36, source.data() + round, bytes);
    w.ds = 19;
    pair.a.post(w, kWrite);
    ASSERT_TRUE(pair.a.cq.poll().ok());
    ASSERT_EQ(0, std::memcmp(target.data(), source.data() + round, bytes));
  }
}

TEST(SoftnicOperations, AddressSpaceOtherThanPointers) {
  Pair pair("iova");
  std::vector<std::uint8_t> source(64, 9), target(64, 0);
  auto* ls = pair.a.region_at(source.data(), 64, 0);
  auto* rt = pair.b.region_at(target.data(), 64, 0xffff000000000000ull);
  Endpoint::Wqe w;
  w.add(Endpoint::remote(0xffff000000000010ull, rt->rkey))
      .add(Endpoint::data(std::uint64_t{16}, 32, ls->lkey));
  pair.a.post(w, kWrite);
  ASSERT_TRUE(pair.a.cq.poll().ok());
  EXPECT_EQ(target[15], 0);
  EXPECT_EQ(target[16], 9);
  EXPECT_EQ(target[47], 9);
  EXPECT_EQ(target[48], 0);
}

TEST(SoftnicOperations, RealAtomicsCountWithCpuThreads) {
  Pair one("threads");
  Endpoint two_a(one.job), two_b(one.job);
  two_a.connect(two_b.qpn, two_b.lid());
  two_b.connect(two_a.qpn, two_a.lid());
  alignas(8) std::uint64_t word = 0;
  alignas(8) std::uint64_t sinks[2] = {};
  constexpr std::uint64_t kAdds = 2000;
  const auto add = [&](Endpoint& from, Endpoint& to, std::uint64_t& sink) {
    auto* lk = from.region(&sink, 8);
    auto* rw = to.region(&word, 8);
    for (std::uint64_t i = 0; i < kAdds; ++i) {
      from.fetch_add(&sink, lk->lkey, Endpoint::u64(&word), rw->rkey, 1);
      ASSERT_TRUE(from.cq.poll().ok());
    }
  };
  std::thread first([&] { add(one.a, one.b, sinks[0]); });
  std::thread second([&] { add(two_a, two_b, sinks[1]); });
  for (std::uint64_t i = 0; i < kAdds; ++i) std::atomic_ref(word).fetch_add(1);
  first.join();
  second.join();
  EXPECT_EQ(word, 3 * kAdds);
}

}  // namespace
}  // namespace marrow::softnic_test
