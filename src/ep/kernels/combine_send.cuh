// SPDX-License-Identifier: Apache-2.0
// Rows of combine, sending side: each as it is (exact, rank-major), or those of a token added up first. No cell sent ends in
// an all-ones word: a sum is no such NaN, and a caller's 0xffffffff is sent as 0x7fff7fff (NaNs, but of the other sign).
#pragma once

#include "ep/kernels/common.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Destination of row `number` (of pairs or entries), in column `column` of its token.
MARROW_DEVICE std::byte* row_target(const Run& r, std::int64_t number, Origin origin, int column) {
  const Shape& s = r.s;
  const int source = origin.source();
  if (r.is_failed(source)) return nullptr;
  if (s.is_far(source)) {
    return r.local + s.stage_combine +
           (static_cast<std::uint64_t>(r.set) * s.ranks * s.tokens * s.per_token +
            static_cast<std::uint64_t>(number)) *
               s.combine_stride;
  }
  return r.peer(source) + s.combine_at(r.set, origin.token(), column);
}

/// A record (or pair) as a worker has looked it up: on a GPU a word or so a lane, so that one load brings all of it.
template <bool kSum>
class LookedUp {
 public:
  LookedUp() = default;
  /// Of pair or entry `number`, which may be any below the tables' size: so it need not be known how many there are.
  MARROW_DEVICE LookedUp(const Run& r, int number) : number_(number) {
    const Shape& s = r.s;
    if (by_record(s)) {
      Origin origin;
      if (!s.place_in_block) origin = r.table<Origin>(s.list)[number];
      from_ = record_at(r, number, origin);
    } else {
      from_ = reinterpret_cast<const std::byte*>(r.table<Pair>(s.pairs) + number);
    }
    if constexpr (kWarpQuads && kSum) {
      const int words = 4 + 2 * s.record_rows;
      MARROW_EP_UNROLLED
      for (int i = 0; i < kWords; ++i) {
        const int at_word = i * 32 + lane_index();
        if (at_word < words) word_[i] = reinterpret_cast<const std::uint32_t*>(from_)[at_word];
      }
    } else {
      const Words16 head = load_words(from_);
      for (int i = 0; i < 4; ++i) word_[i] = head.word[i];
      if (by_record(s)) row_ = rows_of(from_)[0];
    }
  }
  /// All lanes of a worker call. i: the same for all.
  MARROW_DEVICE std::uint32_t word(int i) const {
    if constexpr (kWarpQuads && kSum) {
      const std::uint32_t of = i < 32 ? word_[0] : i < 64 ? word_[1] : word_[2];
      return warp_shuffle(0xffffffffu, of, i & 31);
    } else {
      return i < 4 ? word_[i] : reinterpret_cast<const std::uint32_t*>(from_)[i];
    }
  }
  MARROW_DEVICE int count() const { return static_cast<std::int16_t>(word(0)); }
  MARROW_DEVICE std::int32_t row(int n) const { return static_cast<std::int32_t>(word(4 + n)); }
  MARROW_DEVICE float weight(const Shape& s, int n) const {
    return float_of(word(4 + s.record_rows + n));
  }
  /// Where it goes; null: nowhere, or (from_rows) later.
  MARROW_DEVICE std::byte* target(const Run& r, const CombineArgs& a) const {
    const bool record = by_record(r.s);
    const Origin origin{record ? word(1) : word(0)};
    const int column =
        record ? static_cast<std::int16_t>(word(0) >> 16) : static_cast<int>(word(1));
    if (!kSum && a.from_rows && r.s.is_far(origin.source()) && only_row(r) >= 0) return nullptr;
    return row_target(r, number_, origin, column);
  }
  /// !kSum: the row that goes; -1: zeros.
  MARROW_DEVICE std::int64_t only_row(const Run& r) const {
    if (by_record(r.s)) return row_;
    const auto row =
        static_cast<std::int64_t>(word_[2] | static_cast<std::uint64_t>(word_[3]) << 32);
    if (row > -2) return row;
    return rows_of(record_at(r, 0, Origin{word_[0]}))[-2 - row];
  }

 private:
  static MARROW_DEVICE bool by_record(const Shape& s) { return kSum || s.rank_major; }
  static constexpr int kWords = kWarpQuads && kSum ? (4 + 2 * kMaxTopK + 31) / 32 : 4;
  const std::byte* from_ = nullptr;
  std::int32_t number_ = 0;
  std::int32_t row_ = -1;
  std::uint32_t word_[kWords] = {};
};

/// The quad's sum of a record's rows. All lanes of a worker call.
MARROW_DEVICE void sum_quad(const Run& r, const CombineArgs& a, const LookedUp<true>& from,
                            int quad, int lane, Words16 (&out)[kCellsPerLane]) {
  constexpr int kRows = kWarpQuads ? 8 : 4;  // in flight together
  const Shape& s = r.s;
  const int count = from.count();
  MARROW_EP_UNROLLED
  for (int c = 0; c < kCellsPerLane; ++c) {
    const int index = quad * kQuadCells + c * kQuadLanes + lane;
    const bool inside = index < s.combine_cells;
    float sum[8] = {};
    MARROW_EP_ROLLED
    for (int from_row = 0; from_row < count; from_row += kRows) {
      Words16 v[kRows];
      std::int32_t row[kRows];
      MARROW_EP_UNROLLED
      for (int i = 0; i < kRows; ++i) {
        row[i] = from_row + i < count ? from.row(from_row + i) : -1;
        if (row[i] >= 0 && inside)
          v[i] = load_words(a.rows + static_cast<std::uint32_t>(row[i]) * s.combine_stride +
                            static_cast<std::uint32_t>(index) * 16);
      }
      MARROW_EP_UNROLLED
      for (int i = 0; i < kRows; ++i) {
        if (row[i] < 0) continue;
        const float w = a.weighted ? from.weight(s, from_row + i) : 1.0f;
        if (!inside) continue;
        MARROW_EP_UNROLLED
        for (int x = 0; x < 4; ++x) {
          sum[x * 2] = fmaf(w, bf16_low(v[i].word[x]), sum[x * 2]);
          sum[x * 2 + 1] = fmaf(w, bf16_high(v[i].word[x]), sum[x * 2 + 1]);
        }
      }
    }
    out[c] = {{to_bf16_pair(sum[0], sum[1]), to_bf16_pair(sum[2], sum[3]),
               to_bf16_pair(sum[4], sum[5]), to_bf16_pair(sum[6], sum[7])}};
  }
}

MARROW_DEVICE void say_hello(const Run& r) {
  const Shape& s = r.s;
  for (int i = thread_index(); i < s.ranks; i += block_size()) {
    int peer = s.rank + 1 + i;
    if (peer >= s.ranks) peer -= s.ranks;
    if (!s.is_far(peer) && !r.is_failed(peer))
      store_cell(r.peer(peer) + s.hello_at(r.set, s.rank), epoch_cell(0, 0, 0, r.epoch));
  }
}

/// Stores a quad of a row.
MARROW_DEVICE void store_quad(const Shape& s, std::byte* row, int quad, int lane,
                              const Words16 (&v)[kCellsPerLane]) {
  MARROW_EP_UNROLLED
  for (int c = 0; c < kCellsPerLane; ++c) {
    const int index = quad * kQuadCells + c * kQuadLanes + lane;
    if (index >= s.combine_cells) continue;
    store_cell(row + static_cast<std::uint32_t>(index) * 16, cell_of(v[c]));
  }
}

/// Rows added up at their source. The next item's record is on its way while this one's rows are.
MARROW_DEVICE void send_sums(const Run& r, const CombineArgs& a, Walk walk, int lane) {
  const Shape& s = r.s;
  const int numbers = r.table<HandleHead>(0)->entries;
  const int room = s.rows_per_batch();
  LookedUp<true> next;
  if (walk.number < room) next = LookedUp<true>(r, walk.number);
  MARROW_EP_ROLLED
  while (walk.number < numbers) {
    const LookedUp<true> mine = next;
    const int quad = walk.quad;
    walk.next();
    if (walk.number < numbers) next = LookedUp<true>(r, walk.number);
    std::byte* to = mine.target(r, a);
    if (!to) continue;
    Words16 v[kCellsPerLane];
    sum_quad(r, a, mine, quad, lane, v);
    store_quad(s, to, quad, lane, v);
  }
}

/// Rows as they are, a piece at a time. The next record is on its way while this one's row is.
MARROW_DEVICE void send_each(const Run& r, const CombineArgs& a, Walk walk, int lane) {
  const Shape& s = r.s;
  const auto* head = r.table<HandleHead>(0);
  // The first record is looked up before it is known how many there are.
  const int room = s.rows_per_batch() * (s.rank_major ? 1 : s.per_token);
  LookedUp<false> next;
  if (walk.number < room) next = LookedUp<false>(r, walk.number);
  const int numbers = s.rank_major ? head->entries : head->pairs;
  MARROW_EP_ROLLED
  while (walk.number < numbers) {
    const LookedUp<false> mine = next;
    const int first = walk.quad * kPiece * kQuadCells + lane;
    walk.next();
    if (walk.number < numbers) next = LookedUp<false>(r, walk.number);
    std::byte* to = mine.target(r, a);
    if (!to) continue;
    const std::int64_t row = mine.only_row(r);
    const std::byte* from = a.rows + static_cast<std::uint64_t>(row) * s.combine_stride +
                            static_cast<std::uint32_t>(first) * 16;
    to += static_cast<std::uint32_t>(first) * 16;
    const int left = s.combine_cells - first;
    Words16 v[kPiece][kCellsPerLane];
    MARROW_EP_UNROLLED
    for (int u = 0; u < kPiece; ++u) {
      MARROW_EP_UNROLLED
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int ahead = u * kQuadCells + c * kQuadLanes;
        v[u][c] = {};
        if (ahead < left && row >= 0) v[u][c] = load_words(from + ahead * 16);
      }
    }
    MARROW_EP_UNROLLED
    for (int u = 0; u < kPiece; ++u) {
      MARROW_EP_UNROLLED
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int ahead = u * kQuadCells + c * kQuadLanes;
        if (ahead >= left) continue;
        if (v[u][c].word[3] == kSentinel) v[u][c].word[3] = 0x7fff7fffu;
        store_cell(to + ahead * 16, cell_of(v[u][c]));
      }
    }
  }
}

/// A worker's parts of all rows: neighbouring ones are different blocks'.
MARROW_DEVICE Walk walk_of_grid(int parts, const Divisor& by_parts) {
  return Walk(thread_index() / kQuadLanes * grid_size() + block_index(),
              block_size() / kQuadLanes * grid_size(), parts, by_parts);
}

template <bool kSum>
MARROW_DEVICE void send_combine(const Run& r, const CombineArgs& a) {
  const Shape& s = r.s;
  if (block_index() == 0) say_hello(r);
  const int lane = thread_index() % kQuadLanes;
  const Walk by_quads = walk_of_grid(s.combine_quads, s.by_combine_quads);
  if constexpr (kSum) {
    send_sums(r, a, by_quads, lane);
  } else {
    send_each(r, a, kWarpQuads ? walk_of_grid(s.combine_pieces, s.by_combine_pieces) : by_quads,
              lane);
  }
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
