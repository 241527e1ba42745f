// SPDX-License-Identifier: Apache-2.0
// Combine: experts' rows go back to the tokens' owners. All blocks send first and receive then. exact: every row travels, to a place of its own
// [token, k] at the owner, which adds in order of k. fast: a rank adds up its rows of a token while it reads them, and one
// row travels, to [token, ordinal of the rank].
#pragma once

#include "ep/kernels/combine_send.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

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
  MARROW_EP_UNROLLED
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
    MARROW_EP_UNROLLED
    for (int n = 0; n < kMost; ++n) {
      if (!(missing >> n & 1)) continue;
      MARROW_EP_UNROLLED
      for (int i = 0; i < kReceivedCells<kSum>; ++i) {
        const int ahead = received_ahead(i);
        if (ahead < room) cell[n][i] = load_cell(first + offset[n] + ahead * 16);
      }
    }
    MARROW_EP_UNROLLED
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
  MARROW_EP_UNROLLED
  for (int n = 0; n < kMost; ++n) {
    if (n >= count || (missing >> n & 1)) continue;
    MARROW_EP_UNROLLED
    for (int i = 0; i < kReceivedCells<kSum>; ++i) {
      const int ahead = received_ahead(i);
      if (ahead >= room) continue;
      store_cell(first + offset[n] + ahead * 16, sentinel_cell());
      MARROW_EP_UNROLLED
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
    MARROW_EP_UNROLLED
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
