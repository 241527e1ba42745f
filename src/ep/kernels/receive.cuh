// SPDX-License-Identifier: Apache-2.0
// Rows of dispatch, receiving side. A block takes entries b, b + blocks, ... of those that reach this rank, in about the order in which
// they arrive, and of what is left over a share; its workers take pieces of them, look at all outstanding quads of their
// piece in each turn, and write each to the rows it belongs to.
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

/// Up to kPiece neighbouring quads of one row, as a worker takes them.
struct Piece {
  const std::byte* from;  ///< the lane's first cell
  Origin origin;
  int quad;                ///< the first one
  std::uint32_t missing;   ///< bit u: quad + u is not written yet
  const std::byte* extra;  ///< the extra cell of quad + lane
};
struct CellsOfQuad {
  Cell16 cell[kCellsPerLane];
};

MARROW_DEVICE Piece piece_at(const Run& r, Origin origin, int piece, int lane) {
  const Shape& s = r.s;
  const int quad = piece * kPiece;
  const int quads = s.quads - quad < kPiece ? s.quads - quad : kPiece;
  const std::byte* row = r.local + s.row_at(r.set, origin.source(), origin.token());
  return {row + static_cast<std::uint32_t>(quad * kQuadCells + lane) * 16, origin, quad,
          (1u << quads) - 1, row + static_cast<std::uint32_t>(s.data_cells + quad + lane) * 16};
}

/// visit(row) for the n output rows of a worker's line.
MARROW_DEVICE void each_row(const std::int32_t* line, int n, const auto& visit) {
  MARROW_EP_ROLLED
  for (int i = 0; i < n; i += 4) {
    const Words16 four = load_words(reinterpret_cast<const std::byte*>(line + i));
    MARROW_EP_UNROLLED
    for (int x = 0; x < 4; ++x)
      if (i + x < n) visit(four.word[x]);
  }
}

/// Writes the quads `here` of a piece to its output rows.
MARROW_DEVICE void write_quads(const Shape& s, const DispatchArgs& a, const Piece& piece,
                               std::uint32_t here, const CellsOfQuad (&cells)[kPiece],
                               const std::int32_t* line, int n, int lane) {
  const int first = piece.quad * kQuadCells + lane;
  const int room = s.row_cells - first;
  const auto row_bytes = static_cast<std::uint32_t>(s.row_cells) * 16;
  // Computed once: nvcc would read the argument again for each row.
  const std::uint64_t out =
      kept(reinterpret_cast<std::uint64_t>(a.out_rows) + static_cast<std::uint32_t>(first) * 16);
  each_row(line, n, [&](std::uint32_t row) {
    auto* to = reinterpret_cast<std::byte*>(out + std::uint64_t{row} * row_bytes);
    MARROW_EP_UNROLLED
    for (int u = 0; u < kPiece; ++u) {
      MARROW_EP_UNROLLED
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int ahead = u * kQuadCells + c * kQuadLanes;
        if ((here >> u & 1) != 0 && ahead < room)
          store_wide(to + ahead * 16, words_of(cells[u].cell[c]));
      }
    }
  });
}

/// fp8: the scales of quad + lane, by that lane.
MARROW_DEVICE void write_quad_scales(const Shape& s, const DispatchArgs& a, int quad,
                                     const Words16& w, const std::int32_t* line, int n) {
  if (!has_wide_scales(s, a)) {
    MARROW_EP_ROLLED
    for (int i = 0; i < n; ++i) write_scales(s, a, line[i], quad, w);
    return;
  }
  const auto row_bytes = static_cast<std::uint32_t>(s.scale_words) * 4;
  const std::uint64_t out =
      kept(reinterpret_cast<std::uint64_t>(a.out_scales) + static_cast<std::uint32_t>(quad) * 16);
  each_row(line, n, [&](std::uint32_t row) {
    store_wide(reinterpret_cast<std::byte*>(out + std::uint64_t{row} * row_bytes), w);
  });
}

/// Raw rows: the cells of the quads `here` that are opaque scales.
MARROW_DEVICE void write_opaque_cells(const Shape& s, const DispatchArgs& a, const Piece& piece,
                                      std::uint32_t here, const CellsOfQuad (&cells)[kPiece],
                                      const std::int32_t* line, int n, int lane) {
  if ((piece.quad + kPiece) * kQuadCells <= s.row_cells) return;
  MARROW_EP_ROLLED
  for (int u = 0; u < kPiece; ++u) {
    CellsOfQuad mine;
    pick(mine, cells, u);
    MARROW_EP_ROLLED
    for (int i = 0; i < n && (here >> u & 1) != 0; ++i) {
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int index = (piece.quad + u) * kQuadCells + c * kQuadLanes + lane;
        if (index >= s.row_cells && index < s.data_cells)
          write_opaque_scales(s, a, line[i], index, words_of(mine.cell[c]));
      }
    }
  }
}

/// A look at what is missing of a piece. @return bits of the quads whose cells all lanes have
template <bool kFp8>
MARROW_DEVICE std::uint32_t look_at_piece(const Run& r, const Piece& piece, int lane,
                                          CellsOfQuad (&cells)[kPiece], Cell16& extra) {
  const Shape& s = r.s;
  const int room = s.data_cells - piece.quad * kQuadCells - lane;
  // The extra cells: a lane each.
  const bool has_extra = lane < kPiece && (piece.missing >> lane & 1) != 0;
  if (has_extra) extra = load_cell(piece.extra);
  MARROW_EP_UNROLLED
  for (int u = 0; u < kPiece; ++u) {
    if (!(piece.missing >> u & 1)) continue;
    MARROW_EP_UNROLLED
    for (int c = 0; c < kCellsPerLane; ++c) {
      const int ahead = u * kQuadCells + c * kQuadLanes;
      cells[u].cell[c] = {};
      if (ahead < room) cells[u].cell[c] = load_cell(piece.from + ahead * 16);
    }
  }
  std::uint32_t here = piece.missing;
  MARROW_EP_UNROLLED
  for (int u = 0; u < kPiece; ++u) {
    if (!(piece.missing >> u & 1)) continue;
    for (int c = 0; c < kCellsPerLane; ++c)
      if (mark_of(cells[u].cell[c]) == kSentinel) here &= ~(1u << u);
  }
  if (has_extra && (kFp8 ? mark_of(extra) == kSentinel : mark_of(extra) != r.epoch))
    here &= ~(1u << lane);
  if constexpr (kWarpQuads) here = warp_and(here);
  return here;
}

/// The mark back to where quads came, for the next batch but one.
template <bool kFp8>
MARROW_DEVICE void clear_quads(const Shape& s, const Piece& piece, std::uint32_t here, int lane) {
  const int room = s.data_cells - piece.quad * kQuadCells - lane;
  auto* to = const_cast<std::byte*>(piece.from);
  MARROW_EP_UNROLLED
  for (int u = 0; u < kPiece; ++u) {
    MARROW_EP_UNROLLED
    for (int c = 0; c < kCellsPerLane; ++c) {
      const int ahead = u * kQuadCells + c * kQuadLanes;
      if ((here >> u & 1) != 0 && ahead < room) store_cell(to + ahead * 16, sentinel_cell());
    }
  }
  if (kFp8 && lane < kPiece && (here >> lane & 1) != 0)
    store_cell(const_cast<std::byte*>(piece.extra), sentinel_cell());
}

/// Waits for a piece and writes it. @param line  the worker's, of shared memory
template <bool kFp8>
MARROW_DEVICE void receive_piece(const Run& r, const DispatchArgs& a, const Placed& p, Piece piece,
                                 std::int32_t* line, int lane) {
  const Shape& s = r.s;
  int n = -1;
  Status lost = Status::ok;
  MARROW_EP_ROLLED
  for (std::uint32_t turns = 1;; ++turns) {
    CellsOfQuad cells[kPiece];
    Cell16 extra{};
    std::uint32_t here = look_at_piece<kFp8>(r, piece, lane, cells, extra);
    if (n < 0) {                                         // while the first look is under way
      if constexpr (kWarpQuads) warp_sync(0xffffffffu);  // the last piece's rows were read
      n = find_rows(r, p, piece.origin, lane, line);
      if constexpr (kWarpQuads) warp_sync(0xffffffffu);
    }
    if (lost != Status::ok) {  // what is missing counts as zeros
      r.set_failed(piece.origin.source(), lost);
      here = piece.missing;
      extra = {};
    } else if (here) {
      clear_quads<kFp8>(s, piece, here, lane);
    }
    if (here) {
      MARROW_EP_UNROLLED
      for (int u = 0; u < kPiece; ++u) {
        std::uint32_t bits = 0;
        if constexpr (!kFp8) {
          bits = word_of(extra, 2);
          if constexpr (kWarpQuads) bits = warp_shuffle(0xffffffffu, bits, u);
        }
        for (int c = 0; c < kCellsPerLane; ++c) {
          if constexpr (!kFp8)
            cells[u].cell[c].high |= std::uint64_t{bits >> (c * kQuadLanes + lane) & 1} << 32;
          if (lost != Status::ok) cells[u].cell[c] = {};
        }
      }
      write_quads(s, a, piece, here, cells, line, n, lane);
      if constexpr (kFp8) {
        if (lane < kPiece && (here >> lane & 1) != 0)
          write_quad_scales(s, a, piece.quad + lane, words_of(extra), line, n);
      } else if (s.data_cells > s.row_cells) {
        write_opaque_cells(s, a, piece, here, cells, line, n, lane);
      }
      piece.missing &= ~here;
    }
    if (piece.missing == 0) return;
    relax(turns);
    if (turns % kLooksAtOnce == 0) lost = common_impatience(r);
  }
}

/// A block's share of the pieces: all of entries b, b + blocks, ... as long as there is one for each block; what is left is
/// shared out by pieces.
struct Share {
  int block, blocks;
  int wholes;  ///< entries
  int left;    ///< entries of all blocks
  int begin;   ///< of the pieces of those: the first of ours
  int pieces;  ///< of ours in all
  MARROW_DEVICE Share(const Shape& s, const DispatchArgs& a, int entries, int b, int all_blocks)
      : block(b), blocks(all_blocks), wholes(a.by_receivers.quotient(entries)) {
    left = entries - wholes * blocks;
    begin = a.by_receivers.quotient(left * pieces_of(s) * block);
    const int end = a.by_receivers.quotient(left * pieces_of(s) * (block + 1));
    pieces = wholes * pieces_of(s) + end - begin;
  }
  /// Of our i-th piece: its entry, and which piece of that it is.
  struct At {
    int entry, piece;
  };
  MARROW_DEVICE At at(const Shape& s, int i) const {
    const int in_left = i - wholes * pieces_of(s);
    const int number = in_left < 0 ? i : begin + in_left;
    const int entry = by_pieces(s).quotient(number);
    return {in_left < 0 ? block + entry * blocks : wholes * blocks + entry,
            number - entry * pieces_of(s)};
  }
  /// Entries whose tables are ours: block, block + blocks, ...
  MARROW_DEVICE int tables() const { return wholes + (block < left ? 1 : 0); }
};

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
  const Share share(s, a, p.entries, block, blocks);
  // Large blocks leave the tables to their last warp, so that no row waits for them; who has no more rows helps.
  const bool apart = kWarpQuads && s.place_in_block && workers >= kTableWorkers;
  const int carriers = apart ? workers - 1 : workers;
  if (worker < carriers) {
    auto* line = dynamic_shared<std::int32_t>(m.lines) + worker * s.record_rows;
    MARROW_EP_ROLLED
    for (int i = worker; i < share.pieces; i += carriers) {
      const Share::At at = share.at(s, i);
      receive_piece<kFp8>(r, a, p, piece_at(r, p.list[at.entry], at.piece, lane), line, lane);
    }
    note(Point::rows_received);
  }
  if (!s.place_in_block) return;
  const bool is_last = worker == workers - 1;
  if constexpr (kWarpQuads) {
    // Parts of the tables are taken in turn, from 1 on: at 0 the last warp has not found the bases yet.
    std::uint32_t* taken = dynamic_shared<std::uint32_t>(m.taken);
    const int tables = share.tables();
    // For a few it does not pay to help.
    if (!is_last && apart && tables * s.top_k <= 2 * 32) return;
    if (is_last) {
      find_bases(s, p);
      warp_sync(0xffffffffu);
      if (lane == 0) publish<Scope::block>(Store{taken, 1u});  // meets the observe of who helps
    }
    for (std::uint32_t looks = 1; observe<Scope::block>(taken) == 0; ++looks) relax(looks);
    for (;;) {
      std::uint64_t turn = 0;
      if (lane == 0) turn = fetch_add_relaxed<Scope::block>(taken, 1u) - 1;
      turn = warp_shuffle(0xffffffffu, turn, 0);
      if (!write_tables_by_warp(r, p, share.block, share.blocks, tables, static_cast<int>(turn)))
        break;
    }
    if (is_last) write_totals(r, p, share.block, share.blocks, lane, 32);
  } else {
    meet();
    find_bases(s, p);
    meet();
    write_tables_by_threads(r, p, share.block, share.blocks, share.tables(), thread_index(),
                            block_size());
    write_totals(r, p, share.block, share.blocks, thread_index(), block_size());
  }
  note(Point::tables_written);
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
  QuadInput input[kPiece];
  const Numbers now =
      read_numbers(control, &control->dispatch_sent, &control->dispatch_received, [&] {
        if (!any_send) return;
        const std::int32_t tokens = tokens_of(s, a);
        choice = load_first_choice(s, a, tokens, sends ? block : list_block,
                                   sends ? a.send_blocks : list_blocks);
        if (kApart && sends) load_first_piece<kFp8>(s, a, tokens, block, a.send_blocks, input);
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
      if constexpr (!kApart)
        load_first_piece<kFp8>(s, a, tokens_of(s, a), block, a.send_blocks, input);
      send_rows<kFp8>(out, a, block, a.send_blocks, choice, input);
      note(Point::rows_sent);
    }
    if (receives) {
      meet();  // shared memory changes its use
      receive_dispatch<kFp8>(Run(comm, window, s, a.handle, now.received,
                                 call_start(s, control, start), now.failed != 0),
                             a, block - a.receive_from, grid_size() - a.receive_from);
    }
  }
  turn.end(count_on);
  note_times(a.times, start);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
