// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// The standard verbs on softnic inside one process, so that sanitizers see both sides: posting, polling,
// shared receives, events, full queues, errors, reset. tests/softnic_libraries does the same through the
// replacement libraries.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>

#include <atomic>
#include <thread>
#include <utility>

#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

using namespace verbs;

struct Side {
  explicit Side(const std::string& job, std::uint32_t depth = 16, bool shared = false,
                int entries = 64) {
    int count = 0;
    ibv_device** list = nic().get_device_list(&count);
    context = nic().open_device_in_job(list[0], job.c_str(), "");
    nic().free_device_list(list);
    pd = nic().alloc_pd(context);
    channel = nic().create_comp_channel(context);
    sends = nic().create_cq(context, entries, nullptr, nullptr, 0);
    receives = nic().create_cq(context, 64, this, channel, 0);
    if (shared) {
      ibv_srq_init_attr init{nullptr, {16, 2, 0}};
      srq = nic().create_srq(pd, &init);
    }
    qp = make_qp(depth);
    mr = nic().reg_mr(pd, memory.data(), memory.size(), 0xf);
    ibv_port_attr port{};
    nic().query_port(context, 1, &port);
    lid = port.lid;
  }
  ibv_qp* make_qp(std::uint32_t depth) {
    ibv_qp_init_attr init{};
    init.send_cq = sends;
    init.recv_cq = receives;
    init.srq = srq;
    init.cap = {depth, srq != nullptr ? 0 : 16u, 2, 2, 16};
    init.qp_type = kQpTypeRc;
    return nic().create_qp(pd, &init);
  }
  ~Side() {
    EXPECT_EQ(nic().destroy_qp(qp), 0);
    if (srq != nullptr) {
      EXPECT_EQ(nic().destroy_srq(srq), 0);
    }
    EXPECT_EQ(nic().destroy_cq(receives), 0);
    EXPECT_EQ(nic().destroy_cq(sends), 0);
    EXPECT_EQ(nic().destroy_comp_channel(channel), 0);
    EXPECT_EQ(nic().dereg_mr(mr), 0);
    EXPECT_EQ(nic().dealloc_pd(pd), 0);
    EXPECT_EQ(nic().close_device(context), 0);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void connect(ibv_qp* mine, std::uint32_t peer, std::uint16_t peer_lid) {
    ibv_qp_attr a{};
    a.port_num = 1;
    a.qp_access_flags = 0xe;
    a.path_mtu = 3;
    a.dest_qp_num = peer;
    a.ah_attr.dlid = peer_lid;
    a.ah_attr.port_num = 1;
    a.timeout = 14;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = a.max_dest_rd_atomic = 16;
    a.qp_state = IBV_QPS_INIT;
    ASSERT_EQ(nic().modify_qp(mine, &a,
                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
              0)
        << nic().last_error();
    a.qp_state = IBV_QPS_RTR;
    ASSERT_EQ(nic().modify_qp(mine, &a,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0)
        << nic().last_error();
    a.qp_state = IBV_QPS_RTS;
    ASSERT_EQ(nic().modify_qp(mine, &a,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
              0)
        << nic().last_error();
  }
  int send(std::uint64_t wr_id, std::uint64_t at, std::uint32_t bytes,
           unsigned flags = IBV_SEND_SIGNALED, ibv_qp* through = nullptr) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(memory.data()) + at, bytes, mr->lkey};
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = flags;
    ibv_send_wr* bad = nullptr;
    return context->ops.post_send(through != nullptr ? through : qp, &wr, &bad);
  }
  int receive(std::uint64_t wr_id, std::uint64_t at, std::uint32_t bytes) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(memory.data()) + at, bytes, mr->lkey};
    ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    return srq != nullptr ? context->ops.post_srq_recv(srq, &wr, &bad)
                          : context->ops.post_recv(qp, &wr, &bad);
  }
  ibv_wc wait(ibv_cq* cq) {
    ibv_wc wc{};
    wc.status = -1;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (context->ops.poll_cq(cq, 1, &wc) == 0) {
      if (std::chrono::steady_clock::now() > end) break;
    }
    return wc;
  }

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq* sends = nullptr;
  ibv_cq* receives = nullptr;
  ibv_srq* srq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  std::uint16_t lid = 0;
  std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(65536);
};

struct Sides {
  explicit Sides(const char* name, bool shared = false, int entries = 64)
      : job(unique_job(name)), a(job, 16, false, entries), b(job, 16, shared) {
    a.connect(a.qp, b.qp->qp_num, b.lid);
    b.connect(b.qp, a.qp->qp_num, a.lid);
  }
  std::string job;
  Side a, b;
};

TEST(SoftnicVerbs, PingPongByTwoThreads) {
  Sides s("ping");
  constexpr int kRounds = 300;
  const auto play = [](Side& me, bool first) {
    me.receive(1, 4096, 256);
    for (int i = 0; i < kRounds; ++i) {
      if (first) {
        me.memory[0] = static_cast<std::uint8_t>(i);
        ASSERT_EQ(me.send(2, 0, 256), 0);
        ASSERT_EQ(me.wait(me.sends).status, IBV_WC_SUCCESS);
      }
      ASSERT_EQ(me.wait(me.receives).byte_len, 256u);
      ASSERT_EQ(me.memory[4096], static_cast<std::uint8_t>(i));
      ASSERT_EQ(me.receive(1, 4096, 256), 0);
      if (!first) {
        me.memory[0] = static_cast<std::uint8_t>(i);
        ASSERT_EQ(me.send(2, 0, 256), 0);
        ASSERT_EQ(me.wait(me.sends).status, IBV_WC_SUCCESS);
      }
    }
  };
  // A receive must be there before the first message, or the sender retries.
  std::thread other([&] { play(s.b, false); });
  play(s.a, true);
  other.join();
}

TEST(SoftnicVerbs, SilentSendsMakeRoomWhenALaterOneIsPolled) {
  Sides s("silent");
  ibv_qp_init_attr made{};
  ibv_qp_attr attr{};
  nic().query_qp(s.a.qp, &attr, 0, &made);
  const int depth = static_cast<int>(made.cap.max_send_wr);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < depth; ++i) {
      if (i % 16 == 0) {
        for (int k = 0; k < 16 && i + k < depth; ++k) s.b.receive(7, 0, 16);
      }
      ASSERT_EQ(s.a.send(static_cast<std::uint64_t>(i), 0, 16,
                         IBV_SEND_INLINE | (i == depth - 1 ? IBV_SEND_SIGNALED : 0u)),
                0)
          << round << " " << i;
      if (i % 16 == 15 || i == depth - 1) {
        for (int k = 0; k <= i % 16; ++k) ASSERT_EQ(s.b.wait(s.b.receives).status, 0);
      }
    }
    const ibv_wc wc = s.a.wait(s.a.sends);
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.wr_id, static_cast<std::uint64_t>(depth - 1));
  }
}

TEST(SoftnicVerbs, FullQueuesSayNoMemory) {
  Sides s("full");
  int sent = 0;
  while (s.a.send(1, 0, 8) == 0) ASSERT_LT(++sent, 100000);  // nobody receives
  EXPECT_GE(sent, 16);
  EXPECT_EQ(s.a.send(1, 0, 8), ENOMEM);
  int posted = 0;
  while (s.a.receive(1, 0, 8) == 0) ASSERT_LT(++posted, 100000);
  EXPECT_EQ(posted, 16);
  EXPECT_EQ(s.a.receive(1, 0, 8), ENOMEM);
}

/// A NIC's driver pins what is registered, so this is refused, instead of a fault in the engine later.
TEST(SoftnicVerbs, MemoryThatIsNotThereCannotBeRegistered) {
  Side side(unique_job("pin"));
  constexpr std::size_t kPage = 4096;
  base::Mapping mapping = base::Mapping::anonymous(3 * kPage);
  auto* at = mapping.as<std::byte>();
  ASSERT_EQ(::mprotect(at + kPage, kPage, PROT_READ), 0);
  ASSERT_EQ(::mprotect(at + 2 * kPage, kPage, PROT_NONE), 0);
  const auto refused = [&](std::byte* from, std::size_t bytes, int access) {
    errno = 0;
    ibv_mr* mr = nic().reg_mr(side.pd, from, bytes, access);
    EXPECT_EQ(mr, nullptr);
    if (mr != nullptr) nic().dereg_mr(mr);
    return errno;
  };
  EXPECT_EQ(refused(at + 2 * kPage, 1, 0), EFAULT);
  EXPECT_EQ(refused(at, 3 * kPage, 0), EFAULT);
  EXPECT_EQ(refused(at, std::size_t{1} << 50, 0xf), EFAULT);
  EXPECT_EQ(refused(at + kPage, 1, 0xf), EFAULT);  // to be written, but read-only
  EXPECT_EQ(refused(at, kPage, -1), EINVAL);
  ibv_mr* mr = nic().reg_mr(side.pd, at, 2 * kPage, IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(mr, nullptr) << nic().last_error();
  EXPECT_EQ(nic().dereg_mr(mr), 0);
  errno = 0;
  EXPECT_EQ(nic().devx_umem_reg(side.context, at + 2 * kPage, kPage, IBV_ACCESS_LOCAL_WRITE),
            nullptr);
  EXPECT_EQ(errno, EFAULT);
}

TEST(SoftnicVerbs, SharedReceivesServeTwoQueuePairs) {
  Sides s("shared", /*shared=*/true);
  ibv_qp* more_a = s.a.make_qp(16);
  ibv_qp* more_b = s.b.make_qp(16);
  ASSERT_NE(more_b, nullptr);
  s.a.connect(more_a, more_b->qp_num, s.b.lid);
  s.b.connect(more_b, s.a.qp == nullptr ? 0 : more_a->qp_num, s.a.lid);
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(s.b.receive(i, 64 * (i % 16), 64), 0);
    ibv_qp* through = i % 2 == 0 ? s.a.qp : more_a;
    ASSERT_EQ(s.a.send(i, 0, 32, IBV_SEND_SIGNALED, through), 0);
    ASSERT_EQ(s.a.wait(s.a.sends).status, IBV_WC_SUCCESS);
    const ibv_wc wc = s.b.wait(s.b.receives);
    ASSERT_EQ(wc.wr_id, i);
    ASSERT_EQ(wc.qp_num, i % 2 == 0 ? s.b.qp->qp_num : more_b->qp_num);
  }
  EXPECT_EQ(nic().destroy_srq(s.b.srq), EBUSY);
  EXPECT_EQ(nic().destroy_qp(more_a), 0);
  EXPECT_EQ(nic().destroy_qp(more_b), 0);
}

TEST(SoftnicVerbs, EventsComeOnceForEachRequest) {
  Sides s("events");
  const auto pending = [&] {
    pollfd fd{s.b.channel->fd, POLLIN, 0};
    return ::poll(&fd, 1, 100) == 1;
  };
  const auto deliver = [&](unsigned flags) {
    s.b.receive(1, 0, 64);
    ASSERT_EQ(s.a.send(1, 0, 8, flags | IBV_SEND_SIGNALED), 0);
    ASSERT_EQ(s.a.wait(s.a.sends).status, IBV_WC_SUCCESS);
  };
  const auto take = [&] {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    ASSERT_EQ(nic().get_cq_event(s.b.channel, &cq, &context), 0);
    EXPECT_EQ(cq, s.b.receives);
    EXPECT_EQ(context, &s.b);
    nic().ack_cq_events(cq, 1);
  };
  deliver(0);  // nobody asked
  EXPECT_FALSE(pending());
  // Asked after the fact: the entry lies there already.
  s.b.context->ops.req_notify_cq(s.b.receives, 0);
  EXPECT_TRUE(pending());
  take();
  EXPECT_FALSE(pending());
  EXPECT_EQ(s.b.wait(s.b.receives).status, IBV_WC_SUCCESS);
  // Solicited only: a plain message is silent, a solicited one is not.
  s.b.context->ops.req_notify_cq(s.b.receives, 1);
  deliver(0);
  EXPECT_FALSE(pending());
  deliver(IBV_SEND_SOLICITED);
  EXPECT_TRUE(pending());
  take();
  deliver(IBV_SEND_SOLICITED);
  EXPECT_FALSE(pending());  // not asked again
}

TEST(SoftnicVerbs, OverrunOfACompletionQueueIsAnAsynchronousEvent) {
  Sides s("overrun", false, /*entries=*/3);
  for (int i = 0; i < 12; ++i) {
    s.b.receive(1, 0, 64);
    s.a.send(1, 0, 8);
  }
  ibv_async_event event{};
  ASSERT_EQ(nic().get_async_event(s.a.context, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, s.a.sends);
  nic().ack_async_event(&event);
}

bool readable(int fd, int wait_ms) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, wait_ms) == 1;
}

// Nobody has read the event when the queue ends: it must not be found later, by its old address least of all.
TEST(SoftnicVerbs, AnEndedQueueTakesItsUnreadEventsAlong) {
  Sides s("ended");
  ibv_cq* const kept = s.b.receives;
  ibv_cq* const doomed = nic().create_cq(s.b.context, 16, nullptr, s.b.channel, 0);
  ASSERT_NE(doomed, nullptr);
  ibv_qp* const more_a = s.a.make_qp(16);
  s.b.receives = doomed;
  ibv_qp* const more_b = s.b.make_qp(16);
  s.b.receives = kept;
  s.a.connect(more_a, more_b->qp_num, s.b.lid);
  s.b.connect(more_b, more_a->qp_num, s.a.lid);
  const auto deliver = [&](ibv_qp* from, ibv_qp* to, ibv_cq* cq) {
    ibv_qp* const own = std::exchange(s.b.qp, to);
    ASSERT_EQ(s.b.receive(1, 0, 64), 0);
    s.b.qp = own;
    s.b.context->ops.req_notify_cq(cq, 0);
    ASSERT_EQ(s.a.send(1, 0, 8, IBV_SEND_SIGNALED, from), 0);
    ASSERT_EQ(s.a.wait(s.a.sends).status, IBV_WC_SUCCESS);
    ASSERT_TRUE(readable(s.b.channel->fd, 1000));
  };
  deliver(more_a, more_b, doomed);
  deliver(s.a.qp, s.b.qp, kept);
  EXPECT_EQ(nic().destroy_qp(more_a), 0);
  EXPECT_EQ(nic().destroy_qp(more_b), 0);
  EXPECT_EQ(nic().destroy_cq(doomed), 0);
  ASSERT_TRUE(readable(s.b.channel->fd, 1000));
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(nic().get_cq_event(s.b.channel, &cq, &context), 0);
  EXPECT_EQ(cq, kept);
  EXPECT_EQ(context, &s.b);
  nic().ack_cq_events(cq, 1);
  EXPECT_FALSE(readable(s.b.channel->fd, 0));
}

TEST(SoftnicVerbs, AnEndedQueueTakesItsAsynchronousEventAlong) {
  Sides s("overrun-ended", false, /*entries=*/3);
  for (int i = 0; i < 12; ++i) {
    s.b.receive(1, 0, 64);
    s.a.send(1, 0, 8);
  }
  ASSERT_TRUE(readable(s.a.context->async_fd, 5000));
  ASSERT_EQ(nic().destroy_qp(s.a.qp), 0);
  ASSERT_EQ(nic().destroy_cq(s.a.sends), 0);
  EXPECT_FALSE(readable(s.a.context->async_fd, 0));
  s.a.sends = nic().create_cq(s.a.context, 4, nullptr, nullptr, 0);
  s.a.qp = s.a.make_qp(16);
}

// Readers that wait while queues with events come and go.
TEST(SoftnicVerbs, QueuesEndBesideAReader) {
  Sides s("reader");
  std::atomic<int> seen = 0;
  std::thread reader([&] {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    do {
      if (nic().get_cq_event(s.b.channel, &cq, &context) != 0) return;
      nic().ack_cq_events(cq, 1);
      ++seen;
    } while (context != &s.b);
  });
  for (int round = 0; round < 20; ++round) {
    ibv_cq* const cq = nic().create_cq(s.b.context, 16, nullptr, s.b.channel, 0);
    ibv_qp* const more_a = s.a.make_qp(16);
    ibv_cq* const kept = std::exchange(s.b.receives, cq);
    ibv_qp* const more_b = s.b.make_qp(16);
    s.b.receives = kept;
    s.a.connect(more_a, more_b->qp_num, s.b.lid);
    s.b.connect(more_b, more_a->qp_num, s.a.lid);
    ibv_qp* const own = std::exchange(s.b.qp, more_b);
    s.b.receive(1, 0, 64);
    s.b.qp = own;
    s.b.context->ops.req_notify_cq(cq, 0);
    ASSERT_EQ(s.a.send(1, 0, 8, IBV_SEND_SIGNALED, more_a), 0);
    ASSERT_EQ(s.a.wait(s.a.sends).status, IBV_WC_SUCCESS);
    EXPECT_EQ(nic().destroy_qp(more_a), 0);
    EXPECT_EQ(nic().destroy_qp(more_b), 0);
    EXPECT_EQ(nic().destroy_cq(cq), 0);
  }
  s.b.receive(1, 0, 64);
  s.b.context->ops.req_notify_cq(s.b.receives, 0);
  ASSERT_EQ(s.a.send(1, 0, 8), 0);
  reader.join();
  EXPECT_GE(seen, 1);
}

// Indices have 16 bits: a ring of 2^16 receives that is full would look empty.
TEST(SoftnicVerbs, TheLargestSharedReceiveQueueMayBeFull) {
  Sides s("largest");
  ibv_device_attr limits{};
  ASSERT_EQ(nic().query_device(s.b.context, &limits), 0);
  const auto most = static_cast<std::uint32_t>(limits.max_srq_wr);
  ibv_srq_init_attr too_many{nullptr, {most + 1, 1, 0}};
  EXPECT_EQ(nic().create_srq(s.b.pd, &too_many), nullptr);
  ibv_srq_init_attr init{nullptr, {most, 1, 0}};
  s.b.srq = nic().create_srq(s.b.pd, &init);
  ASSERT_NE(s.b.srq, nullptr) << nic().last_error();
  ibv_srq* const srq = s.b.srq;
  ibv_qp* const more_b = s.b.make_qp(16);
  ibv_qp* const more_a = s.a.make_qp(16);
  s.a.connect(more_a, more_b->qp_num, s.b.lid);
  s.b.connect(more_b, more_a->qp_num, s.a.lid);
  for (std::uint32_t i = 0; i < init.attr.max_wr; ++i) ASSERT_EQ(s.b.receive(i, 0, 64), 0) << i;
  EXPECT_EQ(s.b.receive(0, 0, 64), ENOMEM);
  ASSERT_EQ(s.a.send(1, 0, 8, IBV_SEND_SIGNALED, more_a), 0);
  EXPECT_EQ(s.a.wait(s.a.sends).status, IBV_WC_SUCCESS);
  EXPECT_EQ(s.b.wait(s.b.receives).wr_id, 0u);
  EXPECT_EQ(nic().destroy_qp(more_a), 0);
  EXPECT_EQ(nic().destroy_qp(more_b), 0);
  EXPECT_EQ(nic().destroy_srq(srq), 0);
  s.b.srq = nullptr;
}

TEST(SoftnicVerbs, ResetForgetsAndTheQueueWorksAgain) {
  Sides s("reset");
  s.a.mr->lkey ^= 0x300;
  ASSERT_EQ(s.a.send(5, 0, 8), 0);
  s.a.mr->lkey ^= 0x300;
  EXPECT_EQ(s.a.wait(s.a.sends).status, IBV_WC_LOC_PROT_ERR);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  ASSERT_EQ(nic().query_qp(s.a.qp, &attr, IBV_QP_STATE, &init), 0);
  EXPECT_EQ(attr.qp_state, IBV_QPS_ERR);
  ASSERT_EQ(s.a.send(6, 0, 8), 0);  // flushed; its entry is never polled
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (Side* side : {&s.a, &s.b}) {
    attr.qp_state = IBV_QPS_RESET;
    ASSERT_EQ(nic().modify_qp(side->qp, &attr, IBV_QP_STATE), 0);
  }
  ibv_wc wc{};
  EXPECT_EQ(s.a.context->ops.poll_cq(s.a.sends, 1, &wc), 0);
  s.a.connect(s.a.qp, s.b.qp->qp_num, s.b.lid);
  s.b.connect(s.b.qp, s.a.qp->qp_num, s.a.lid);
  ASSERT_EQ(s.b.receive(8, 0, 64), 0);
  ASSERT_EQ(s.a.send(7, 0, 8), 0);
  wc = s.a.wait(s.a.sends);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(wc.wr_id, 7u);
  EXPECT_EQ(s.b.wait(s.b.receives).wr_id, 8u);
}

}  // namespace
}  // namespace marrow::softnic_test
