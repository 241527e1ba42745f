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
MARROW_DEVICE std::byte* row_target(const Run& r, std::int64_t number, int slot, int column) {
  const Shape& s = r.s;
  const int source = slot / s.tokens;
  if (r.is_failed(source)) return nullptr;
  if (s.is_far(source)) {
    return r.local + s.stage_combine +
           (static_cast<std::uint64_t>(r.set) * s.ranks * s.tokens * s.per_token +
            static_cast<std::uint64_t>(number)) *
               s.combine_stride;
  }
  return r.peer(source) + s.combine_at(r.set, slot - source * s.tokens, column);
}

/// What one worker sends: where to, and from which row, or (kSum) what to add up.
struct Outgoing {
  std::byte* to = nullptr;         ///< the row at its owner; null: nobody
  const std::byte* row = nullptr;  ///< null: zeros
  const std::byte* record = nullptr;
  int count = 0;
};

/// Pair or entry `number`. May be called for any number below the tables' size, so that it need not wait for how many there are.
template <bool kSum>
MARROW_DEVICE Outgoing outgoing(const Run& r, const CombineArgs& a, int number) {
  const Shape& s = r.s;
  Outgoing out;
  std::int64_t row = -1;
  int slot;
  int column;
  if (kSum || s.rank_major) {
    const int at_slot =
        s.place_in_block ? 0 : static_cast<int>(r.table<std::uint32_t>(s.list)[number]);
    out.record = record_at(r, number, at_slot);
    const Words16 head = load_words(out.record);
    out.count = static_cast<std::int16_t>(head.word[0]);
    column = static_cast<std::int16_t>(head.word[0] >> 16);
    slot = static_cast<int>(head.word[1]);
    if (!kSum) row = reinterpret_cast<const std::int32_t*>(out.record + sizeof(Record))[0];
  } else {
    const Words16 pair =
        load_words(reinterpret_cast<const std::byte*>(r.table<Pair>(s.pairs) + number));
    slot = static_cast<int>(pair.word[0]);
    column = static_cast<int>(pair.word[1]);
    row = static_cast<std::int64_t>(pair.word[2] | static_cast<std::uint64_t>(pair.word[3]) << 32);
    if (row <= -2)
      row = reinterpret_cast<const std::int32_t*>(record_at(r, 0, slot) + sizeof(Record))[-2 - row];
  }
  out.to = row_target(r, number, slot, column);
  if (!kSum && a.from_rows && row >= 0 && s.is_far(slot / s.tokens)) out.to = nullptr;
  out.row = row < 0 ? nullptr : a.rows + static_cast<std::uint64_t>(row) * s.combine_stride;
  return out;
}

/// One cell of the sum of a record's rows.
MARROW_DEVICE Words16 sum_cell(const Run& r, const CombineArgs& a, const Outgoing& out, int index) {
  const Shape& s = r.s;
  const std::byte* rows = out.record + sizeof(Record);
  const std::byte* weights = rows + static_cast<unsigned>(s.record_rows) * 4;
  float sum[8] = {};
  for (int n = 0; n < out.count; n += 4) {
    const Words16 row = load_words(rows + n * 4);
    const Words16 weight = load_words(weights + n * 4);
    Words16 v[4];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < 4; ++i) {
      v[i] = {};
      if (n + i < out.count && static_cast<std::int32_t>(row.word[i]) >= 0)
        v[i] = load_words(a.rows + row.word[i] * s.combine_stride +
                          static_cast<std::uint64_t>(index) * 16);
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < 4; ++i) {
      if (n + i >= out.count || static_cast<std::int32_t>(row.word[i]) < 0) continue;
      const float w = a.weighted ? float_of(weight.word[i]) : 1.0f;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int x = 0; x < 4; ++x) {
        sum[x * 2] = fmaf(w, bf16_low(v[i].word[x]), sum[x * 2]);
        sum[x * 2 + 1] = fmaf(w, bf16_high(v[i].word[x]), sum[x * 2 + 1]);
      }
    }
  }
  return {{to_bf16_pair(sum[0], sum[1]), to_bf16_pair(sum[2], sum[3]), to_bf16_pair(sum[4], sum[5]),
           to_bf16_pair(sum[6], sum[7])}};
}

template <bool kSum>
MARROW_DEVICE void send_combine(const Run& r, const CombineArgs& a) {
  constexpr int kAtOnce = kWarpQuads && !kSum ? 4 : 1;
  const Shape& s = r.s;
  const int lane = thread_index() % kQuadLanes;
  const int per_block = block_size() / kQuadLanes;
  // Neighbouring quads to different blocks.
  Walk walk(thread_index() / kQuadLanes * grid_size() + block_index(), per_block * grid_size(),
            s.combine_quads);
  const auto* head = r.table<HandleHead>(0);
  const int numbers = kSum || s.rank_major ? head->entries : head->pairs;
  // The first numbers are looked up before it is known how many there are.
  const int room = s.rows_per_batch() * (kSum || s.rank_major ? 1 : s.per_token);
  if (block_index() == 0) {
    for (int i = thread_index(); i < s.ranks; i += block_size()) {
      const int peer = (s.rank + 1 + i) % s.ranks;
      if (!s.is_far(peer) && !r.is_failed(peer))
        store_cell(r.peer(peer) + s.hello_at(r.set, s.rank), epoch_cell(0, 0, 0, r.epoch));
    }
  }
  for (bool first = true; walk.number < (first ? room : numbers); first = false) {
    std::byte* to[kAtOnce];
    int quads[kAtOnce];
    Words16 v[kAtOnce][kCellsPerLane];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u) {
      to[u] = nullptr;
      const int number = walk.number;
      const int quad = walk.quad;
      quads[u] = quad;
      walk.next();
      if (number >= room) continue;
      const Outgoing out = outgoing<kSum>(r, a, number);
      if (number >= numbers || !out.to) continue;
      to[u] = out.to + static_cast<std::uint64_t>(quad) * kQuadCells * 16;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int index = quad * kQuadCells + c * kQuadLanes + lane;
        v[u][c] = {};
        if (index >= s.combine_cells) continue;
        if constexpr (kSum) {
          v[u][c] = sum_cell(r, a, out, index);
        } else if (out.row) {
          v[u][c] = load_words(out.row + static_cast<std::uint64_t>(index) * 16);
        }
      }
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u) {
      if (!to[u]) continue;
      const int quad = quads[u];
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int in_quad = c * kQuadLanes + lane;
        if (quad * kQuadCells + in_quad >= s.combine_cells) continue;
        if constexpr (!kSum) {
          if (v[u][c].word[3] == kSentinel) v[u][c].word[3] = 0x7fff7fffu;
        }
        store_cell(to[u] + in_quad * 16, cell_of(v[u][c]));
      }
    }
  }
}

/// Adds up to kColumns columns of one quad, in their order.
struct Columns {
  static constexpr int kMost = 8;
  int column[kMost];
  int source[kMost];
  float weight[kMost];
  int count = 0;
  std::uint32_t sure = 0;  ///< of far sources: here, whatever they look like
};

MARROW_DEVICE void add_columns(const Run& r, const Columns& columns, std::byte* token_base,
                               int quad, int lane, float (&sum)[kCellsPerLane][8]) {
  const Shape& s = r.s;
  Cell16 cell[Columns::kMost][kCellsPerLane];
  std::uint32_t missing = (1u << columns.count) - 1;
  const auto turn = [&] {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int n = 0; n < Columns::kMost; ++n) {
      if (!(missing >> n & 1)) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int index = quad * kQuadCells + c * kQuadLanes + lane;
        if (index < s.combine_cells)
          cell[n][c] = load_cell(token_base + columns.column[n] * s.combine_stride +
                                 static_cast<std::uint64_t>(index) * 16);
      }
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int n = 0; n < Columns::kMost; ++n) {
      if (!(missing >> n & 1)) continue;
      bool here = true;
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int index = quad * kQuadCells + c * kQuadLanes + lane;
        if (index < s.combine_cells) here &= mark_of(cell[n][c]) != kSentinel;
      }
      if (here || (columns.sure >> n & 1)) missing &= ~(1u << n);
    }
    return missing == 0;
  };
  const Status status = wait_until(r.comm, r.time_left(), turn);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int n = 0; n < Columns::kMost; ++n) {
    if (n >= columns.count) continue;
    if (missing >> n & 1) {  // counts as zeros
      r.set_failed(columns.source[n], status);
      continue;
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int c = 0; c < kCellsPerLane; ++c) {
      const int index = quad * kQuadCells + c * kQuadLanes + lane;
      if (index >= s.combine_cells) continue;
      store_cell(token_base + columns.column[n] * s.combine_stride +
                     static_cast<std::uint64_t>(index) * 16,
                 sentinel_cell());
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = word_of(cell[n][c], i);
        sum[c][i * 2] = fmaf(columns.weight[n], bf16_low(word), sum[c][i * 2]);
        sum[c][i * 2 + 1] = fmaf(columns.weight[n], bf16_high(word), sum[c][i * 2 + 1]);
      }
    }
  }
}

/// A source says that it has begun, also without rows for us: sets are used again by what all have done. By block 0's last
/// warp before its rows, so that what a source is waited for is its own time.
MARROW_DEVICE void wait_for_hellos(const Run& r) {
  const Shape& s = r.s;
  const int watchers = block_size() < 32 ? block_size() : 32;
  const int first = thread_index() - (block_size() - watchers);
  if (block_index() != 0 || first < 0) return;
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

MARROW_DEVICE void receive_combine(const Run& r, const CombineArgs& a) {
  const Shape& s = r.s;
  wait_for_hellos(r);
  const int lane = thread_index() % kQuadLanes;
  const int per_block = block_size() / kQuadLanes;
  Walk walk(thread_index() / kQuadLanes * grid_size() + block_index(), per_block * grid_size(),
            s.combine_quads);
  const int tokens = r.table<HandleHead>(0)->tokens;
  const bool by_choice = a.exact && !s.rank_major;
  for (; walk.number < tokens; walk.next()) {
    const int token = walk.number;
    const int quad = walk.quad;
    const std::uint64_t first = static_cast<std::uint64_t>(token) * s.top_k;
    const auto* own_rank = r.table<std::int16_t>(by_choice ? s.own_rank : s.own_sorted) + first;
    const auto* own_weights = r.table<float>(s.own_weights) + first;
    const int all = by_choice ? s.top_k : r.table<std::int32_t>(s.own_distinct)[token];
    std::byte* token_base = r.local + s.combine_at(r.set, token, 0);
    float sum[kCellsPerLane][8] = {};
    for (int k = 0; k < all;) {
      Columns columns;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int n = 0; n < Columns::kMost; ++n) {
        columns.column[n] = 0;
        columns.weight[n] = 1.0f;
        columns.source[n] = -1;
      }
      // Ignored choices and failed ranks leave holes, which are skipped: a column a step, so that all is in registers.
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int n = 0; n < Columns::kMost; ++n) {
        while (k < all && (own_rank[k] < 0 || r.is_failed(own_rank[k]))) ++k;
        if (k >= all) continue;
        columns.column[n] = k;
        columns.source[n] = own_rank[k];
        if (s.is_far(own_rank[k])) columns.sure |= 1u << n;
        if (by_choice && a.weighted) columns.weight[n] = own_weights[k];
        ++columns.count;
        ++k;
      }
      add_columns(r, columns, token_base, quad, lane, sum);
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int c = 0; c < kCellsPerLane; ++c) {
      const int index = quad * kQuadCells + c * kQuadLanes + lane;
      if (index >= s.combine_cells) continue;
      store_wide(a.out_rows + static_cast<std::uint64_t>(token) * s.combine_stride +
                     static_cast<std::uint64_t>(index) * 16,
                 Words16{{to_bf16_pair(sum[c][0], sum[c][1]), to_bf16_pair(sum[c][2], sum[c][3]),
                          to_bf16_pair(sum[c][4], sum[c][5]), to_bf16_pair(sum[c][6], sum[c][7])}});
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
  auto* control = at<Control>(window.local, s.control);
  const std::uint64_t sent = load_relaxed<Scope::device>(&control->combine_sent);
  const std::uint64_t received = load_relaxed<Scope::device>(&control->combine_received);
  const bool failed = load_relaxed<Scope::device>(&control->any_failed) != 0;
  const std::uint64_t stopped = load_relaxed<Scope::device>(&control->stopped);
  const bool invalid = out_of_turn(s, sent, received, a.send, a.receive);
  const Status stop =
      all_have_read(&control->arrived[1], sent ^ received ^ (failed ? 1 : 0), stopped, [&] {
        if (a.send) store_relaxed<Scope::device>(&control->combine_sent, sent + 1);
        if (a.receive) {
          store_relaxed<Scope::device>(&control->combine_received, received + 1);
          add_relaxed<Scope::device>(&control->combines, 1);
        }
        if (invalid) stop_as_invalid(control);
      });
  if (invalid || stop != Status::ok) {
    if (a.receive) stop_combine(Run(comm, window, s, a.handle, received, start, failed), a);
    note_times(a.times, start);
    return;
  }
  if (a.send) send_combine<kSum>(Run(comm, window, s, a.handle, sent, start, failed), a);
  if (a.receive) {
    const std::uint64_t begun = s.far_any ? load_relaxed<Scope::device>(&control->started) : start;
    receive_combine(Run(comm, window, s, a.handle, received, begun, failed), a);
  }
  note_times(a.times, start);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
