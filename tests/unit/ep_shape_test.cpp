// SPDX-License-Identifier: Apache-2.0
// The plan of a Group's window at sizes that no 32-bit number holds: nothing overlaps, nothing leaves the window.
#include "ep/shape.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace marrow::ep
