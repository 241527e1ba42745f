// SPDX-License-Identifier: Apache-2.0
// The plan of a Group's window at sizes that no 32-bit number holds: nothing overlaps, nothing leaves the window.
#include "ep/shape.hpp"

#include <gtest/gtest.h>

#include <iterator>

namespace marrow::ep {
namespace {

Config large(Payload payload) {
  Config c;
  c.experts.assign(16, 128);
  c.max_tokens = 65536;
  c.hidden = 16384;
  c.top_k = 32;
  c.payload = payload;
  c.batches_in_flight = 3;
  return c;
}

TEST(EpShape, OffsetsPast4GiBDoNotOverlap) {
  for (const Payload payload : {Payload::fp8, Payload::bf16}) {
    for (const int far : {0, 15}) {
      std::vector<bool> is_far(16);
      for (int r = 0; r < far; ++r) is_far[static_cast<std::size_t>(r)] = true;
      const Plan plan = make_plan(checked(large(payload), 16, true), 15, is_far);
      const Shape& s = plan.shape;
      EXPECT_GT(plan.memory.total, std::uint64_t{1} << 38);
      // Neighbours in each direction are a stride apart, also across sets and sources.
      EXPECT_EQ(s.row_at(0, 0, 1) - s.row_at(0, 0, 0), s.row_stride);
      EXPECT_EQ(s.row_at(0, 1, 0) - s.row_at(0, 0, 65535), s.row_stride);
      EXPECT_EQ(s.row_at(1, 0, 0) - s.row_at(0, 15, 65535), s.row_stride);
      EXPECT_EQ(s.combine_at(0, 1, 0) - s.combine_at(0, 0, 31), s.combine_stride);
      EXPECT_EQ(s.combine_at(1, 0, 0) - s.combine_at(0, 65535, 31), s.combine_stride);
      EXPECT_EQ(s.meta_at(1, 0) - s.meta_at(0, 15), s.meta_stride);
      EXPECT_GE(s.row_stride, std::uint64_t{16384} * (payload == Payload::fp8 ? 1 : 2));
      // Each part ends before another begins, or the window does.
      struct Part {
        std::uint64_t begin, end;
      };
      const Part parts[] = {{s.meta, s.meta_at(5, 15) + s.meta_stride},
                            {s.rows, s.row_at(5, 15, 65535) + s.row_stride},
                            {s.combine, s.combine_at(5, 65535, 31) + s.combine_stride},
                            {s.hello, s.hello_at(5, 15) + 16},
                            {s.control, s.control + sizeof(Control)},
                            {s.handles, s.handles + 6 * s.handle_stride}};
      for (const Part& a : parts) {
        EXPECT_LE(a.end, plan.memory.total);
        EXPECT_EQ(a.begin % 16, 0u);
        for (const Part& b : parts) {
          EXPECT_TRUE(&a == &b || a.end <= b.begin || b.end <= a.begin)
              << a.begin << ".." << a.end << " and " << b.begin << ".." << b.end;
        }
      }
    }
  }
}

// The set of a batch, whatever its number.
TEST(EpShape, RemaindersAreExactForAnyNumber) {
  for (std::uint32_t d = 1; d <= 200; ++d) {
    const Modulus by = Modulus::by(d);
    for (const std::uint64_t near :
         {std::uint64_t{0}, std::uint64_t{1} << 32, std::uint64_t{1} << 63, ~std::uint64_t{0} - 500,
          ~std::uint64_t{0} / d * d - 2}) {
      for (std::uint64_t n = near; n < near + 400 && n >= near; ++n)
        ASSERT_EQ(by.remainder(n), n % d) << n << " by " << d;
    }
  }
}

// Kernels divide by two multiplications: exact next to every multiple, up to the largest slot and divisor.
TEST(EpShape, DivisorsAreExact) {
  constexpr int kMost = (1 << 30) - 1;
  for (int d = 1; d <= 65536; ++d) {
    const Divisor by = Divisor::by(static_cast<std::uint32_t>(d));
    for (const int q : {0, 1, 2, kMost / d / 2, kMost / d - 1, kMost / d}) {
      for (const int n : {q * d, q * d + d - 1, q * d - 1}) {
        if (n < 0 || n > kMost) continue;
        ASSERT_EQ(by.quotient(n), n / d) << n << " / " << d;
      }
    }
  }
}

// The largest group there could be: its rows have no number of 31 bits, so it is refused.
TEST(EpShape, RowsThatCannotBeNumberedAreRefused) {
  Config c;
  c.experts.assign(1024, 1);
  c.experts[0] = 1024;
  c.max_tokens = 65536;
  c.hidden = 16;
  c.top_k = 32;
  c.capacity = 1024;
  EXPECT_THROW(checked(c, 1024, true), Error);
  c.top_k = 31;
  EXPECT_NO_THROW(checked(c, 1024, true));
  c.top_k = 32;
  c.layout = Layout::rank_major;
  EXPECT_NO_THROW(checked(c, 1024, true));
}

// Source and token in one word, and how each block's memory is shared out, at the limits.
TEST(EpShape, OriginsAndPlacesAtTheLimits) {
  const Origin last = Origin::of(1023, 65535);
  EXPECT_EQ(last.source(), 1023);
  EXPECT_EQ(last.token(), 65535);
  EXPECT_EQ(last.slot(65536), (1 << 26) - 1);
  for (const int tokens : {1, 31, 33, 128, 700, 65536}) {
    for (const int top_k : {1, 6, 7, 31, 32}) {
      for (const Layout layout : {Layout::expert_major, Layout::rank_major}) {
        Config c;
        c.experts = {3, 0, 40};
        c.max_tokens = tokens;
        c.top_k = top_k;
        c.layout = layout;
        for (int rank = 0; rank < 3; ++rank) {
          const Shape s = make_plan(checked(c, 3, true), rank, std::vector<bool>(3)).shape;
          const PlaceMemory m = place_memory(s);
          // What launches ask for, beside a block of 512 threads.
          EXPECT_LE(m.bytes(s, kMostWorkers), 96u * 1024);
          if (!s.place_in_block) continue;
          const std::uint32_t order[] = {m.taken,    m.heads,      m.masks, m.any,
                                         m.prefixes, m.any_prefix, m.ids,   m.list,
                                         m.counts,   m.bases,      m.lines, m.bytes(s, 1)};
          for (std::size_t i = 1; i < std::size(order); ++i) {
            EXPECT_LE(order[i - 1], order[i]);
            EXPECT_EQ(order[i] % 16, 0u);
          }
          const auto slots = static_cast<std::uint32_t>(s.rows_per_batch());
          EXPECT_GE(m.list - m.ids, slots * static_cast<std::uint32_t>(ids_stride(s)) * 4);
          EXPECT_GE(ids_stride(s) * 2, top_k);
          EXPECT_GE(m.counts - m.list, slots * 4);
          EXPECT_GE((m.prefixes - m.any) * 8, slots);
        }
      }
    }
  }
}

}  // namespace
}  // namespace marrow::ep
