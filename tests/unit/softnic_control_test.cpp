// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// The control path as a driver sees it: every command of a queue pair's life, what QUERY_QP gives back,
// the places where a doorbell may be rung, BlueFlame, UARs that are shared and freed early.
#include <gtest/gtest.h>

#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

std::array<std::uint8_t, query_qp::kOutBytes> query(const Endpoint& e) {
  std::uint8_t in[query_qp::kInBytes] = {};
  std::array<std::uint8_t, query_qp::kOutBytes> out{};
  set(in, command::opcode, kQueryQp);
  set(in, command::object, e.qpn);
  EXPECT_EQ(nic().devx_obj_query(e.object, in, sizeof in, out.data(), out.size()), 0);
  return out;
}
std::uint64_t field(const Endpoint& e, Field f) {
  return get(query(e).data() + query_qp::kContext, f);
}

TEST(SoftnicControl, AWholeLife) {
  const std::string job = unique_job("life");
  Endpoint a(job), b(job);
  EXPECT_EQ(field(a, qpc::state), kReset);
  EXPECT_GE(field(a, qpc::mtu), 1u);  // a valid one, before any was given
  EXPECT_EQ(field(a, qpc::pd), a.pdn);

  // Steps out of order are refused and change nothing.
  std::uint8_t c[qpc::kBytes] = {};
  set(c, qpc::path_migration, kPathMigrated);
  EXPECT_EQ(a.modify(kRtrToRts, c), EREMOTEIO);
  EXPECT_EQ(a.modify(kInitToRtr, c), EREMOTEIO);
  EXPECT_EQ(a.modify(kInitToInit, c), EREMOTEIO);
  EXPECT_EQ(field(a, qpc::state), kReset);
  std::uint8_t unmigrated[qpc::kBytes] = {};
  EXPECT_EQ(a.modify(kRstToInit, unmigrated), EREMOTEIO);

  set(c, qpc::remote_read_enable, 1);
  ASSERT_EQ(a.modify(kRstToInit, c), 0);
  EXPECT_EQ(field(a, qpc::state), kInit);
  EXPECT_EQ(field(a, qpc::remote_read_enable), 1u);
  EXPECT_EQ(field(a, qpc::remote_write_enable), 0u);
  // INIT2INIT restates the rights that its mask names: RRE (1), RAE (2), RWE (3).
  std::uint8_t rights[qpc::kBytes] = {};
  set(rights, qpc::remote_write_enable, 1);
  set(rights, qpc::remote_atomic_enable, 1);
  ASSERT_EQ(a.modify(kInitToInit, rights, 0xe), 0);
  EXPECT_EQ(field(a, qpc::remote_read_enable), 0u);
  EXPECT_EQ(field(a, qpc::remote_write_enable), 1u);
  EXPECT_EQ(field(a, qpc::remote_atomic_enable), 1u);

  std::uint8_t path[qpc::kBytes] = {};
  set(path, qpc::mtu, 3);
  set(path, qpc::remote_qpn, b.qpn);
  set(path, qpc::min_rnr_nak, 12);
  set(path, qpc::next_receive_psn, 0x123456);
  set(path, qpc::log_responder_reads, 4);
  set(path, at(qpc::kPrimaryPath, ads::rlid), b.lid());
  set(path, at(qpc::kPrimaryPath, ads::port), 1);
  ASSERT_EQ(a.modify(kInitToRtr, path), 0);
  EXPECT_EQ(field(a, qpc::state), kReadyToReceive);
  EXPECT_EQ(field(a, qpc::mtu), 3u);
  EXPECT_EQ(field(a, qpc::remote_qpn), b.qpn);
  EXPECT_EQ(field(a, qpc::next_receive_psn), 0x123456u);
  EXPECT_EQ(field(a, at(qpc::kPrimaryPath, ads::rlid)), b.lid());
  std::uint8_t go[qpc::kBytes] = {};
  set(go, qpc::retry_count, 5);
  set(go, qpc::rnr_retry, 6);
  set(go, qpc::next_send_psn, 0x654321);
  set(go, at(qpc::kPrimaryPath, ads::ack_timeout), 14);
  ASSERT_EQ(a.modify(kRtrToRts, go), 0);
  EXPECT_EQ(field(a, qpc::state), kReadyToSend);
  EXPECT_EQ(field(a, qpc::retry_count), 5u);
  EXPECT_EQ(field(a, qpc::rnr_retry), 6u);
  EXPECT_EQ(field(a, qpc::next_send_psn), 0x654321u);
  EXPECT_EQ(field(a, at(qpc::kPrimaryPath, ads::ack_timeout)), 14u);
  ASSERT_EQ(a.modify(kRtsToRts, rights, 1u << 3), 0);  // writes stay allowed, nothing else named
  EXPECT_EQ(field(a, qpc::remote_atomic_enable), 1u);

  // Indices move with the work.
  for (int i = 0; i < 3; ++i) {
    a.nop();
    EXPECT_TRUE(a.cq.poll().ok());
  }
  EXPECT_EQ(field(a, qpc::hw_sq_index), 3u);
  EXPECT_EQ(field(a, qpc::sw_sq_index), 3u);
  ASSERT_EQ(a.modify(kToErr), 0);
  EXPECT_EQ(field(a, qpc::state), kError);
  ASSERT_EQ(a.modify(kToRst), 0);
  EXPECT_EQ(field(a, qpc::state), kReset);
  EXPECT_EQ(field(a, qpc::hw_sq_index), 0u);
}

TEST(SoftnicControl, DoorbellsWithoutARecord) {
  QpOptions no_record;
  no_record.record = false;
  Pair pair("no-record", "", no_record);
  Endpoint& a = pair.a;
  auto* place = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(a.uar->base_addr) +
                                                 kNoRecordDoorbell);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(place) % 64, 0u);
  for (int i = 0; i < 100; ++i) {
    Endpoint::Wqe w;
    a.post(w, kNop, kCompletionAlways, 0, 0, /*ring_now=*/false);
    std::atomic_ref<std::uint64_t>(*place).store(doorbell_value(a.qpn, a.producer),
                                                 std::memory_order_release);
    ASSERT_TRUE(a.cq.poll().ok()) << i;
  }
}

TEST(SoftnicControl, UarsDoNotShareADoorbell) {
  Endpoint a(unique_job("uars"));
  std::vector<verbs::mlx5dv_devx_uar*> uars;
  std::vector<std::uintptr_t> places;
  const auto place = [](const void* p, std::size_t offset = 0) {
    return (reinterpret_cast<std::uintptr_t>(p) + offset) / 64;
  };
  for (int i = 0; i < 200; ++i) {
    auto* uar = nic().devx_alloc_uar(a.context, i % 3 == 0 ? verbs::kUarBlueFlame : 1u);
    ASSERT_NE(uar, nullptr);
    uars.push_back(uar);
    places.push_back(place(uar->reg_addr));
    places.push_back(place(uar->base_addr, kNoRecordDoorbell));
    if (i % 3 == 0) places.push_back(place(uar->reg_addr, (1u << kLogBlueFlameBytes) / 2));
  }
  std::sort(places.begin(), places.end());
  EXPECT_EQ(std::adjacent_find(places.begin(), places.end()), places.end());
  for (auto* uar : uars) nic().devx_free_uar(uar);
  EXPECT_EQ(nic().devx_alloc_uar(a.context, 77), nullptr);
}

/// BlueFlame: the WQE stands in the register alone, the ring holds garbage.
TEST(SoftnicControl, BlueFlameTakesTheWqeFromTheRegister) {
  QpOptions options;
  options.uar_kind = verbs::kUarBlueFlame;
  Pair pair("blue-flame", "", options);
  Endpoint& a = pair.a;
  std::uint64_t memory[2] = {0, 0};
  const std::uint32_t rkey = pair.b.region(memory, sizeof memory)->rkey;
  constexpr std::uint32_t half = (1u << kLogBlueFlameBytes) / 2;
  for (std::uint32_t i = 0; i < 100; ++i) {
    alignas(64) std::uint8_t wqe[64] = {};
    ControlSegment control{};
    control.opmod_index_opcode = control_word(kWrite, a.producer);
    control.qpn_ds = qpn_ds_word(a.qpn, 3);
    control.fm_ce_se = kCompletionAlways;
    std::memcpy(wqe, &control, 16);
    const RemoteSegment remote = Endpoint::remote(Endpoint::u64(memory), rkey);
    std::memcpy(wqe + 16, &remote, 16);
    const std::uint32_t inlined[4] = {to_big32(8 | kInlineFlag), i, i, 0};
    std::memcpy(wqe + 32, inlined, 16);
    std::memset(a.sq + (a.producer % 32) * 64, 0xee, 64);
    ++a.producer;
    auto* at = static_cast<std::byte*>(a.uar->reg_addr) + (i % 2) * half;
    std::memcpy(at + 8, wqe + 8, 56);
    std::uint64_t first;
    std::memcpy(&first, wqe, 8);
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(at))
        .store(first, std::memory_order_release);
    const Completed done = a.cq.poll();
    ASSERT_TRUE(done.ok()) << i << ", syndrome " << int(done.syndrome);
    ASSERT_EQ(memory[0], std::uint64_t{i} << 32 | i);
  }
}

/// A ring that was written counts, also when the register holds something else behind the first 8 bytes.
TEST(SoftnicControl, BlueFlameWithTheRingWritten) {
  QpOptions options;
  options.uar_kind = verbs::kUarBlueFlame;
  Pair pair("blue-flame-ring", "", options);
  Endpoint& a = pair.a;
  for (int i = 0; i < 50; ++i) {
    Endpoint::Wqe w;
    a.post(w, kNop, kCompletionAlways, 0, 0, false);
    auto* at = static_cast<std::byte*>(a.uar->reg_addr);
    std::memset(at + 8, 0xff, 56);
    a.ring(Endpoint::Bell::last_wqe);
    ASSERT_TRUE(a.cq.poll().ok()) << i;
  }
}

TEST(SoftnicControl, AUarFreedEarlyServesUntilItsQueuesGo) {
  Pair pair("early-free");
  Endpoint& a = pair.a;
  nic().devx_free_uar(a.uar);
  for (int i = 0; i < 5; ++i) {
    a.nop();
    EXPECT_TRUE(a.cq.poll().ok());
  }
  // Its place is not given out meanwhile.
  auto* other = nic().devx_alloc_uar(a.context, verbs::kUarNonCached);
  EXPECT_NE(other->reg_addr, a.uar->reg_addr);
  nic().devx_free_uar(other);
  a.uar_freed = true;
}

/// Reads end before what a fence marks begins: the READ's data is what the WRITE carries on.
TEST(SoftnicControl, FenceBits) {
  Pair pair("fence", "reorder=1,delay=50");
  Endpoint& a = pair.a;
  std::uint64_t local[4] = {}, remote[4] = {};
  const std::uint32_t lkey = a.region(local, sizeof local)->lkey;
  const std::uint32_t rkey = pair.b.region(remote, sizeof remote)->rkey;
  for (std::uint64_t i = 1; i <= 20; ++i) {
    for (const std::uint8_t fence : {kSmallFence, kFence, kStrongOrdering, kSmallFenceAndFence}) {
      remote[0] = i * 8 + fence;
      remote[1] = 0;
      a.read(&local[0], 8, lkey, Endpoint::u64(&remote[0]), rkey);
      a.write(&local[0], 8, lkey, Endpoint::u64(&remote[1]), rkey,
              static_cast<std::uint8_t>(kCompletionAlways | fence));
      EXPECT_TRUE(a.cq.poll().ok());
      EXPECT_TRUE(a.cq.poll().ok());
      ASSERT_EQ(remote[1], i * 8 + fence);
    }
  }
}

TEST(SoftnicControl, CapabilitiesByKind) {
  Endpoint a(unique_job("caps"));
  const auto ask = [&](std::uint32_t kind, Field f) {
    std::uint8_t in[hca_cap::kInBytes] = {};
    std::uint8_t out[hca_cap::kOutBytes] = {};
    set(in, command::opcode, kQueryHcaCap);
    set(in, command::op_mod, kind << 1 | 1);
    EXPECT_EQ(nic().devx_general_cmd(a.context, in, sizeof in, out, sizeof out), 0);
    return get(out + hca_cap::kCapability, f);
  };
  EXPECT_EQ(ask(hca_cap::kGeneral, hca_cap::port_type), 0u);
  EXPECT_EQ(ask(hca_cap::kGeneral, hca_cap::general_2_present), 1u);
  EXPECT_GE(ask(hca_cap::kGeneral, hca_cap::max_send_wqe_bytes), 64u);
  EXPECT_EQ(ask(hca_cap::kGeneral, hca_cap::log_bf_register_size), kLogBlueFlameBytes);
  EXPECT_EQ(ask(hca_cap::kGeneral2, hca_cap::no_record_mode), 1u);
  EXPECT_EQ(ask(hca_cap::kAtomic, hca_cap::atomic_operations), 0xfu);
  EXPECT_EQ(ask(hca_cap::kRoce, hca_cap::port_type), 0u);
}

}  // namespace
}  // namespace marrow::softnic_test
