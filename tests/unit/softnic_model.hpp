// SPDX-License-Identifier: Apache-2.0
// Random WQEs through an engine against a plain model of the NIC: memory, old values, completions,
// errors, flushes, with index wrap.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <string>
#include <tuple>

#include "softnic/decode.hpp"
#include "softnic/options.hpp"
#include "unit/softnic_support.hpp"

namespace marrow::softnic_test {

using softnic::Random;

inline constexpr std::uint32_t kBytes = 1024;
inline constexpr std::uint32_t kGuard = 256;

/// What the test says a queue pair does, one WQE at a time.
struct Model {
  std::array<std::uint8_t, kBytes> local{};
  std::array<std::uint8_t, kBytes> remote{};

  template <class Word>
  Word load(const std::array<std::uint8_t, kBytes>& memory, std::uint32_t at) const {
    Word value;
    std::memcpy(&value, memory.data() + at, sizeof value);
    return value;
  }
  template <class Word>
  void store(std::array<std::uint8_t, kBytes>& memory, std::uint32_t at, Word value) {
    std::memcpy(memory.data() + at, &value, sizeof value);
  }
  /// Addition bit by bit: a boundary bit swallows its carry.
  template <class Word>
  static Word add(Word a, Word b, Word boundary) {
    Word sum = 0;
    unsigned carry = 0;
    for (unsigned i = 0; i < sizeof(Word) * 8; ++i) {
      const unsigned bits = unsigned(a >> i & 1) + unsigned(b >> i & 1) + carry;
      sum |= static_cast<Word>(Word(bits & 1) << i);
      carry = (boundary >> i & 1) != 0 ? 0 : bits >> 1;
    }
    return sum;
  }
  template <class Word>
  static Word swap(Word old, Word value, Word compare, Word value_mask, Word compare_mask) {
    for (unsigned i = 0; i < sizeof(Word) * 8; ++i) {
      if ((compare_mask >> i & 1) != 0 && (old >> i & 1) != (compare >> i & 1)) return old;
    }
    Word result = old;
    for (unsigned i = 0; i < sizeof(Word) * 8; ++i) {
      if ((value_mask >> i & 1) == 0) continue;
      result = static_cast<Word>((result & ~(Word{1} << i)) | (value & (Word{1} << i)));
    }
    return result;
  }
};

struct Harness {
  Harness(std::uint64_t seed, unsigned log_sq, const std::string& job = unique_job("model"))
      : random(seed),
        pair(Pair::InJob{job}, "start_index=0xff00", options(log_sq)),
        local_memory(kBytes + 2 * kGuard),
        remote_memory(kBytes + 2 * kGuard) {
    std::memset(local_memory.data(), 0xee, kBytes + 2 * kGuard);
    std::memset(remote_memory.data(), 0xee, kBytes + 2 * kGuard);
    for (std::uint32_t i = 0; i < kBytes; ++i) {
      model.local[i] = local()[i] = static_cast<std::uint8_t>(random.next());
      model.remote[i] = remote()[i] = static_cast<std::uint8_t>(random.next());
    }
    lkey = pair.a.region(local(), kBytes)->lkey;
    rkey = pair.b.region_at(remote(), kBytes, kIova)->rkey;
  }
  static QpOptions options(unsigned log_sq) {
    QpOptions o;
    o.log_sq = log_sq;
    o.start = 0xff00;
    return o;
  }
  std::uint8_t* local() { return local_memory.as<std::uint8_t>(kGuard); }
  std::uint8_t* remote() { return remote_memory.as<std::uint8_t>(kGuard); }

  void expect_equal() {
    ASSERT_EQ(0, std::memcmp(local(), model.local.data(), kBytes));
    ASSERT_EQ(0, std::memcmp(remote(), model.remote.data(), kBytes));
    expect_guards();
  }
  void expect_guards() {
    const auto* a = local_memory.as<std::uint8_t>();
    const auto* b = remote_memory.as<std::uint8_t>();
    for (std::uint32_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(a[i] & b[i], 0xee);
      ASSERT_EQ(a[kGuard + kBytes + i] & b[kGuard + kBytes + i], 0xee);
    }
  }
  void restart() {
    pair.a.producer = 0xff00;
    std::atomic_ref<std::uint32_t>(pair.a.record->send).store(record_word(0xff00));
    pair.a.connect(pair.b.qpn, pair.b.lid());
  }

  static constexpr std::uint64_t kIova = 0x7000000000000000ull;
  Random random;
  Pair pair;
  Model model;
  Pages local_memory, remote_memory;
  std::uint32_t lkey = 0, rkey = 0;
};

/// Appends data segments for `bytes` bytes split over `pieces` local buffers; calls each(local, offset, n).
template <class Each>
void buffers(Harness& h, Endpoint::Wqe& w, std::uint32_t bytes, std::uint32_t pieces, Each&& each) {
  std::uint32_t done = 0;
  for (std::uint32_t i = 0; i < pieces && done < bytes; ++i) {
    const std::uint32_t n = i + 1 == pieces
                                ? bytes - done
                                : 1 + static_cast<std::uint32_t>(h.random.below(bytes - done));
    const auto at = static_cast<std::uint32_t>(h.random.below(kBytes - n + 1));
    w.add(Endpoint::data(h.local() + at, n, h.lkey));
    each(at, done, n);
    done += n;
  }
}

/// Builds one random good WQE, applies it to the model. @return opcode and opmod
inline std::pair<std::uint8_t, std::uint8_t> random_wqe(Harness& h, Endpoint::Wqe& w) {
  Random& r = h.random;
  Model& m = h.model;
  const auto kind = r.below(12);
  if (kind == 0) return {kNop, 0};
  if (kind == 1) {
    w.add(Endpoint::data(h.local(), 8, h.lkey));
    return {kDump, 0};
  }
  if (kind <= 3) {  // inline WRITE
    const auto bytes = static_cast<std::uint32_t>(r.below(120));
    const auto to = static_cast<std::uint32_t>(r.below(kBytes - bytes));
    w.add(Endpoint::remote(Harness::kIova + to, h.rkey));
    const std::uint32_t header = to_big32(bytes | kInlineFlag);
    std::memcpy(w.bytes + 32, &header, 4);
    for (std::uint32_t i = 0; i < bytes; ++i) {
      w.bytes[36 + i] = m.remote[to + i] = static_cast<std::uint8_t>(r.next());
    }
    w.ds = 2 + (bytes + 4 + 15) / 16;
    return {kWrite, 0};
  }
  if (kind <= 6) {
    const auto bytes = static_cast<std::uint32_t>(1 + r.below(300));
    const auto to = static_cast<std::uint32_t>(r.below(kBytes - bytes));
    w.add(Endpoint::remote(Harness::kIova + to, h.rkey));
    buffers(h, w, bytes, static_cast<std::uint32_t>(1 + r.below(4)),
            [&](std::uint32_t at, std::uint32_t offset, std::uint32_t n) {
              std::memcpy(m.remote.data() + to + offset, m.local.data() + at, n);
            });
    return {kWrite, 0};
  }
  if (kind == 7) {
    const auto bytes = static_cast<std::uint32_t>(1 + r.below(300));
    const auto from = static_cast<std::uint32_t>(r.below(kBytes - bytes));
    w.add(Endpoint::remote(Harness::kIova + from, h.rkey));
    buffers(h, w, bytes, static_cast<std::uint32_t>(1 + r.below(2)),
            [&](std::uint32_t at, std::uint32_t offset, std::uint32_t n) {
              std::memcpy(m.local.data() + at, m.remote.data() + from + offset, n);
            });
    return {kRead, 0};
  }
  // Atomics: plain or masked, 4 or 8 bytes.
  const bool swap = r.below(2) == 0;
  const bool masked = r.below(2) == 0;
  const bool four = masked && r.below(2) == 0;
  const std::uint32_t size = four ? 4 : 8;
  const auto at = static_cast<std::uint32_t>(r.below(kBytes / size)) * size;
  const auto sink = static_cast<std::uint32_t>(r.below(kBytes - size));
  const std::uint64_t operand = r.next(), mask = r.next() & r.next();
  const std::uint64_t compare_mask = r.below(2) == 0 ? 0xf : 0;
  const std::uint64_t value =
      four ? m.load<std::uint32_t>(m.remote, at) : m.load<std::uint64_t>(m.remote, at);
  const std::uint64_t compare = r.below(2) == 0 ? value : value ^ 1;
  w.add(Endpoint::remote(Harness::kIova + at, h.rkey));
  if (!masked) {
    w.add(AtomicSegment{to_big64(operand), to_big64(compare)});
  } else if (four && swap) {
    w.add(MaskedCompareSwap4Segment{to_big32(std::uint32_t(operand)),
                                    to_big32(std::uint32_t(compare)), to_big32(std::uint32_t(mask)),
                                    to_big32(std::uint32_t(compare_mask))});
  } else if (four) {
    w.add(
        MaskedFetchAdd4Segment{to_big32(std::uint32_t(operand)), to_big32(std::uint32_t(mask)), 0});
  } else if (swap) {
    w.add(MaskedCompareSwap8Segment{to_big64(operand), to_big64(compare), to_big64(mask),
                                    to_big64(compare_mask)});
  } else {
    w.add(MaskedFetchAdd8Segment{to_big64(operand), to_big64(mask)});
  }
  w.add(Endpoint::data(h.local() + sink, size, h.lkey));
  const auto apply = [&]<class Word>(Word) {
    const auto old = static_cast<Word>(value);
    const Word next = swap ? Model::swap<Word>(old, Word(operand), Word(compare),
                                               masked ? Word(mask) : Word(~Word{0}),
                                               masked ? Word(compare_mask) : Word(~Word{0}))
                           : Model::add<Word>(old, Word(operand), masked ? Word(mask) : Word{0});
    m.store<Word>(m.remote, at, next);
    m.store<Word>(m.local, sink, old);
  };
  if (four) {
    apply(std::uint32_t{});
  } else {
    apply(std::uint64_t{});
  }
  const std::uint8_t opcode =
      masked ? (swap ? kMaskedCompareSwap : kMaskedFetchAdd) : (swap ? kCompareSwap : kFetchAdd);
  const std::uint8_t size_code = four ? kMasked4 : kMasked8;
  return {opcode, masked ? size_code : std::uint8_t{0}};
}

/// Builds a WQE that must fail. @return opcode and the syndrome it fails with
inline std::pair<std::uint8_t, Syndrome> random_mistake(Harness& h, Endpoint::Wqe& w) {
  constexpr std::uint64_t kInside = Harness::kIova + 64, kEnd = Harness::kIova + kBytes;
  const auto two = [&](std::uint64_t remote, std::uint32_t rkey, std::uint8_t* local,
                       std::uint32_t bytes, std::uint32_t lkey) {
    w.add(Endpoint::remote(remote, rkey));
    w.add(Endpoint::data(local, bytes, lkey));
  };
  switch (h.random.below(8)) {
    case 0: two(kInside, h.rkey ^ 1, h.local(), 8, h.lkey); return {kWrite, kRemoteAccessError};
    case 1: two(kEnd - 7, h.rkey, h.local(), 8, h.lkey); return {kWrite, kRemoteAccessError};
    case 2: two(0, h.rkey, h.local(), 8, h.lkey); return {kRead, kRemoteAccessError};
    case 3: two(kInside, h.rkey, h.local(), 8, h.lkey ^ 1); return {kWrite, kLocalProtectionError};
    case 4:
      two(kInside, h.rkey, h.local() + kBytes - 7, 8, h.lkey);
      return {kRead, kLocalProtectionError};
    case 5:  // one byte more than the length says
      two(kInside, h.rkey, h.local() - 1, 8, h.lkey);
      return {kWrite, kLocalProtectionError};
    case 6:
      w.add(Endpoint::remote(kInside + 4, h.rkey));
      w.add(AtomicSegment{to_big64(1), 0});
      w.add(Endpoint::data(h.local(), 8, h.lkey));
      return {kFetchAdd, kRemoteInvalidRequestError};
    default: return {0x3e, kLocalQpOperationError};  // no such opcode
  }
}

/// @param good  WQEs between two mistakes, on average
/// @param done  counts WQEs, if not null; the run ends early when *stop is set
inline void compare_with_model(std::uint64_t seed, unsigned log_sq, std::int64_t wqes,
                               std::uint64_t good, const std::string& job = unique_job("model"),
                               std::atomic<std::uint64_t>* done = nullptr,
                               const std::atomic<bool>* stop = nullptr) {
  Harness h(seed, log_sq, job);
  Endpoint& a = h.pair.a;
  const std::uint32_t depth = 1u << log_sq;
  std::int64_t posted = 0;
  while (posted < wqes && !(stop != nullptr && stop->load(std::memory_order_relaxed))) {
    const std::int64_t before_batch = posted;
    struct Expected {
      std::uint16_t index;
      std::uint8_t opcode;
      std::uint8_t syndrome;
    };
    std::deque<Expected> expected;
    std::uint32_t blocks = 0;
    bool failed = false;
    const auto want = 1 + h.random.below(depth);
    while (posted < wqes) {
      Endpoint::Wqe w;
      // The model runs ahead: what follows an error is flushed and changes nothing.
      const Model before = h.model;
      auto [opcode, opmod] = random_wqe(h, w);
      if (blocks + blocks_of(w.ds) > depth || blocks >= want) {
        h.model = before;
        break;
      }
      std::uint8_t syndrome = failed ? std::uint8_t{kFlushError} : std::uint8_t{kNoError};
      if (failed) {
        h.model = before;
      } else if (h.random.below(good) == 0) {
        h.model = before;
        failed = true;
        w = {};
        std::tie(opcode, syndrome) = random_mistake(h, w);
        opmod = 0;
      }
      static constexpr std::uint8_t fences[] = {kNoFence, kSmallFence, kFence, kStrongOrdering};
      const bool signalled = syndrome != kNoError || h.random.below(3) != 0;
      const std::uint8_t flags = static_cast<std::uint8_t>(
          fences[h.random.below(4)] | (signalled ? kCompletionAlways : kCompletionOnError));
      const std::uint16_t index = a.post(w, opcode, flags, opmod, 0, false);
      if (signalled) expected.push_back({index, opcode, syndrome});
      blocks += blocks_of(w.ds);
      ++posted;
      if (h.random.below(8) == 0) a.ring();
    }
    if (blocks == 0) continue;
    if (blocks < depth) {  // a marker with completion ends the batch
      Endpoint::Wqe w;
      const std::uint16_t index = a.post(w, kNop, kCompletionAlways, 0, 0, false);
      expected.push_back(
          {index, kNop, failed ? std::uint8_t{kFlushError} : std::uint8_t{kNoError}});
    }
    static constexpr Endpoint::Bell bells[] = {Endpoint::Bell::both, Endpoint::Bell::record_only,
                                               Endpoint::Bell::next_index};
    a.ring(bells[h.random.below(3)]);
    for (const Expected& each : expected) {
      const Completed done = a.cq.poll();
      ASSERT_TRUE(done.arrived) << "seed " << seed << " WQE " << posted;
      ASSERT_EQ(int(done.syndrome), int(each.syndrome)) << "seed " << seed << " WQE " << posted;
      ASSERT_EQ(done.counter, each.index);
    }
    if (blocks == depth) {  // drain what had no completion of its own
      const std::uint16_t index = failed ? a.producer : a.nop();
      if (!failed) {
        const Completed done = a.cq.poll();
        ASSERT_TRUE(done.ok());
        ASSERT_EQ(done.counter, index);
      }
    }
    h.expect_equal();
    if (done != nullptr) done->fetch_add(static_cast<std::uint64_t>(posted - before_batch));
    if (::testing::Test::HasFatalFailure()) {
      FAIL() << "seed " << seed << " after " << posted << " WQEs";
    }
    if (failed) {
      ASSERT_EQ(a.modify(kToRst), 0);
      h.restart();
    }
  }
}

}  // namespace marrow::softnic_test
