// SPDX-License-Identifier: Apache-2.0
// Combine: experts' rows go back to the tokens' owners. All blocks send first and receive then. exact: every row travels, to a place of its own
// [token, k] at the owner, which adds in order of k. fast: a rank adds up its rows of a token while it reads them, and one
// row travels, to [token, ordinal of the rank]. No cell sent ends in an all-ones word: a sum is no such NaN, and a
// caller's 0xffffffff is sent as 0x7fff7fff (NaNs, but of the other sign).
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
#if defined(__CUDACC__)
#pragma unroll
#endif
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
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int c = 0; c < kCellsPerLane; ++c) {
    const int index = quad * kQuadCells + c * kQuadLanes + lane;
    const bool inside = index < s.combine_cells;
    float sum[8] = {};
    MARROW_EP_ROLLED
    for (int from_row = 0; from_row < count; from_row += kRows) {
      Words16 v[kRows];
      std::int32_t row[kRows];
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int i = 0; i < kRows; ++i) {
        row[i] = from_row + i < count ? from.row(from_row + i) : -1;
        if (row[i] >= 0 && inside)
          v[i] = load_words(a.rows + static_cast<std::uint32_t>(row[i]) * s.combine_stride +
                            static_cast<std::uint32_t>(index) * 16);
      }
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int i = 0; i < kRows; ++i) {
        if (row[i] < 0) continue;
        const float w = a.weighted ? from.weight(s, from_row + i) : 1.0f;
        if (!inside) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
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
template <bool kSum>
MARROW_DEVICE void store_quad(const Shape& s, std::byte* row, int quad, int lane,
                              Words16 (&v)[kCellsPerLane]) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int c = 0; c < kCellsPerLane; ++c) {
    const int index = quad * kQuadCells + c * kQuadLanes + lane;
    if (index >= s.combine_cells) continue;
    if constexpr (!kSum) {
      if (v[c].word[3] == kSentinel) v[c].word[3] = 0x7fff7fffu;
    }
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
    store_quad<true>(s, to, quad, lane, v);
  }
}

/// Rows as they are.
MARROW_DEVICE void send_each(const Run& r, const CombineArgs& a, Walk walk, int lane) {
  constexpr int kAtOnce = kWarpQuads ? 4 : 1;
  const Shape& s = r.s;
  const auto* head = r.table<HandleHead>(0);
  const int numbers = s.rank_major ? head->entries : head->pairs;
  // The first numbers are looked up before it is known how many there are.
  const int room = s.rows_per_batch() * (s.rank_major ? 1 : s.per_token);
  MARROW_EP_ROLLED
  for (bool first = true; walk.number < (first ? room : numbers); first = false) {
    LookedUp<false> item[kAtOnce];
    std::byte* to[kAtOnce];
    int quads[kAtOnce];
    Words16 v[kAtOnce][kCellsPerLane];
    std::uint32_t real = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u, walk.next()) {
      quads[u] = walk.quad;
      if (walk.number < room) item[u] = LookedUp<false>(r, walk.number);
      if (walk.number < numbers) real |= 1u << u;
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u) {
      to[u] = real >> u & 1 ? item[u].target(r, a) : nullptr;
      if (!to[u]) continue;
      const std::int64_t row = item[u].only_row(r);
      const std::byte* from = a.rows + static_cast<std::uint64_t>(row) * s.combine_stride;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int index = quads[u] * kQuadCells + c * kQuadLanes + lane;
        v[u][c] = {};
        if (index < s.combine_cells && row >= 0)
          v[u][c] = load_words(from + static_cast<std::uint32_t>(index) * 16);
      }
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u)
      if (to[u]) store_quad<false>(s, to[u], quads[u], lane, v[u]);
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
  const Walk walk = walk_of_grid(s.combine_quads, s.by_combine_quads);
  if constexpr (kSum) {
    send_sums(r, a, walk, thread_index() % kQuadLanes);
  } else {
    send_each(r, a, walk, thread_index() % kQuadLanes);
  }
}

/// What comes back for one token: its columns, a lane each on a GPU.
class TokenColumns {
 public:
  TokenColumns() = default;
  MARROW_DEVICE TokenColumns(const Run& r, const CombineArgs& a, int token)
      : by_choice_(a.exact && !r.s.rank_major), weighted_(by_choice_ && a.weighted) {
    const Shape& s = r.s;
    first_ =
        static_cast<std::uint64_t>(static_cast<unsigned>(token)) * static_cast<unsigned>(s.top_k);
    all_ = by_choice_ ? s.top_k : r.table<std::int32_t>(s.own_distinct)[token];
    if constexpr (kWarpQuads) {
      // All loads at once, and looked at later: what is past the last column is stale.
      if (lane_index() < s.top_k) {
        rank_ = load_rank(r, lane_index());
        if (weighted_) weight_ = load_weight(r, lane_index());
      }
    }
  }
  /// Bits of the columns to wait for: no ignored choices, no failed ranks. All lanes of a worker call.
  MARROW_DEVICE std::uint32_t valid(const Run& r) const {
    const auto counts = [&](int rank) { return rank >= 0 && !r.is_failed(rank); };
    if constexpr (kWarpQuads) {
      return warp_ballot(0xffffffffu, lane_index() < all_ && counts(rank_));
    } else {
      std::uint32_t bits = 0;
      for (int k = 0; k < all_; ++k)
        if (counts(load_rank(r, k))) bits |= 1u << k;
      return bits;
    }
  }
  /// All lanes call, with the same column.
  MARROW_DEVICE float weight(const Run& r, int column) const {
    if constexpr (kWarpQuads) {
      return warp_shuffle(0xffffffffu, weight_, column);
    } else {
      return weighted_ ? load_weight(r, column) : 1.0f;
    }
  }
  MARROW_DEVICE int source(const Run& r, int column) const { return load_rank(r, column); }

 private:
  MARROW_DEVICE int load_rank(const Run& r, int k) const {
    return r.table<std::int16_t>(by_choice_ ? r.s.own_rank : r.s.own_sorted)[first_ + k];
  }
  MARROW_DEVICE float load_weight(const Run& r, int k) const {
    return r.table<float>(r.s.own_weights)[first_ + k];
  }
  bool by_choice_ = false, weighted_ = false;
  std::uint64_t first_ = 0;
  std::int32_t all_ = 0;
  std::int32_t rank_ = -1;
  float weight_ = 1.0f;
};

/// Neighbouring quads of a token's row that a worker receives together. (Of rows as they are, 8 columns of one take all
/// registers.)
template <bool kSum>
inline constexpr int kQuadsReceived = kWarpQuads&& kSum ? 2 : 1;
template <bool kSum>
inline constexpr int kReceivedCells = kQuadsReceived<kSum>* kCellsPerLane;
/// From the first quad's first cell to the lane's i-th one.
MARROW_DEVICE int received_ahead(int i) {
  return i / kCellsPerLane * kQuadCells + i % kCellsPerLane * kQuadLanes;
}

/// Tokens that a worker receives, and what the first one's columns are: loaded before the worker sends.
template <bool kSum>
struct Incoming {
  int tokens = 0;
  Walk walk;
  TokenColumns first;
  MARROW_DEVICE Incoming(const Run& r, const CombineArgs& a)
      : walk(kQuadsReceived<kSum> == 2 ? walk_of_grid(r.s.combine_twos, r.s.by_combine_twos)
                                       : walk_of_grid(r.s.combine_quads, r.s.by_combine_quads)) {
    tokens = r.table<HandleHead>(0)->tokens;
    if (walk.number < r.s.tokens) first = TokenColumns(r, a, walk.number);
  }
};

/// Adds some columns of the quads from `quad` on, in their order, and waits for them. All lanes of a worker call.
/// @return the rest
template <bool kSum>
MARROW_DEVICE std::uint32_t add_columns(const Run& r, const TokenColumns& columns,
                                        std::uint32_t valid, std::byte* token_base, int quad,
                                        int lane, float (&sum)[kReceivedCells<kSum>][8]) {
  constexpr int kMost = kSum ? 4 : 8;  // in flight together; sums: one a rank, without weights
  const Shape& s = r.s;
  const int room = s.combine_cells - quad * kQuadCells - lane;
  std::byte* first = token_base + static_cast<std::uint32_t>(quad * kQuadCells + lane) * 16;
  std::uint32_t offset[kMost];  // of a column
  float weight[kMost];
  std::uint32_t column_bits = valid;
  int count = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int n = 0; n < kMost; ++n) {
    offset[n] = 0;
    weight[n] = 1.0f;
    if (valid == 0) continue;
    const int column = lowest_lane(valid);
    offset[n] = static_cast<std::uint32_t>(column) * static_cast<std::uint32_t>(s.combine_stride);
    if constexpr (!kSum) weight[n] = columns.weight(r, column);
    valid &= valid - 1;
    ++count;
  }
  column_bits ^= valid;
  // Rows of far sources are here, whatever they look like.
  std::uint32_t sure = 0;
  if (s.far_any) {
    std::uint32_t left = column_bits;
    for (int n = 0; n < count; ++n, left &= left - 1)
      if (s.is_far(columns.source(r, lowest_lane(left)))) sure |= 1u << n;
  }
  Cell16 cell[kMost][kReceivedCells<kSum>];
  std::uint32_t missing = (1u << count) - 1;
  const auto turn = [&] {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int n = 0; n < kMost; ++n) {
      if (!(missing >> n & 1)) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int i = 0; i < kReceivedCells<kSum>; ++i) {
        const int ahead = received_ahead(i);
        if (ahead < room) cell[n][i] = load_cell(first + offset[n] + ahead * 16);
      }
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int n = 0; n < kMost; ++n) {
      if (!(missing >> n & 1)) continue;
      bool here = true;
      for (int i = 0; i < kReceivedCells<kSum>; ++i) {
        if (received_ahead(i) < room) here &= mark_of(cell[n][i]) != kSentinel;
      }
      if (here || (sure >> n & 1)) missing &= ~(1u << n);
    }
    return missing == 0;
  };
  Status status = Status::ok;
  for (std::uint32_t turns = 1; !turn() && status == Status::ok; ++turns) {
    relax(turns);
    if (turns % kLooksAtOnce == 0) status = impatience(r);
  }
  if (missing) {  // counts as zeros
    std::uint32_t left = column_bits;
    MARROW_EP_ROLLED
    for (int n = 0; n < count; ++n, left &= left - 1)
      if (missing >> n & 1) r.set_failed(columns.source(r, lowest_lane(left)), status);
  }
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int n = 0; n < kMost; ++n) {
    if (n >= count || (missing >> n & 1)) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kReceivedCells<kSum>; ++i) {
      const int ahead = received_ahead(i);
      if (ahead >= room) continue;
      store_cell(first + offset[n] + ahead * 16, sentinel_cell());
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int w = 0; w < 4; ++w) {
        const std::uint32_t word = word_of(cell[n][i], w);
        sum[i][w * 2] = fmaf(weight[n], bf16_low(word), sum[i][w * 2]);
        sum[i][w * 2 + 1] = fmaf(weight[n], bf16_high(word), sum[i][w * 2 + 1]);
      }
    }
  }
  return valid;
}

/// A source says that it has begun, also without rows for us: sets are used again by what all have done. By a block's last
/// warp before its rows, so that what a source is waited for is its own time.
MARROW_DEVICE void wait_for_hellos(const Run& r) {
  const Shape& s = r.s;
  const int watchers = block_size() < 32 ? block_size() : 32;
  const int first = thread_index() - (block_size() - watchers);
  if (first < 0) return;
  std::uint64_t since = now_ns();  // before, others were waited for
  for (int source = first; source < s.ranks; source += watchers) {
    if (s.is_far(source) || r.is_failed(source)) continue;
    const std::byte* hello = r.local + s.hello_at(r.set, source);
    const Status status =
        wait_until(r.comm, r.time_left(), [&] { return mark_of(load_cell(hello)) == r.epoch; });
    if (status != Status::ok) r.set_failed(source, status);
    since = r.note_wait(1, source, since);
  }
}

template <bool kSum>
MARROW_DEVICE void receive_combine(const Run& r, const CombineArgs& a, const Incoming<kSum>& in) {
  const Shape& s = r.s;
  if (block_index() == 0) wait_for_hellos(r);
  const int lane = thread_index() % kQuadLanes;
  Walk walk = in.walk;
  TokenColumns next = in.first;
  MARROW_EP_ROLLED
  while (walk.number < in.tokens) {
    const int token = walk.number;
    const int quad = walk.quad * kQuadsReceived<kSum>;
    const TokenColumns columns = next;
    walk.next();
    if (walk.number < in.tokens) next = TokenColumns(r, a, walk.number);
    std::byte* token_base = r.local + s.combine_at(r.set, token, 0);
    float sum[kReceivedCells<kSum>][8] = {};
    MARROW_EP_ROLLED
    for (std::uint32_t left = columns.valid(r); left != 0;)
      left = add_columns<kSum>(r, columns, left, token_base, quad, lane, sum);
    std::byte* out = a.out_rows + static_cast<std::uint64_t>(token) * s.combine_stride;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kReceivedCells<kSum>; ++i) {
      const int index = quad * kQuadCells + lane + received_ahead(i);
      if (index >= s.combine_cells) continue;
      store_wide(out + static_cast<std::uint32_t>(index) * 16,
                 Words16{{to_bf16_pair(sum[i][0], sum[i][1]), to_bf16_pair(sum[i][2], sum[i][3]),
                          to_bf16_pair(sum[i][4], sum[i][5]), to_bf16_pair(sum[i][6], sum[i][7])}});
    }
  }
}

/// What a stopped kernel leaves: zeros.
MARROW_DEVICE void stop_combine(const Run& r, const CombineArgs& a) {
  const auto cells = static_cast<std::uint64_t>(r.table<HandleHead>(0)->tokens) *
                     static_cast<unsigned>(r.s.combine_cells);
  const auto step = static_cast<std::uint64_t>(grid_size()) * block_size();
  for (auto i = static_cast<std::uint64_t>(block_index()) * block_size() + thread_index();
       i < cells; i += step)
    store_wide(a.out_rows + i * 16, Words16{});
}

/// combine_send, combine_receive, or both. kSum: rows are added up before they are sent.
template <bool kSum>
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(512)
    combine_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                   const MARROW_GRID_CONSTANT WindowHandle window,
                   const MARROW_GRID_CONSTANT Shape s, const MARROW_GRID_CONSTANT CombineArgs a) {
  await_previous_kernel();
  let_next_kernel_start();
  const std::uint64_t start = now_ns();
  note(Point::begun);
  auto* control = at<Control>(window.local, s.control);
  const Numbers now =
      read_numbers(control, &control->combine_sent, &control->combine_received, [] {});
  const std::uint64_t sent = now.sent;
  const std::uint64_t received = now.received;
  const bool failed = now.failed != 0;
  const bool invalid = out_of_turn(s, sent, received, a.send, a.receive);
  note(Point::numbers_read);
  Turn turn(&control->arrived[1]);
  const auto count_on = [&] {
    if (a.send) store_relaxed<Scope::device>(&control->combine_sent, sent + 1);
    if (a.receive) {
      store_relaxed<Scope::device>(&control->combine_received, received + 1);
      add_relaxed<Scope::device>(&control->combines, 1);
    }
    if (invalid) stop_as_invalid(control);
  };
  if (invalid || now.stopped) {
    if (a.receive) stop_combine(Run(comm, window, s, a.handle, received, start, failed), a);
  } else {
    const std::uint64_t begun =
        a.receive && s.far_any ? load_relaxed<Scope::device>(&control->started) : start;
    const Run in(comm, window, s, a.handle, received, begun, failed);
    const Incoming<kSum> incoming(in, a);
    if (a.send) send_combine<kSum>(Run(comm, window, s, a.handle, sent, start, failed), a);
    note(Point::rows_sent);
    if (a.receive) receive_combine<kSum>(in, a, incoming);
    note(Point::rows_received);
  }
  turn.end(count_on);
  note_times(a.times, start);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
