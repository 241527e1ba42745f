// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// The CPU engine on memory that it must not touch: pages without any right, which only a FarMemory's
// copies reach through another mapping. What option engine=copy does with GPU memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "softnic/far_memory.hpp"
#include "softnic_support.hpp"

namespace marrow::softnic_test {
namespace {

/// Two mappings of one file: `data` can be touched, `far` cannot.
class FakeGpu final : public softnic::FarMemory {
 public:
  static constexpr std::size_t kBytes = 1 << 20;
  FakeGpu() {
    far =
        static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED, memory.fd.get(), 0));
    activate(this);
  }
  ~FakeGpu() override {
    activate(nullptr);
    ::munmap(far, kBytes);
  }
  bool is_far(const void* at) const override { return at >= far && at < far + kBytes; }
  // The last word by a release, as a copy engine's write of a completion entry is seen: whole.
  void copy(void* to, const void* from, std::size_t bytes) override {
    ++copies;
    auto* target = static_cast<std::byte*>(const_cast<void*>(near(to)));
    const auto* source = static_cast<const std::byte*>(near(from));
    if (bytes != 64) {
      std::memmove(target, source, bytes);
      return;
    }
    std::memmove(target, source, 60);
    std::uint32_t last;
    std::memcpy(&last, source + 60, 4);
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(target + 60))
        .store(last, std::memory_order_release);
  }
  const void* near(const void* at) const {
    return is_far(at) ? data() + (static_cast<const std::byte*>(at) - far) : at;
  }
  std::byte* data() const { return memory.data(); }

  SharedMemory memory{kBytes};
  std::byte* far = nullptr;
  std::atomic<int> copies{0};
};

TEST(SoftnicFarMemory, EveryOperationGoesThroughCopies) {
  FakeGpu gpu;
  Pair pair("far", "", QpOptions{}, QpOptions{.receive_queue = true});
  Endpoint& a = pair.a;
  auto* words = reinterpret_cast<std::uint64_t*>(gpu.data());
  const std::uint32_t lkey = a.region(gpu.far, FakeGpu::kBytes)->lkey;
  const std::uint32_t rkey = pair.b.region(gpu.far, FakeGpu::kBytes)->rkey;
  const std::uint64_t base = Endpoint::u64(gpu.far);
  for (int i = 0; i < 4096; ++i) words[i] = 1000u + static_cast<unsigned>(i);

  a.write(gpu.far, 32768, lkey, base + 65536, rkey);
  EXPECT_TRUE(a.cq.poll().ok());
  EXPECT_EQ(std::memcmp(gpu.data(), gpu.data() + 65536, 32768), 0);
  a.read(gpu.far + 131072, 24, lkey, base + 8, rkey);
  EXPECT_TRUE(a.cq.poll().ok());
  EXPECT_EQ(words[16384], 1001u);
  a.fetch_add(gpu.far + 16, lkey, base + 8, rkey, 5);
  EXPECT_TRUE(a.cq.poll().ok());
  EXPECT_EQ(words[1], 1006u);
  EXPECT_EQ(words[2], 1001u);
  Endpoint::Wqe inlined;
  struct {
    std::uint32_t count = to_big32(8 | kInlineFlag);
    std::uint8_t bytes[12] = {7, 7, 7, 7, 7, 7, 7, 7};
  } payload;
  inlined.add(Endpoint::remote(base + 24, rkey)).add(payload);
  a.post(inlined, kWrite);
  EXPECT_TRUE(a.cq.poll().ok());
  EXPECT_EQ(words[3], 0x0707070707070707ull);
  EXPECT_GT(gpu.copies.load(), 5);
}

TEST(SoftnicFarMemory, QueuesMayLieThere) {
  FakeGpu gpu;
  Pair pair("far-queues");
  // A queue pair whose rings and completion queue are far; the record and the register stay here.
  Endpoint& a = pair.a;
  constexpr std::uint32_t kRing = 65536, kEntries = 32;
  auto* cqes = reinterpret_cast<Cqe*>(gpu.data());
  for (std::uint32_t i = 0; i < kEntries; ++i) cqes[i].counter_owner = kInitialCounterOwner;
  auto* umem = nic().devx_umem_reg(a.context, gpu.far, FakeGpu::kBytes, 1);
  alignas(64) DoorbellRecord record{};
  auto* near = nic().devx_umem_reg(a.context, &record, sizeof record, 1);
  std::uint32_t eqn = 0;
  nic().devx_query_eqn(a.context, 0, &eqn);
  std::uint8_t in[create_cq::kInBytes] = {}, out[create_cq::kOutBytes] = {};
  set(in, command::opcode, kCreateCq);
  std::uint8_t* c = in + create_cq::kContext;
  set(c, cqc::record_umem_valid, 1);
  set(c, cqc::record_umem_id, umem->umem_id);
  set(c, cqc::record_address, 16384);
  set(c, cqc::overrun_ignore, 1);
  set(c, cqc::log_cq_size, 5);
  set(c, cqc::uar_page, a.uar->page_id);
  set(c, cqc::eqn, eqn);
  set(in, create_cq::cq_umem_id, umem->umem_id);
  set(in, create_cq::cq_umem_valid, 1);
  auto* cq = nic().devx_obj_create(a.context, in, sizeof in, out, sizeof out);
  ASSERT_NE(cq, nullptr) << nic().last_error();
  const auto cqn = static_cast<std::uint32_t>(get(out, reply::object));
  std::uint8_t create[create_qp::kInBytes] = {};
  set(create, command::opcode, kCreateQp);
  c = create + create_qp::kContext;
  set(c, qpc::pd, a.pdn);
  set(c, qpc::uar_page, a.uar->page_id);
  set(c, qpc::log_sq_size, 5);
  set(c, qpc::rq_type, kRqNone);
  set(c, qpc::cqn_send, cqn);  // and no receive queue, as drivers that never receive
  set(c, qpc::record_umem_valid, 1);
  set(c, qpc::record_umem_id, near->umem_id);
  set(create, create_qp::wq_umem_offset, kRing);
  set(create, create_qp::wq_umem_id, umem->umem_id);
  set(create, create_qp::wq_umem_valid, 1);
  auto* qp = nic().devx_obj_create(a.context, create, sizeof create, out, sizeof out);
  ASSERT_NE(qp, nullptr) << nic().last_error();
  const auto qpn = static_cast<std::uint32_t>(get(out, reply::object));
  // To itself.
  for (const Command step : {kRstToInit, kInitToRtr, kRtrToRts}) {
    std::uint8_t change[modify_qp::kInBytes] = {};
    set(change, command::opcode, step);
    set(change, command::object, qpn);
    std::uint8_t* q = change + modify_qp::kContext;
    set(q, qpc::path_migration, kPathMigrated);
    set(q, qpc::mtu, 5);
    set(q, qpc::remote_qpn, qpn);
    set(q, at(qpc::kPrimaryPath, ads::rlid), a.lid());
    set(q, at(qpc::kPrimaryPath, ads::port), 1);
    ASSERT_EQ(nic().devx_obj_modify(qp, change, sizeof change, out, sizeof out), 0)
        << nic().last_error();
  }
  for (std::uint32_t i = 0; i < 100; ++i) {
    std::uint8_t* wqe = reinterpret_cast<std::uint8_t*>(gpu.data()) + kRing + (i % 32) * 64;
    ControlSegment nop{control_word(kNop, static_cast<std::uint16_t>(i)),
                       qpn_ds_word(qpn, 1),
                       0,
                       {},
                       kCompletionAlways,
                       0};
    std::memcpy(wqe, &nop, sizeof nop);
    std::atomic_ref<std::uint32_t>(record.send)
        .store(record_word(static_cast<std::uint16_t>(i + 1)), std::memory_order_release);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!cqe_valid(load32(&cqes[i % kEntries].counter_owner), i, kEntries)) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "WQE " << i;
      std::this_thread::yield();
    }
  }
  EXPECT_GE(gpu.copies.load(), 200);  // each WQE and each entry
  EXPECT_EQ(nic().devx_obj_destroy(qp), 0);
  EXPECT_EQ(nic().devx_obj_destroy(cq), 0);
  EXPECT_EQ(nic().devx_umem_dereg(near), 0);
  EXPECT_EQ(nic().devx_umem_dereg(umem), 0);
}

}  // namespace
}  // namespace marrow::softnic_test
