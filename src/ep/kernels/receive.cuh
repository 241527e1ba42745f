// SPDX-License-Identifier: Apache-2.0
// Rows of dispatch, receiving side. A block takes entries b, b + blocks, ... of those that reach this rank, in about the order in which
// they arrive; its workers take their quads, all outstanding ones of a thread being looked at in each turn, and write
// each to the rows it belongs to.
#pragma once

#include "ep/kernels/placed.cuh"
#include "ep/kernels/send.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Index of a row's scale word in the output.
MARROW_DEVICE std::uint64_t scale_at(const Shape& s, std::int64_t row, int word) {
  const auto at_row = static_cast<std::uint64_t>(row);
  if (!s.column_major) return at_row * s.scale_words + word;
  const auto rows = static_cast<std::uint64_t>(s.rank_major ? s.tokens : s.capacity);
  return (at_row / rows * s.scale_words + word) * rows + at_row % rows;
}

/// Writes one cell of opaque scales: words, since a row of them need not start at 16 bytes.
MARROW_DEVICE void write_opaque_scales(const Shape& s, const DispatchArgs& a, std::int64_t row,
                                       int index, const Words16& v) {
  const int first = (index - s.row_cells) * 4;
  for (int i = 0; i < 4 && first + i < s.scale_words; ++i)
    reinterpret_cast<std::uint32_t*>(a.out_scales)[scale_at(s, row, first + i)] = v.word[i];
}

/// Whether the four scales of a fp8 quad are 16 bytes that can be stored at once.
MARROW_DEVICE bool has_wide_scales(const Shape& s, const DispatchArgs& a) {
  return !s.packed && !s.column_major && s.scale_words % 4 == 0 &&
         (reinterpret_cast<std::uintptr_t>(a.out_scales) & 15) == 0;
}
/// ... and if not.
MARROW_DEVICE void write_scales(const Shape& s, const DispatchArgs& a, std::int64_t row, int quad,
                                const Words16& v) {
  auto* out = reinterpret_cast<std::uint32_t*>(a.out_scales);
  if (s.packed) {
    std::uint32_t word = 0;
    for (int g = 0; g < 4; ++g) word |= (v.word[g] >> 23) << (g * 8);
    out[scale_at(s, row, quad)] = word;
    return;
  }
  for (int g = 0; g < 4 && quad * 4 + g < s.scale_words; ++g)
    out[scale_at(s, row, quad * 4 + g)] = v.word[g];
}

/// Items (entry, quad) of a worker, in flight together.
constexpr int kItems = kWarpQuads ? kItemsAtOnce : 1;
struct Items {
  const std::byte* from[kItems];  ///< the quad's first cell
  std::uint32_t what[kItems];     ///< entry (of the block's at hand) << 16 | quad
  std::uint32_t missing = 0;      ///< bit u: item u is not written yet
};
struct CellsOfItem {
  Cell16 cell[kCellsPerLane];
};

/// What a block's workers know of its entries at hand.
struct Entries {
  const std::int32_t* rows;  ///< [entry][record_rows], count of them
  const int* counts;
  const Origin* origins;
};

/// Who loads the extra cell of item u: raw rows need it in all lanes; the scales of fp8 rows are written by lane u.
template <bool kFp8>
MARROW_DEVICE bool has_extra(int u, int lane) {
  return !kFp8 || lane == (kWarpQuads ? u : 0);
}

/// Cells to the extra cell from a quad's first one.
MARROW_DEVICE std::uint64_t to_extra(const Shape& s, int quad) {
  return static_cast<std::uint64_t>(s.data_cells + quad - quad * kQuadCells) * 16;
}

/// Takes what came of a worker's items: of those whose cells all lanes have. @param lost  not ok: what is missing counts as
/// zeros  @return whether all did
template <bool kFp8>
MARROW_DEVICE bool take_items(const Run& r, const DispatchArgs& a, Items& items,
                              const Entries& entries, int lane, Status lost) {
  const Shape& s = r.s;
  CellsOfItem cells[kItems];
  Cell16 extra[kFp8 ? 1 : kItems] = {};
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int u = 0; u < kItems; ++u) {
    if (!(items.missing >> u & 1)) continue;
    const int quad = static_cast<int>(items.what[u] & 0xffff);
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int c = 0; c < kCellsPerLane; ++c) {
      const int in_quad = c * kQuadLanes + lane;
      cells[u].cell[c] = {};
      if (quad * kQuadCells + in_quad < s.data_cells)
        cells[u].cell[c] = load_cell(items.from[u] + in_quad * 16);
    }
    if (has_extra<kFp8>(u, lane))
      extra[kFp8 ? 0 : u] = load_cell(items.from[u] + to_extra(s, quad));
  }
  std::uint32_t here = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int u = 0; u < kItems; ++u) {
    bool all = kFp8 ? !has_extra<kFp8>(u, lane) || mark_of(extra[0]) != kSentinel
                    : mark_of(extra[kFp8 ? 0 : u]) == r.epoch;
    for (int c = 0; c < kCellsPerLane; ++c) all &= mark_of(cells[u].cell[c]) != kSentinel;
    if (all) here |= 1u << u;
  }
  here &= items.missing;
  if constexpr (kWarpQuads) here = warp_and(here);
  if (lost != Status::ok) here = items.missing;
  items.missing &= ~here;
  // One copy of the code that writes: the kernel runs through it about once, so its size is time.
  MARROW_EP_ROLLED
  while (here) {
    const int u = lowest_lane(here);
    here &= here - 1;
    CellsOfItem taken;
    Cell16 more;
    const std::byte* from;
    std::uint32_t what;
    pick(taken, cells, u);
    pick(more, extra, kFp8 ? 0 : u);
    pick(from, items.from, u);
    pick(what, items.what, u);
    auto* to = const_cast<std::byte*>(from);
    const int e = static_cast<int>(what >> 16);
    const int quad = static_cast<int>(what & 0xffff);
    const int first = quad * kQuadCells + lane;
    const bool scales = kFp8 && lane == (kWarpQuads ? u : 0);
    Words16 v[kCellsPerLane];
    Words16 w = words_of(more);
    for (int c = 0; c < kCellsPerLane; ++c) v[c] = words_of(taken.cell[c]);
    if (lost != Status::ok) {
      r.set_failed(entries.origins[e].source(), lost);
      w = {};
      for (int c = 0; c < kCellsPerLane; ++c) v[c] = {};
    } else {
      for (int c = 0; c < kCellsPerLane; ++c) {
        if constexpr (!kFp8) v[c].word[3] |= w.word[2] >> (c * kQuadLanes + lane) & 1;
        if (first + c * kQuadLanes < s.data_cells)
          store_cell(to + (c * kQuadLanes + lane) * 16, sentinel_cell());
      }
      if (scales) store_cell(to + to_extra(s, quad), sentinel_cell());
    }
    const int n = entries.counts[e];
    const std::int32_t* rows = entries.rows + e * s.record_rows;
    const auto row_bytes = static_cast<std::uint32_t>(s.row_cells) * 16;
    std::byte* out = a.out_rows + static_cast<std::uint32_t>(first) * 16;
    const bool wide_scales = kFp8 && has_wide_scales(s, a);
    std::byte* out_scales = a.out_scales + static_cast<std::uint32_t>(quad) * 16;
    const auto scales_bytes = static_cast<std::uint32_t>(s.scale_words) * 4;
    MARROW_EP_ROLLED
    for (int i = 0; i < n; i += 4) {
      const Words16 four = load_words(reinterpret_cast<const std::byte*>(rows + i));
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int x = 0; x < 4; ++x) {
        if (i + x >= n) continue;
        const std::uint64_t row = four.word[x];
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int c = 0; c < kCellsPerLane; ++c) {
          const int index = first + c * kQuadLanes;
          if (index < s.row_cells) {
            store_wide(out + row * row_bytes + c * kQuadLanes * 16, v[c]);
          } else if (!kFp8 && index < s.data_cells) {
            write_opaque_scales(s, a, static_cast<std::int64_t>(row), index, v[c]);
          }
        }
        if (scales && wide_scales) store_wide(out_scales + row * scales_bytes, w);
      }
    }
    if constexpr (kFp8) {
      if (!scales || wide_scales) continue;
      MARROW_EP_ROLLED
      for (int i = 0; i < n; ++i) write_scales(s, a, rows[i], quad, w);
    }
  }
  return items.missing == 0;
}

/// The block's n entries at hand.
template <bool kFp8>
MARROW_DEVICE void receive_entries(const Run& r, const DispatchArgs& a, const Entries& entries,
                                   int n, int worker, int workers) {
  const Shape& s = r.s;
  const int lane = thread_index() % kQuadLanes;
  Walk walk(worker, workers, s.quads, s.by_quads);
  MARROW_EP_ROLLED
  while (walk.number < n) {
    Items items;
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kItems; ++u, walk.next()) {
      items.from[u] = nullptr;
      items.what[u] = 0;
      if (walk.number >= n) continue;
      const Origin origin = entries.origins[walk.number];
      items.from[u] = r.local + s.row_at(r.set, origin.source(), origin.token()) +
                      static_cast<std::uint32_t>(walk.quad) * (kQuadCells * 16);
      items.what[u] =
          static_cast<std::uint32_t>(walk.number) << 16 | static_cast<std::uint32_t>(walk.quad);
      items.missing |= 1u << u;
    }
    Status lost = Status::ok;
    for (std::uint32_t turns = 1; !take_items<kFp8>(r, a, items, entries, lane, lost); ++turns) {
      relax(turns);
      if (turns % kLooksAtOnce == 0) lost = common_impatience(r);
    }
  }
}

/// Everything of dispatch's receiving side, by `blocks` blocks.
template <bool kFp8>
MARROW_DEVICE void receive_dispatch(const Run& r, const DispatchArgs& a, int block, int blocks) {
  const Shape& s = r.s;
  const PlaceMemory m = place_memory(s);
  const int workers = block_size() / kQuadLanes;
  const int worker = thread_index() / kQuadLanes;
  const int lane = thread_index() % kQuadLanes;
  Placed p{};
  if (s.place_in_block) {
    p = place_in_block(r, block);
  } else {
    p.entries = r.table<HandleHead>(0)->entries;
    p.list = r.table<Origin>(s.list);
  }
  // Large blocks leave the tables to their last warp, so that no row waits for them.
  const bool apart = kWarpQuads && s.place_in_block && workers >= kTableWorkers;
  const int me = apart ? lane : thread_index();
  const int table_threads = apart ? kQuadLanes : block_size();
  const bool tables = s.place_in_block && (!apart || worker == workers - 1);
  const int mine = p.entries > block ? (p.entries - block + blocks - 1) / blocks : 0;
  const Entries entries{dynamic_shared<std::int32_t>(m.rows),
                        dynamic_shared<int>(m.counts_of_entries),
                        dynamic_shared<Origin>(m.origins)};
  if (s.place_in_block && !apart) {
    find_bases(s, p);
    meet();
  }
  MARROW_EP_ROLLED
  for (int from = 0; from < mine; from += kEntriesAtOnce) {
    const int n = mine - from < kEntriesAtOnce ? mine - from : kEntriesAtOnce;
    if (from > 0) meet();  // the last entries' rows were used
    MARROW_EP_ROLLED
    for (int e = worker; e < n; e += workers) {
      const Origin origin = p.list[block + (from + e) * blocks];
      const int count =
          find_rows(r, p, origin, lane, dynamic_shared<std::int32_t>(m.rows) + e * s.record_rows);
      if (lane != 0) continue;
      dynamic_shared<int>(m.counts_of_entries)[e] = count;
      dynamic_shared<Origin>(m.origins)[e] = origin;
    }
    meet();
    note(Point::rows_found);
    if (tables && apart && from == 0) find_bases(s, p);
    if (tables) write_tables(r, p, block + from * blocks, blocks, n, me, table_threads);
    if (!apart || worker < workers - 1)
      receive_entries<kFp8>(r, a, entries, n, worker, apart ? workers - 1 : workers);
  }
  if (tables && block == 0) {
    if (mine == 0 && apart) find_bases(s, p);
    write_totals(r, p, me, table_threads);
  }
}

/// When the first kernel of the receive started, as that one noted.
MARROW_DEVICE std::uint64_t call_start(const Shape& s, Control* control, std::uint64_t start) {
  if (!s.far_any && s.place_in_block) return start;
  return load_relaxed<Scope::device>(&control->started);
}

/// What a stopped kernel leaves: no rows.
MARROW_DEVICE void stop_dispatch(const Run& r, const DispatchArgs& a, bool sends, bool receives) {
  const Shape& s = r.s;
  auto* head = r.table<HandleHead>(0);
  if (sends && block_index() == 0 && thread_index() == 0) {
    const std::int32_t tokens = tokens_of(s, a);
    head->tokens = tokens < 0 ? 0 : tokens;
  }
  if (!receives || block_index() != a.receive_from) return;
  for (int i = thread_index(); i < (s.rank_major ? s.ranks : s.local); i += block_size())
    r.table<std::int32_t>(s.counts)[i] = 0;
  if (thread_index() == 0) head->entries = head->pairs = 0;
}

/// dispatch_send, dispatch_receive, or both, by the numbers of blocks in the arguments. kApart: both, and no block does
/// both; then lists go from the blocks that send no rows.
template <bool kFp8, bool kApart>
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(512)
    dispatch_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                    const MARROW_GRID_CONSTANT WindowHandle window,
                    const MARROW_GRID_CONSTANT Shape s, const MARROW_GRID_CONSTANT DispatchArgs a) {
  await_previous_kernel();
  let_next_kernel_start();
  const std::uint64_t start = now_ns();
  note(Point::begun);
  auto* control = at<Control>(window.local, s.control);
  const int block = block_index();
  const bool sends = block < a.send_blocks;
  const bool receives = kApart ? !sends : block >= a.receive_from;
  const bool any_send = kApart || a.send_blocks > 0;
  const bool any_receive = kApart || a.receive_from < grid_size();
  const int list_block = kApart ? block - a.send_blocks : block;
  const int list_blocks = kApart ? grid_size() - a.send_blocks : a.send_blocks;
  FirstChoice choice;
  QuadInput input[kQuadsAtOnce];
  const Numbers now =
      read_numbers(control, &control->dispatch_sent, &control->dispatch_received, [&] {
        if (!any_send) return;
        const std::int32_t tokens = tokens_of(s, a);
        choice = load_first_choice(s, a, tokens, sends ? block : list_block,
                                   sends ? a.send_blocks : list_blocks);
        if (kApart && sends) load_first_quads<kFp8>(s, a, tokens, block, a.send_blocks, input);
      });
  note(Point::numbers_read);
  const bool invalid = out_of_turn(s, now.sent, now.received, any_send, any_receive);
  Turn turn(&control->arrived[0]);
  const auto count_on = [&] {
    if (any_send) store_relaxed<Scope::device>(&control->dispatch_sent, now.sent + 1);
    if (any_receive) {
      store_relaxed<Scope::device>(&control->dispatch_received, now.received + 1);
      add_relaxed<Scope::device>(&control->dispatches, 1);
    }
    if (invalid) stop_as_invalid(control);
  };
  const Run out(comm, window, s, a.handle, now.sent, start, now.failed != 0);
  if (invalid || now.stopped) {
    stop_dispatch(out, a, sends, receives);
  } else {
    if (kApart ? !sends : sends) send_lists(out, a, list_block, list_blocks, choice);
    note(Point::lists_sent);
    if (sends) {
      if constexpr (!kApart) {
        meet();  // each token has another line
        load_first_quads<kFp8>(s, a, tokens_of(s, a), block, a.send_blocks, input);
      }
      send_rows<kFp8>(out, a, block, a.send_blocks, choice, input);
      note(Point::rows_sent);
    }
    if (receives) {
      meet();  // shared memory changes its use
      receive_dispatch<kFp8>(Run(comm, window, s, a.handle, now.received,
                                 call_start(s, control, start), now.failed != 0),
                             a, block - a.receive_from, grid_size() - a.receive_from);
      note(Point::rows_received);
    }
  }
  turn.end(count_on);
  note_times(a.times, start);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
