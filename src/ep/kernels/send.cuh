// SPDX-License-Identifier: Apache-2.0
// Rows of dispatch, sending side. A block takes tokens b, b + blocks, ...; for 16 of them at a time its threads first agree in
// shared memory where each row goes, and then carry the rows: each quad is read, quantised and stored once per
// destination rank.
#pragma once

#include "ep/kernels/lists.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// What one lane reads of a quad.
struct QuadInput {
  Words16 word[2][kCellsPerLane];
};

/// A lane's part of a quad of a token's row. Lanes past the row's end read its last cell again: they send nothing, and no
/// group's largest value changes.
template <bool kFp8>
MARROW_DEVICE void load_quad(const Shape& s, const DispatchArgs& a, const std::byte* row, int token,
                             int quad, int lane, QuadInput* in) {
  MARROW_EP_UNROLLED
  for (int j = 0; j < kCellsPerLane; ++j) {
    int cell = quad * kQuadCells + j * kQuadLanes + lane;
    if (cell >= s.data_cells) cell = s.data_cells - 1;
    if constexpr (kFp8) {
      const std::byte* at_cell = row + static_cast<unsigned>(cell) * 32;
      in->word[0][j] = load_words(at_cell);
      in->word[1][j] = load_words(at_cell + 16);
    } else if (cell < s.row_cells) {
      in->word[0][j] = load_words(row + static_cast<unsigned>(cell) * 16);
    } else {
      in->word[0][j] = {};
      const std::uint32_t from = static_cast<std::uint32_t>(cell - s.row_cells) * 16;
      const auto* words = reinterpret_cast<const std::uint32_t*>(
          a.scales + static_cast<std::uint64_t>(token) * s.scale_bytes + from);
      MARROW_EP_UNROLLED
      for (std::uint32_t i = 0; i < 4; ++i)
        if (from + i * 4 < s.scale_bytes) in->word[0][j].word[i] = load_cached(words + i);
    }
  }
}

/// The larger sizes of two pairs of bf16; NaN counts as nothing, unless both are. Signs must be clear.
MARROW_DEVICE std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t word;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
#else
  return larger_size(size_of_bf16(a), size_of_bf16(b)) >> 16 |
         larger_size(size_of_bf16(a >> 16), size_of_bf16(b >> 16));
#endif
}
MARROW_DEVICE std::uint32_t largest_of(const Words16& a, const Words16& b) {
  constexpr std::uint32_t kSizes = 0x7fff7fffu;
  std::uint32_t largest = larger_pair(a.word[0] & kSizes, b.word[0] & kSizes);
  MARROW_EP_UNROLLED
  for (int i = 1; i < 4; ++i)
    largest = larger_pair(largest, larger_pair(a.word[i] & kSizes, b.word[i] & kSizes));
  return larger_size(size_of_bf16(largest), size_of_bf16(largest >> 16));
}
MARROW_DEVICE std::uint32_t quantise_pair(std::uint32_t a, std::uint32_t b, float factor) {
  return to_e4m3_word(bf16_low(a) * factor, bf16_high(a) * factor, bf16_low(b) * factor,
                      bf16_high(b) * factor);
}
MARROW_DEVICE Cell16 quantise_cell(const Words16& a, const Words16& b, float factor) {
  return cell_of(Words16{
      {quantise_pair(a.word[0], a.word[1], factor), quantise_pair(a.word[2], a.word[3], factor),
       quantise_pair(b.word[0], b.word[1], factor), quantise_pair(b.word[2], b.word[3], factor)}});
}

/// The lane's cells and the quad's extra cell. All lanes of the warp call.
template <bool kFp8>
MARROW_DEVICE void make_quad(const Shape& s, const QuadInput& in, int quad, int lane,
                             std::uint32_t epoch, Cell16* cell, Cell16* extra) {
  if constexpr (kFp8) {
    constexpr int kGroupLanes = kWarpQuads ? 8 : 1;  // 8 cells of 16 channels are a group
    constexpr int kGroups = kWarpQuads ? 1 : 4;      // groups of one lane
    constexpr int kCells = kCellsPerLane / kGroups;
    std::uint32_t scale[4] = {};
    MARROW_EP_UNROLLED
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t largest = 0;
      for (int j = g * kCells; j < (g + 1) * kCells; ++j) {
        largest = larger_size(largest, largest_of(in.word[0][j], in.word[1][j]));
      }
      for (int step = 1; step < kGroupLanes; step *= 2)
        largest = larger_size(largest, warp_shuffle(0xffffffffu, largest, lane ^ step));
      const Quantiser q = quantiser(largest, s.power_of_two);
      for (int j = g * kCells; j < (g + 1) * kCells; ++j)
        cell[j] = quantise_cell(in.word[0][j], in.word[1][j], q.factor);
      // A group that begins past the row's end has no scale, and its word must not be left to chance.
      const int group = quad * 4 + (kWarpQuads ? lane / kGroupLanes : g);
      scale[g] = group * 128 < s.hidden ? bits_of(q.scale) : 0;
    }
    if constexpr (kWarpQuads) {
      const std::uint32_t mine = scale[0];
      for (int g = 0; g < 4; ++g) scale[g] = warp_shuffle(0xffffffffu, mine, g * 8);
    }
    *extra = cell_of(Words16{{scale[0], scale[1], scale[2], scale[3]}});
  } else {
    std::uint32_t bits = 0;
    MARROW_EP_UNROLLED
    for (int j = 0; j < kCellsPerLane; ++j) {
      Words16 v = in.word[0][j];
      const std::uint32_t bit = v.word[3] & 1;
      if constexpr (kWarpQuads) {
        bits = warp_ballot(0xffffffffu, bit != 0);
      } else {
        bits |= bit << j;
      }
      v.word[3] &= ~1u;
      cell[j] = cell_of(v);
    }
    *extra = epoch_cell(0, 0, bits, epoch);
  }
}

/// Quads of a piece that are made and sent at once.
inline constexpr int kQuadsTogether = kWarpQuads ? 2 : 1;

/// A block's tokens of one round: at most kTokensAtOnce, block + from * blocks and so on.
struct Round {
  int block, blocks, from, tokens;
  MARROW_DEVICE int token(int j) const { return block + (from + j) * blocks; }
  MARROW_DEVICE bool has(int j) const { return j < kTokensAtOnce && token(j) < tokens; }
};

/// A worker's pieces of a round.
MARROW_DEVICE Walk walk_of_block(const Shape& s) {
  return Walk(thread_index() / kQuadLanes, block_size() / kQuadLanes, pieces_of(s), by_pieces(s));
}

template <bool kFp8>
MARROW_DEVICE void load_piece(const Shape& s, const DispatchArgs& a, const Round& round,
                              const Walk& walk, int lane, QuadInput (&in)[kPiece]) {
  if (!round.has(walk.number)) return;
  const int token = round.token(walk.number);
  const std::byte* row =
      a.rows + static_cast<std::uint64_t>(static_cast<unsigned>(token)) * s.input_row_bytes;
  MARROW_EP_UNROLLED
  for (int u = 0; u < kPiece; ++u) {
    const int quad = walk.quad * kPiece + u;
    if (quad < s.quads) load_quad<kFp8>(s, a, row, token, quad, lane, &in[u]);
  }
}

/// Where the rows of a round's tokens go.
struct Targets {
  std::byte* base[kTokensAtOnce]
                 [kMaxTopK + 1];      ///< row slot at each destination, or on its way there
  std::int32_t count[kTokensAtOnce];  ///< of destinations
};

/// A warp takes a token.
MARROW_DEVICE void find_targets(const Run& r, const DispatchArgs& a, Targets& m, const Round& round,
                                FirstChoice ahead) {
  const Shape& s = r.s;
  const int warps = (block_size() + warp_lanes() - 1) / warp_lanes();
  MARROW_EP_ROLLED
  for (int j = thread_index() / warp_lanes(); round.has(j); j += warps) {
    if (!kWarpQuads && lane_index() != 0) continue;
    const int token = round.token(j);
    Choices choices;
    take_choices(s, a, token, ahead, round.from == 0 && j < warps, choices);
    find_ranks(r, choices);
    int count = 0;
    bool far = false;
    // One destination after the other; on a GPU each lane has one.
    const auto add = [&](int i, bool here) {
      const int rank = choices.rank[i];
      const bool goes = here && choices.first[i] && !r.is_failed(rank);
      const bool is_far = goes && s.is_far(rank);
      far |= is_far;
      const bool near = goes && !is_far;
      int at_place = count;
      if constexpr (kWarpQuads) {
        const std::uint32_t all = warp_ballot(0xffffffffu, near);
        at_place = count_lanes(all & ((1u << lane_index()) - 1));
        count = count_lanes(all);
      } else {
        count += near;
      }
      if (near) m.base[j][at_place] = r.peer(rank) + s.row_at(r.set, s.rank, token);
    };
    if constexpr (kWarpQuads) {
      add(0, lane_index() < s.top_k);
      if (s.far_any) far = warp_ballot(0xffffffffu, far) != 0;
    } else {
      for (int k = 0; k < s.top_k; ++k) add(k, true);
    }
    if (lane_index() != 0) continue;
    if (far)
      m.base[j][count++] = r.local + s.stage_rows +
                           (static_cast<std::uint64_t>(r.set) * s.tokens + token) * s.row_stride;
    m.count[j] = count;
  }
  meet();
}

/// A worker's first piece.
template <bool kFp8>
MARROW_DEVICE void load_first_piece(const Shape& s, const DispatchArgs& a, int tokens, int block,
                                    int blocks, QuadInput (&in)[kPiece]) {
  load_piece<kFp8>(s, a, Round{block, blocks, 0, tokens}, walk_of_block(s),
                   thread_index() % kQuadLanes, in);
}

/// Neighbouring quads, from `quad` on, to all destinations of the round's j-th token. @param extra  of quad + lane
MARROW_DEVICE void store_quads(const Shape& s, const Targets& m, int j, int quad, int lane,
                               const Cell16 (&cell)[kQuadsTogether][kCellsPerLane],
                               const Cell16& extra) {
  const auto first = static_cast<std::uint32_t>(quad * kQuadCells + lane);
  const int room = s.data_cells - static_cast<int>(first);
  const auto at_extra = static_cast<std::uint32_t>(s.data_cells + quad + lane) * 16;
  const bool has_extra = lane < kQuadsTogether && quad + lane < s.quads;
  const int count = m.count[j];
  MARROW_EP_ROLLED
  for (int n = 0; n < count; ++n) {
    std::byte* base = m.base[j][n];
    std::byte* to = base + first * 16;
    MARROW_EP_UNROLLED
    for (int t = 0; t < kQuadsTogether; ++t) {
      MARROW_EP_UNROLLED
      for (int c = 0; c < kCellsPerLane; ++c) {
        const int ahead = t * kQuadCells + c * kQuadLanes;
        if (ahead < room) store_cell(to + ahead * 16, cell[t][c]);
      }
    }
    if (has_extra) store_cell(base + at_extra, extra);
  }
}

/// Rows of this rank's tokens. Blocks 0 .. blocks-1. @param choice, in  what was loaded before
template <bool kFp8>
MARROW_DEVICE void send_rows(const Run& r, const DispatchArgs& a, int block, int blocks,
                             FirstChoice choice, QuadInput (&in)[kPiece]) {
  const Shape& s = r.s;
  Targets& m = *dynamic_shared<Targets>(kNumbersBytes);
  const std::int32_t tokens = tokens_of(s, a);
  const int lane = thread_index() % kQuadLanes;
  for (int from = 0;; from += kTokensAtOnce) {
    const Round round{block, blocks, from, tokens};
    if (!round.has(0)) return;
    Walk walk = walk_of_block(s);
    if (from > 0) {
      meet();  // the last round's rows are sent
      load_piece<kFp8>(s, a, round, walk, lane, in);
    }
    find_targets(r, a, m, round, choice);
    note(Point::targets_found);
    MARROW_EP_ROLLED
    while (round.has(walk.number)) {
      const int quad = walk.quad * kPiece;
      // The kernel runs through its code about once, so its size is time: no copy of it for each of them. Two at a time, since
      // a warp alone waits for each instruction.
      MARROW_EP_ROLLED
      for (int u = 0; u < kPiece && quad + u < s.quads; u += kQuadsTogether) {
        Cell16 cell[kQuadsTogether][kCellsPerLane];
        Cell16 extra{};
        MARROW_EP_UNROLLED
        for (int t = 0; t < kQuadsTogether; ++t) {
          QuadInput mine;
          Cell16 of_quad;
          pick<kQuadsTogether>(mine, in, u, t);
          make_quad<kFp8>(s, mine, quad + u + t, lane, r.epoch, cell[t], &of_quad);
          if (t == 0 || lane == t) extra = of_quad;
        }
        store_quads(s, m, walk.number, quad + u, lane, cell, extra);
      }
      walk.next();
      load_piece<kFp8>(s, a, round, walk, lane, in);
    }
  }
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
