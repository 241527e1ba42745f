// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Random WQEs through the engine against a plain model of the NIC: memory, old values, completions,
// errors, flushes, with index wrap. And random bytes as WQEs and commands: whatever they say, nothing
// outside the registered regions changes and the queue can be used again.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "unit/softnic_model.hpp"

namespace marrow::softnic_test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kWqes = 30000;
#else
constexpr int kWqes = 500000;
#endif

/// MARROW_MODEL_WQES: a longer run (10^8 take minutes).
std::int64_t wqes_of_each() {
  const char* text = std::getenv("MARROW_MODEL_WQES");
  return text ? std::atoll(text) / 2 : kWqes;
}

// Together 10^6: one with many mistakes, each of which starts the indices near their 16-bit wrap again, and
// one that goes round several times.
TEST(SoftnicModel, RandomWqesShallowQueue) { compare_with_model(11, 5, wqes_of_each(), 300); }
TEST(SoftnicModel, RandomWqesDeepQueue) { compare_with_model(12, 10, wqes_of_each(), 150'000); }

/// A good WQE with some bytes turned, or only noise.
TEST(SoftnicModel, GarbageNeverLeavesItsRegion) {
  Harness h(21, 6);
  Endpoint& a = h.pair.a;
  for (int i = 0; i < kWqes / 100; ++i) {
    Endpoint::Wqe w;
    auto [opcode, opmod] = random_wqe(h, w);
    const std::uint16_t index = a.post(w, opcode, kCompletionAlways, opmod, 0, false);
    const std::uint32_t bytes = h.random.below(4) == 0 ? 64 : w.ds * 16;
    const std::uint64_t turned = 1 + h.random.below(4);
    for (std::uint64_t k = 0; k < turned; ++k) {
      const auto at = static_cast<std::uint32_t>(h.random.below(bytes));
      const std::uint32_t block = (index + at / 64) & 63;
      a.sq[block * 64 + at % 64] ^= static_cast<std::byte>(1u << h.random.below(8));
    }
    if (h.random.below(4) == 0)
      a.producer = static_cast<std::uint16_t>(a.producer + h.random.below(70));
    a.ring();
    // Over when a completion or the error state shows; a WAIT or a turned-off completion never is.
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
    while (!a.cq.poll(std::chrono::milliseconds(0)).arrived && a.state() != kError &&
           std::chrono::steady_clock::now() < end) {
    }
    ASSERT_EQ(a.modify(kToRst), 0);  // from here the engine leaves the queue alone
    h.expect_guards();
    while (a.cq.poll(std::chrono::milliseconds(0)).arrived) {
    }
    h.restart();
    if (::testing::Test::HasFatalFailure()) return;
  }
  // The rest of the NIC is unharmed. The ring's owner bits are known again after the drain above.
  a.nop();
  EXPECT_TRUE(a.cq.poll().ok());
}

TEST(SoftnicModel, DecoderTakesAnyBytes) {
  Random random(31);
  std::vector<std::uint8_t> wqe(softnic::kMaxWqeBytes);
  softnic::Operation operation;
  for (int i = 0; i < kWqes; ++i) {
    for (std::size_t k = 0; k < 96; k += 8) {
      const std::uint64_t noise = random.next();
      std::memcpy(wqe.data() + k, &noise, 8);
    }
    static constexpr std::uint8_t opcodes[] = {kNop,  kWrite,       kWriteImmediate,    kRead,
                                               kWait, kCompareSwap, kMaskedCompareSwap, kDump};
    if (i % 4 != 0) wqe[3] = opcodes[random.below(8)];
    softnic::Control control = softnic::decode_control(wqe.data());
    if (control.ds == 0) control.ds = 1;
    // Exactly the bytes the WQE has: AddressSanitizer sees a read past them.
    std::vector<std::uint8_t> exact(wqe.begin(), wqe.begin() + control.ds * 16);
    const Syndrome syndrome = softnic::decode(exact.data(), control, operation);
    if (syndrome != kNoError) continue;
    ASSERT_LE(operation.sge_count, softnic::kMaxSges);
    if (operation.inline_data != nullptr) {
      ASSERT_LE(operation.inline_data + operation.bytes, exact.data() + exact.size());
    }
  }
}

TEST(SoftnicModel, CommandsTakeAnyBytes) {
  Endpoint a(unique_job("commands"));
  Random random(41);
  std::vector<verbs::mlx5dv_devx_obj*> made;
  static constexpr Command commands[] = {kCreateCq, kCreateQp, kRstToInit, kInitToRtr,  kRtrToRts,
                                         kToErr,    kToRst,    kQueryQp,   kQueryHcaCap};
  for (int i = 0; i < kWqes / 20; ++i) {
    std::vector<std::uint8_t> in(random.below(0x120));
    std::vector<std::uint8_t> out(random.below(0x120));
    for (auto& byte : in)
      byte = random.below(3) == 0 ? 0 : static_cast<std::uint8_t>(random.next());
    if (in.size() >= 16) {
      set(in.data(), command::opcode, commands[random.below(9)]);
      if (random.below(2) == 0) set(in.data(), command::object, a.qpn);
    }
    switch (random.below(4)) {
      case 0:
        if (auto* object =
                nic().devx_obj_create(a.context, in.data(), in.size(), out.data(), out.size())) {
          made.push_back(object);
        }
        break;
      case 1: nic().devx_obj_modify(a.object, in.data(), in.size(), out.data(), out.size()); break;
      case 2: nic().devx_obj_query(a.object, in.data(), in.size(), out.data(), out.size()); break;
      default: nic().devx_general_cmd(a.context, in.data(), in.size(), out.data(), out.size());
    }
  }
  for (auto* object : made) EXPECT_EQ(nic().devx_obj_destroy(object), 0);
}

}  // namespace
}  // namespace marrow::softnic_test
