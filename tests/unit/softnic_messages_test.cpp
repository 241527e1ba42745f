// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// SEND and its receives at the level of WQEs, and what a responder must report when they do not fit.
#include <gtest/gtest.h>

#include <numeric>

#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

constexpr QpOptions kReceiver{.receive_queue = true, .receive_log_stride = 2};

struct SendPair {
  explicit SendPair(const char* name, QpOptions sender = {}, QpOptions receiver = kReceiver)
      : pair(name, "", sender, receiver) {
    lkey = pair.a.region(from.data(), from.size())->lkey;
    rkey = pair.b.region(to.data(), to.size())->lkey;
    std::iota(from.begin(), from.end(), std::uint8_t{1});
  }
  std::uint16_t send(std::uint32_t bytes, std::uint8_t opcode = kSend, std::uint32_t immediate = 0,
                     std::uint8_t flags = kCompletionAlways) {
    Endpoint::Wqe w;
    if (bytes > 0) w.add(Endpoint::data(from.data(), bytes, lkey));
    return pair.a.post(w, opcode, flags, 0, immediate);
  }
  DataSegment into(std::size_t at, std::uint32_t bytes) {
    return Endpoint::data(to.data() + at, bytes, rkey);
  }
  std::vector<std::uint8_t> from = std::vector<std::uint8_t>(1 << 17);
  std::vector<std::uint8_t> to = std::vector<std::uint8_t>(1 << 17);
  std::uint32_t lkey = 0, rkey = 0;
  Pair pair;  // last: its queues end before the memory does
};

TEST(SoftnicMessages, SendScattersAndCompletesOnBothSides) {
  SendPair s("send");
  s.pair.b.post_receive({s.into(0, 100), s.into(1000, 60000), s.into(70000, 50000)});
  const std::uint16_t index = s.send(100000, kSendImmediate, 0xfeedbeef);
  const Completed sent = s.pair.a.cq.poll();
  EXPECT_TRUE(sent.ok());
  EXPECT_EQ(sent.counter, index);
  const Completed got = s.pair.b.receive_cq.poll();
  ASSERT_TRUE(got.arrived);
  EXPECT_EQ(got.opcode, kResponderSendImmediate);
  EXPECT_EQ(got.counter, 0);
  EXPECT_EQ(got.bytes, 100000u);
  EXPECT_EQ(got.immediate, 0xfeedbeefu);
  EXPECT_TRUE(std::equal(s.to.begin(), s.to.begin() + 100, s.from.begin()));
  EXPECT_TRUE(std::equal(s.to.begin() + 1000, s.to.begin() + 61000, s.from.begin() + 100));
  EXPECT_TRUE(std::equal(s.to.begin() + 70000, s.to.begin() + 109900, s.from.begin() + 60100));
  EXPECT_EQ(s.to[109900], 0);
  // Inline, and without any payload.
  s.pair.b.post_receive({s.into(0, 64)});
  s.pair.b.post_receive({});
  Endpoint::Wqe w;
  struct {
    std::uint32_t count = to_big32(5 | kInlineFlag);
    std::uint8_t bytes[12] = {'h', 'e', 'l', 'l', 'o'};
  } payload;
  w.add(payload);
  s.pair.a.post(w, kSend);
  EXPECT_TRUE(s.pair.a.cq.poll().ok());
  EXPECT_EQ(s.pair.b.receive_cq.poll().bytes, 5u);
  EXPECT_EQ(std::memcmp(s.to.data(), "hello", 5), 0);
  s.send(0);
  EXPECT_TRUE(s.pair.a.cq.poll().ok());
  EXPECT_EQ(s.pair.b.receive_cq.poll().bytes, 0u);
}

TEST(SoftnicMessages, ManyMessagesWrapTheRing) {
  SendPair s("wrap");
  for (int i = 0; i < 200; ++i) {
    s.from[0] = static_cast<std::uint8_t>(i);
    s.pair.b.post_receive({s.into(0, 64)});
    s.send(64);
    ASSERT_TRUE(s.pair.a.cq.poll().ok());
    const Completed got = s.pair.b.receive_cq.poll();
    ASSERT_EQ(got.opcode, kResponderSend);
    ASSERT_EQ(got.counter, i & 0xffff);
    ASSERT_EQ(s.to[0], static_cast<std::uint8_t>(i));
  }
}

TEST(SoftnicMessages, ReceiverNotReadyIsRetriedThenReported) {
  SendPair s("rnr");  // retries for ever
  s.send(64);
  EXPECT_FALSE(s.pair.a.cq.poll(std::chrono::milliseconds(30)).arrived);
  s.pair.b.post_receive({s.into(0, 64)});
  EXPECT_TRUE(s.pair.a.cq.poll().ok());
  EXPECT_TRUE(s.pair.b.receive_cq.poll().arrived);

  SendPair never("rnr-limit", QpOptions{.rnr_retry = 2});
  never.send(64);
  const Completed failed = never.pair.a.cq.poll();
  EXPECT_EQ(failed.opcode, kRequesterError);
  EXPECT_EQ(failed.syndrome, kReceiverNotReadyRetryExceeded);
  EXPECT_EQ(never.pair.a.state(), kError);
  EXPECT_EQ(never.pair.b.state(), kReadyToSend);  // the receiver did nothing wrong
}

TEST(SoftnicMessages, MessageLongerThanTheReceive) {
  SendPair s("long");
  s.pair.b.post_receive({s.into(0, 64)});
  s.pair.b.post_receive({s.into(0, 64)});
  s.send(65);
  EXPECT_EQ(s.pair.a.cq.poll().syndrome, kRemoteInvalidRequestError);
  const Completed here = s.pair.b.receive_cq.poll();
  EXPECT_EQ(here.opcode, kResponderError);
  EXPECT_EQ(here.syndrome, kLocalLengthError);
  EXPECT_EQ(here.counter, 0);
  const Completed flushed = s.pair.b.receive_cq.poll();
  EXPECT_EQ(flushed.opcode, kResponderError);
  EXPECT_EQ(flushed.syndrome, kFlushError);
  EXPECT_EQ(flushed.counter, 1);
  EXPECT_EQ(s.pair.b.state(), kError);
  EXPECT_EQ(s.to[0], 0);
}

TEST(SoftnicMessages, ReceiveBufferWithAWrongKey) {
  SendPair s("bad-key");
  DataSegment wrong = s.into(0, 64);
  wrong.lkey = to_big32(s.rkey ^ 0x300);
  s.pair.b.post_receive({wrong});
  s.send(64);
  EXPECT_EQ(s.pair.a.cq.poll().syndrome, kRemoteOperationError);
  EXPECT_EQ(s.pair.b.receive_cq.poll().syndrome, kLocalProtectionError);
  EXPECT_EQ(s.pair.b.state(), kError);
}

TEST(SoftnicMessages, SendBufferWithAWrongKey) {
  SendPair s("bad-source");
  s.pair.b.post_receive({s.into(0, 64)});
  Endpoint::Wqe w;
  w.add(Endpoint::data(s.from.data(), 64, s.lkey ^ 0x300));
  s.pair.a.post(w, kSend);
  EXPECT_EQ(s.pair.a.cq.poll().syndrome, kLocalProtectionError);
  // Nothing reached the peer: its receive is still there.
  EXPECT_FALSE(s.pair.b.receive_cq.poll(std::chrono::milliseconds(20)).arrived);
  EXPECT_EQ(s.pair.b.state(), kReadyToSend);
}

TEST(SoftnicMessages, ToErrorFlushesReceivesAndSends) {
  SendPair s("flush");
  for (int i = 0; i < 3; ++i) s.pair.b.post_receive({s.into(0, 64)});
  ASSERT_EQ(s.pair.b.modify(kToErr), 0);
  for (int i = 0; i < 3; ++i) {
    const Completed flushed = s.pair.b.receive_cq.poll();
    ASSERT_EQ(flushed.opcode, kResponderError);
    EXPECT_EQ(flushed.syndrome, kFlushError);
    EXPECT_EQ(flushed.counter, i);
  }
  // Also what is posted afterwards, and WQEs too.
  s.pair.b.post_receive({s.into(0, 64)});
  EXPECT_EQ(s.pair.b.receive_cq.poll().syndrome, kFlushError);
  s.pair.b.nop();
  EXPECT_EQ(s.pair.b.cq.poll().syndrome, kFlushError);
}

TEST(SoftnicMessages, WriteImmediateTakesAReceiveButNotItsBuffers) {
  SendPair s("write-imm");
  const std::uint32_t target = s.pair.b.region(s.to.data(), s.to.size())->rkey;
  s.pair.b.post_receive({s.into(5000, 64)});
  Endpoint::Wqe w;
  w.add(Endpoint::remote(Endpoint::u64(s.to.data()), target))
      .add(Endpoint::data(s.from.data(), 256, s.lkey));
  s.pair.a.post(w, kWriteImmediate, kCompletionAlways | kSolicited, 0, 77);
  EXPECT_TRUE(s.pair.a.cq.poll().ok());
  const Completed got = s.pair.b.receive_cq.poll();
  EXPECT_EQ(got.opcode, kResponderWriteImmediate);
  EXPECT_EQ(got.immediate, 77u);
  EXPECT_EQ(got.bytes, 256u);
  EXPECT_TRUE(std::equal(s.to.begin(), s.to.begin() + 256, s.from.begin()));
  EXPECT_EQ(s.to[5000], 0);
  // The solicited bit stands in the entry (op_own bit 1).
  EXPECT_NE(from_big32(load32(&s.pair.b.receive_cq.ring()[0].counter_owner)) & kSolicited, 0u);
}

/// A request that lies with the peer when both sides start anew does not answer a later one.
TEST(SoftnicMessages, ResetWhileARequestIsUnderWay) {
  SendPair s("reset");
  Endpoint& a = s.pair.a;
  Endpoint& b = s.pair.b;
  for (int round = 0; round < 20; ++round) {
    s.send(64);  // no receive: asked again and again
    std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
    for (Endpoint* e : {&a, &b}) {
      ASSERT_EQ(e->modify(kToRst), 0);
      e->producer = 0;
      e->receive_producer = 0;
      std::atomic_ref<std::uint32_t>(e->record->send).store(0);
      std::atomic_ref<std::uint32_t>(e->record->receive).store(0);
    }
    a.connect(b.qpn, b.lid());
    b.connect(a.qpn, a.lid());
    s.to[0] = 0;
    s.from[0] = static_cast<std::uint8_t>(round + 1);
    b.post_receive({s.into(0, 64)});
    s.send(64);
    const Completed done = a.cq.poll();
    ASSERT_TRUE(done.ok()) << round << ", arrived " << done.arrived << ", syndrome "
                           << int(done.syndrome);
    ASSERT_EQ(b.receive_cq.poll().opcode, kResponderSend);
    ASSERT_EQ(s.to[0], static_cast<std::uint8_t>(round + 1));
  }
}

}  // namespace
}  // namespace marrow::softnic_test
