// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// What goes wrong ends in the right syndrome, in QP state ERR with the rest flushed, and never in a
// stray byte; refused commands say why; injected faults do what their option says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <dirent.h>

#include <functional>

#include "marrow/error.hpp"
#include "softnic/options.hpp"
#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

using ::testing::HasSubstr;

/// Two buffers of 64 bytes with guards, posted over by one bad WQE.
struct Bench {
  explicit Bench(const char* options = "", QpOptions a = {}, QpOptions b = {})
      : pair("errors", options, a, b) {
    std::fill(std::begin(source), std::end(source), std::uint8_t{0x11});
    std::fill(std::begin(target), std::end(target), std::uint8_t{0x22});
    local = pair.a.region(source + 64, 64);
    remote = pair.b.region(target + 64, 64);
  }
  std::uint64_t from() const { return Endpoint::u64(source + 64); }
  std::uint64_t to() const { return Endpoint::u64(target + 64); }
  void expect_untouched() const {
    for (std::uint8_t byte : source) ASSERT_EQ(byte, 0x11);
    for (std::uint8_t byte : target) ASSERT_EQ(byte, 0x22);
  }
  alignas(64) std::uint8_t source[192];
  alignas(64) std::uint8_t target[192];
  Pair pair;
  verbs::ibv_mr* local;
  verbs::ibv_mr* remote;
};

/// Posts one bad WQE and two good ones; expects the syndrome, then flushes, then ERR.
void expect_syndrome(Bench& bench, std::uint8_t syndrome,
                     const std::function<void(Endpoint&)>& bad) {
  Endpoint& a = bench.pair.a;
  bad(a);
  a.nop();
  a.nop();
  const Completed first = a.cq.poll();
  ASSERT_TRUE(first.arrived);
  EXPECT_EQ(first.opcode, kRequesterError);
  EXPECT_EQ(int(first.syndrome), int(syndrome)) << syndrome_name(first.syndrome);
  EXPECT_EQ(first.counter, 0);
  for (int i = 0; i < 2; ++i) {
    const Completed flushed = a.cq.poll();
    ASSERT_TRUE(flushed.arrived);
    EXPECT_EQ(int(flushed.syndrome), int(kFlushError));
  }
  EXPECT_EQ(a.state(), static_cast<unsigned>(kError));
  bench.expect_untouched();
}

TEST(SoftnicErrors, LocalProtection) {
  const std::function<void(Bench&, Endpoint&)> cases[] = {
      [](Bench& b, Endpoint& a) { a.write(b.source + 64, 8, 0x12345, b.to(), b.remote->rkey); },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 64, 65, b.local->lkey, b.to(), b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 63, 1, b.local->lkey, b.to(), b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 128, 1, b.local->lkey, b.to(), b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {  // the peer's key is not a local one: another protection domain
        a.write(b.target + 64, 8, b.remote->lkey, b.to(), b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {  // READ into memory without local write
        auto* mr = a.region(b.source + 64, 64, 0);
        a.read(b.source + 64, 8, mr->lkey, b.to(), b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {  // second buffer bad: nothing of the first may move
        Endpoint::Wqe w;
        w.add(Endpoint::remote(b.to(), b.remote->rkey))
            .add(Endpoint::data(b.from(), 8, b.local->lkey))
            .add(Endpoint::data(b.from() + 60, 8, b.local->lkey));
        a.post(w, kWrite);
      },
  };
  for (const auto& each : cases) {
    Bench bench;
    expect_syndrome(bench, kLocalProtectionError, [&](Endpoint& a) { each(bench, a); });
  }
}

TEST(SoftnicErrors, RemoteAccess) {
  const std::function<void(Bench&, Endpoint&)> cases[] = {
      [](Bench& b, Endpoint& a) { a.write(b.source + 64, 8, b.local->lkey, b.to(), 0x98765); },
      [](Bench& b, Endpoint& a) { a.write(b.source + 64, 8, b.local->lkey, b.to(), 0); },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 64, 8, b.local->lkey, b.to() + 57, b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 64, 8, b.local->lkey, b.to() - 1, b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.write(b.source + 64, 8, b.local->lkey, ~0ull - 3, b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.read(b.source + 64, 64, b.local->lkey, b.to() + 8, b.remote->rkey);
      },
      [](Bench& b, Endpoint& a) {
        a.fetch_add(b.source + 64, b.local->lkey, b.to() + 64, b.remote->rkey, 1);
      },
      [](Bench& b, Endpoint& a) {  // own key as rkey: not the peer's region
        a.write(b.source + 64, 8, b.local->lkey, b.from(), b.local->rkey);
      },
      [](Bench& b, Endpoint& a) {  // region without remote write
        auto* mr = b.pair.b.region(b.target + 64, 64, verbs::IBV_ACCESS_REMOTE_READ);
        a.write(b.source + 64, 8, b.local->lkey, b.to(), mr->rkey);
      },
      [](Bench& b, Endpoint& a) {
        auto* mr = b.pair.b.region(b.target + 64, 64,
                                   verbs::IBV_ACCESS_LOCAL_WRITE | verbs::IBV_ACCESS_REMOTE_WRITE);
        a.fetch_add(b.source + 64, b.local->lkey, b.to(), mr->rkey, 1);
      },
      [](Bench& b, Endpoint& a) {  // stale key
        const std::uint32_t key = b.remote->rkey;
        b.pair.b.mrs.clear();
        nic().dereg_mr(b.remote);
        b.remote = b.pair.b.region(b.target + 64, 64);
        a.write(b.source + 64, 8, b.local->lkey, b.to(), key);
      },
  };
  for (const auto& each : cases) {
    Bench bench;
    expect_syndrome(bench, kRemoteAccessError, [&](Endpoint& a) { each(bench, a); });
  }
}

TEST(SoftnicErrors, RemoteInvalidRequest) {
  {
    Bench bench;
    expect_syndrome(bench, kRemoteInvalidRequestError, [&](Endpoint& a) {
      a.fetch_add(bench.source + 64, bench.local->lkey, bench.to() + 4, bench.remote->rkey, 1);
    });
  }
  QpOptions closed;
  closed.access = verbs::IBV_ACCESS_REMOTE_WRITE;
  Bench bench("", {}, closed);
  expect_syndrome(bench, kRemoteInvalidRequestError, [&](Endpoint& a) {
    a.read(bench.source + 64, 8, bench.local->lkey, bench.to(), bench.remote->rkey);
  });
}

TEST(SoftnicErrors, LocalQpOperation) {
  const std::function<void(Bench&, Endpoint&)> cases[] = {
      [](Bench&, Endpoint& a) {
        Endpoint::Wqe w;
        a.post(w, 0x77);
      },
      [](Bench&, Endpoint& a) {
        Endpoint::Wqe w;
        a.post(w, kWrite);
      },
      [](Bench& b, Endpoint& a) {  // atomic without a result buffer
        Endpoint::Wqe w;
        w.add(Endpoint::remote(b.to(), b.remote->rkey)).add(AtomicSegment{1, 0});
        a.post(w, kFetchAdd);
      },
      [](Bench& b, Endpoint& a) {  // READ with three buffers
        Endpoint::Wqe w;
        w.add(Endpoint::remote(b.to(), b.remote->rkey));
        for (int i = 0; i < 3; ++i) w.add(Endpoint::data(b.from(), 8, b.local->lkey));
        a.post(w, kRead);
      },
      [](Bench& b, Endpoint& a) {  // inline payload longer than the WQE
        Endpoint::Wqe w;
        w.add(Endpoint::remote(b.to(), b.remote->rkey));
        const std::uint32_t header = to_big32(29u | kInlineFlag);
        std::memcpy(w.bytes + 32, &header, 4);
        w.ds = 4;
        a.post(w, kWrite);
      },
      [](Bench&, Endpoint& a) {  // wrong index in the control segment
        ControlSegment control{
            control_word(kNop, 9), qpn_ds_word(a.qpn, 1), 0, {}, kCompletionAlways, 0};
        a.put_wqe(&control, 1);
        a.ring();
      },
      [](Bench&, Endpoint& a) {  // another queue's number
        ControlSegment control{
            control_word(kNop, 0), qpn_ds_word(a.qpn ^ 1, 1), 0, {}, kCompletionAlways, 0};
        a.put_wqe(&control, 1);
        a.ring();
      },
  };
  for (const auto& each : cases) {
    Bench bench;
    expect_syndrome(bench, kLocalQpOperationError, [&](Endpoint& a) { each(bench, a); });
  }
}

TEST(SoftnicErrors, LocalLength) {
  Bench bench;
  expect_syndrome(bench, kLocalLengthError, [&](Endpoint& a) {
    Endpoint::Wqe w;
    w.add(Endpoint::remote(bench.to(), bench.remote->rkey))
        .add(AtomicSegment{1, 0})
        .add(Endpoint::data(bench.from(), 16, bench.local->lkey));
    a.post(w, kFetchAdd);
  });
}

TEST(SoftnicErrors, OverrunOfTheSendQueue) {
  Bench bench;
  Endpoint& a = bench.pair.a;
  a.producer = 33;  // one more than the ring of 32 holds
  a.ring();
  const Completed first = a.cq.poll();
  ASSERT_TRUE(first.arrived);
  EXPECT_EQ(int(first.syndrome), int(kLocalQpOperationError));
  EXPECT_EQ(a.state(), static_cast<unsigned>(kError));
  EXPECT_FALSE(a.cq.poll(std::chrono::milliseconds(5)).arrived);
}

TEST(SoftnicErrors, OverrunOfTheCompletionQueue) {
  QpOptions options;
  options.overrun_ignored = false;
  Bench bench("", options);
  Endpoint& a = bench.pair.a;
  for (int i = 0; i < 32; ++i) {
    a.nop();
    ASSERT_TRUE(a.cq.poll().ok());
  }
  a.nop();  // the consumer index was never written: no room
  EXPECT_FALSE(a.cq.poll(std::chrono::milliseconds(20)).arrived);
  EXPECT_EQ(a.state(), static_cast<unsigned>(kError));
}

TEST(SoftnicErrors, CollapsedQueueShowsTheFailure) {
  QpOptions options;
  options.collapsed = true;
  Bench bench("", options);
  bench.pair.a.write(bench.source + 64, 8, bench.local->lkey, bench.to(), 0x98765);
  const Completed done = bench.pair.a.cq.poll_counter(0);
  ASSERT_TRUE(done.arrived);
  EXPECT_EQ(done.opcode, kRequesterError);
  EXPECT_EQ(int(done.syndrome), int(kRemoteAccessError));
}

TEST(SoftnicErrors, ReceiverNotReady) {
  QpOptions sender;
  sender.rnr_retry = 2;
  Bench bench("", sender);
  Endpoint& a = bench.pair.a;
  Endpoint::Wqe w;
  w.add(Endpoint::remote(bench.to(), bench.remote->rkey));
  a.post(w, kWriteImmediate);
  const Completed done = a.cq.poll();
  ASSERT_TRUE(done.arrived);
  EXPECT_EQ(int(done.syndrome), int(kReceiverNotReadyRetryExceeded));
}

TEST(SoftnicErrors, PeerThatIsNotConnected) {
  const std::string job = unique_job("unconnected");
  QpOptions quick;
  quick.ack_timeout = 10;  // 4.2 ms, 8 times
  Endpoint a(job, "", quick), b(job);
  b.to_init();
  a.connect(b.qpn, b.lid());
  a.nop();
  EXPECT_TRUE(a.cq.poll().ok());
  auto* local = a.region(a.rings.data(), 64);
  auto* remote = b.region(b.rings.data(), 64);
  // The peer comes up in time: nothing is lost.
  a.read(a.rings.data(), 0x40, local->lkey, Endpoint::u64(b.rings.data()), remote->rkey);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  b.to_rtr(a.qpn, a.lid());
  ASSERT_TRUE(a.cq.poll().ok());
  ASSERT_EQ(b.modify(kToErr), 0);
  Endpoint::Wqe w;
  w.add(Endpoint::remote(0, 0));
  a.post(w, kWrite);
  const Completed done = a.cq.poll();
  ASSERT_TRUE(done.arrived);
  EXPECT_EQ(int(done.syndrome), int(kTransportRetryExceeded));
}

TEST(SoftnicErrors, ResetMakesTheQueueUsableAgain) {
  Bench bench;
  Endpoint& a = bench.pair.a;
  a.write(bench.source + 64, 8, bench.local->lkey, bench.to(), 0);
  EXPECT_EQ(a.cq.poll().opcode, kRequesterError);
  ASSERT_EQ(a.modify(kToRst), 0);
  EXPECT_EQ(a.state(), static_cast<unsigned>(kReset));
  a.producer = 0;
  a.record->send = 0;
  a.connect(bench.pair.b.qpn, bench.pair.b.lid());
  a.write(bench.source + 64, 8, bench.local->lkey, bench.to(), bench.remote->rkey);
  EXPECT_TRUE(a.cq.poll().ok());
  EXPECT_EQ(bench.target[64], 0x11);
}

TEST(SoftnicCommands, RefusalsSayWhy) {
  Bench bench;
  Endpoint& a = bench.pair.a;
  EXPECT_NE(a.modify(kRstToInit), 0);
  EXPECT_EQ(errno, EREMOTEIO);
  EXPECT_THAT(nic().last_error(), HasSubstr("state"));
  std::uint8_t in[create_qp::kInBytes] = {};
  std::uint8_t out[create_qp::kOutBytes] = {};
  set(in, command::opcode, 0x77f);
  EXPECT_EQ(nic().devx_obj_create(a.context, in, sizeof in, out, sizeof out), nullptr);
  EXPECT_EQ(get(out, reply::status), kStatusBadOpcode);
  set(in, command::opcode, kCreateQp);
  set(in + create_qp::kContext, qpc::path_migration, kPathMigrated);
  EXPECT_EQ(nic().devx_obj_create(a.context, in, sizeof in, out, sizeof out), nullptr);
  EXPECT_EQ(get(out, reply::status), kStatusBadResource);
  EXPECT_THAT(nic().last_error(), HasSubstr("PD"));
  EXPECT_EQ(nic().devx_obj_create(a.context, in, 0x40, out, sizeof out), nullptr);
  EXPECT_EQ(get(out, reply::status), kStatusBadInputLength);
  // In use: umem, CQ, PD.
  EXPECT_EQ(nic().devx_umem_dereg(a.rings_umem), EBUSY);
  EXPECT_EQ(nic().devx_obj_destroy(a.cq.object), EBUSY);
  EXPECT_EQ(nic().dealloc_pd(a.pd), EBUSY);
  EXPECT_EQ(nic().reg_mr(a.pd, bench.source, 64, verbs::IBV_ACCESS_REMOTE_WRITE), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

TEST(SoftnicCommands, Capabilities) {
  Bench bench;
  std::uint8_t in[hca_cap::kInBytes] = {};
  std::vector<std::uint8_t> out(hca_cap::kOutBytes);
  set(in, command::opcode, kQueryHcaCap);
  set(in, command::op_mod, hca_cap::kGeneral << 1 | 1);
  ASSERT_EQ(nic().devx_general_cmd(bench.pair.a.context, in, sizeof in, out.data(), out.size()), 0);
  EXPECT_EQ(get(out.data() + hca_cap::kCapability, hca_cap::cqe_version), 1u);
  EXPECT_EQ(get(out.data() + hca_cap::kCapability, hca_cap::log_max_qp_size), 15u);
  verbs::ibv_port_attr port{};
  ASSERT_EQ(nic().query_port(bench.pair.a.context, 1, &port), 0);
  EXPECT_EQ(port.link_layer, verbs::kLinkLayerInfiniBand);
  EXPECT_NE(port.lid, 0);
  EXPECT_EQ(port.state, verbs::kPortActive);
  EXPECT_EQ(nic().query_port(bench.pair.a.context, 2, &port), EINVAL);
}

TEST(SoftnicCommands, CloseDestroysWhatIsLeft) {
  const std::string job = unique_job("close");
  auto* a = new Endpoint(job);  // never closed by its owner
  a->region(a->rings.data(), 64);
  EXPECT_EQ(nic().close_device(a->context), 0);
  a->context = nullptr;
  a->mrs.clear();
  delete a;
}

TEST(SoftnicFaults, Options) {
  using softnic::parse_options;
  EXPECT_EQ(parse_options("seed=7,,corrupt=3").corrupt, 3u);
  EXPECT_EQ(parse_options("start_index=0xfff0").start_index, 0xfff0);
  EXPECT_EQ(parse_options("stall=2:50").stall_time.count(), 50);
  for (const char* bad : {"sed=7", "seed=x", "start_index=65536", "atomics=cpu", "drop"}) {
    EXPECT_THROW(parse_options(bad), Error) << bad;
  }
  EXPECT_THROW(Endpoint(unique_job("bad"), "sed=7"), std::runtime_error);
  EXPECT_THROW(Endpoint("no/slash", ""), std::runtime_error);
}

TEST(SoftnicFaults, CorruptsOneBitOfTheNthWrite) {
  Bench bench("seed=3,corrupt=2");
  int wrong_bits = 0;
  for (int i = 0; i < 3; ++i) {
    std::memset(bench.target, 0x22, sizeof bench.target);
    bench.pair.a.write(bench.source + 64, 64, bench.local->lkey, bench.to(), bench.remote->rkey);
    ASSERT_TRUE(bench.pair.a.cq.poll().ok());
    int bits = 0;
    for (int k = 0; k < 64; ++k) bits += __builtin_popcount(bench.target[64 + k] ^ 0x11);
    EXPECT_EQ(bits, i == 1 ? 1 : 0);
    wrong_bits += bits;
  }
  EXPECT_EQ(wrong_bits, 1);
}

TEST(SoftnicFaults, DropErrorStall) {
  {
    Bench bench("drop=1");
    expect_syndrome(bench, kTransportRetryExceeded, [&](Endpoint& a) {
      a.write(bench.source + 64, 8, bench.local->lkey, bench.to(), bench.remote->rkey);
    });
  }
  {
    Bench bench("error_at=1");
    expect_syndrome(bench, kRemoteOperationError, [&](Endpoint& a) {
      a.write(bench.source + 64, 8, bench.local->lkey, bench.to(), bench.remote->rkey);
    });
  }
  {
    Bench bench("stall=2:300");  // far longer than a poll of 10 ms takes on a loaded machine
    bench.pair.a.nop();
    ASSERT_TRUE(bench.pair.a.cq.poll().ok());
    bench.pair.a.nop();
    EXPECT_FALSE(bench.pair.a.cq.poll(std::chrono::milliseconds(10)).arrived);
    EXPECT_TRUE(bench.pair.a.cq.poll().ok());
  }
  Bench bench("stall=1");  // for good: closing must still work
  bench.pair.a.nop();
  EXPECT_FALSE(bench.pair.a.cq.poll(std::chrono::milliseconds(10)).arrived);
}

TEST(SoftnicFaults, DelayAndReorderKeepTheQueuesOrder) {
  Pair pair("delay", "seed=5,delay=200,reorder=1");
  alignas(8) std::uint64_t word = 0, sink = 0;
  auto* lk = pair.a.region(&sink, 8);
  auto* rw = pair.b.region(&word, 8);
  for (int batch = 0; batch < 4; ++batch) {
    for (int i = 0; i < 16; ++i)
      pair.a.fetch_add(&sink, lk->lkey, Endpoint::u64(&word), rw->rkey, 1);
    for (int i = 0; i < 16; ++i) {
      const Completed done = pair.a.cq.poll();
      ASSERT_TRUE(done.ok());
      EXPECT_EQ(done.counter, batch * 16 + i);
    }
    EXPECT_EQ(std::atomic_ref(word).load(), std::uint64_t(batch + 1) * 16);
  }
}

}  // namespace
}  // namespace marrow::softnic_test
