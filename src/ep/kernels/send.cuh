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

/// Lanes past the row's end read its last cell again: they send nothing, and no group's largest value changes.
template <bool kFp8>
MARROW_DEVICE void load_quad(const Shape& s, const DispatchArgs& a, int token, int quad, int lane,
                             QuadInput* in) {
  const std::byte* row =
      a.rows + static_cast<std::uint64_t>(static_cast<unsigned>(token)) * s.input_row_bytes;
#if defined(__CUDACC__)
#pragma unroll
#endif
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
      MARROW_EP_ROLLED
      for (std::uint32_t i = 0; i < 4 && from + i * 4 < s.scale_bytes; ++i)
        in->word[0][j].word[i] = load_cached(words + i);
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
#if defined(__CUDACC__)
#pragma unroll
#endif
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

/// The lane's cells and the quad's extra cell (valid in lane 0). All lanes of the warp call.
template <bool kFp8>
MARROW_DEVICE void make_quad(const Shape& s, const QuadInput& in, int quad, int lane,
                             std::uint32_t epoch, Cell16* cell, Cell16* extra) {
  if constexpr (kFp8) {
    constexpr int kGroupLanes = kWarpQuads ? 8 : 1;  // 8 cells of 16 channels are a group
    constexpr int kGroups = kWarpQuads ? 1 : 4;      // groups of one lane
    constexpr int kCells = kCellsPerLane / kGroups;
    std::uint32_t scale[4] = {};
#if defined(__CUDACC__)
#pragma unroll
#endif
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
      scale[g] = bits_of(q.scale);
    }
    if constexpr (kWarpQuads) {
      const std::uint32_t mine = scale[0];
      for (int g = 0; g < 4; ++g) scale[g] = warp_shuffle(0xffffffffu, mine, g * 8);
    }
    for (int g = 0; g < 4; ++g)
      if ((quad * 4 + g) * 128 >= s.hidden) scale[g] = 0;
    *extra = cell_of(Words16{{scale[0], scale[1], scale[2], scale[3]}});
  } else {
    std::uint32_t bits = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
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

/// Quads that a worker reads at once.
inline constexpr int kQuadsAtOnce = kWarpQuads ? 4 : 1;

/// A worker's quads of one round: `count` tokens, block + from * blocks and so on.
struct Round {
  int block, blocks, from, count;
  MARROW_DEVICE int token(int j) const { return block + (from + j) * blocks; }
};
MARROW_DEVICE Round round_of(int block, int blocks, int from, int tokens) {
  const int mine = tokens > block ? (tokens - block + blocks - 1) / blocks : 0;
  const int left = mine - from;
  return {block, blocks, from, left < kTokensAtOnce ? left : kTokensAtOnce};
}

template <bool kFp8>
MARROW_DEVICE void load_quads(const Shape& s, const DispatchArgs& a, const Round& round, Walk walk,
                              int lane, QuadInput (&in)[kQuadsAtOnce]) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int u = 0; u < kQuadsAtOnce; ++u) {
    if (walk.number < round.count)
      load_quad<kFp8>(s, a, round.token(walk.number), walk.quad, lane, &in[u]);
    walk.next();
  }
}

/// Where the rows of a round's tokens go.
struct Targets {
  std::byte* base[kTokensAtOnce][kMaxTopK];  ///< row slot at each destination; null: skip
  std::int32_t count[kTokensAtOnce];         ///< of destinations
  std::int32_t staged[kTokensAtOnce];        ///< some destination is reached by puts
};

/// A warp takes a token.
MARROW_DEVICE void find_targets(const Run& r, const DispatchArgs& a, Targets& m, const Round& round,
                                FirstChoice ahead) {
  const Shape& s = r.s;
  const int warps = (block_size() + warp_lanes() - 1) / warp_lanes();
  MARROW_EP_ROLLED
  for (int j = thread_index() / warp_lanes(); j < round.count; j += warps) {
    if (!kWarpQuads && lane_index() != 0) continue;
    const int token = round.token(j);
    Choices choices;
    take_choices(s, a, token, ahead, round.from == 0 && j < warps, choices);
    find_ranks(r, choices);
    std::uint32_t staged = 0;
    choices.each(s, [&](int, int i) {
      if (!choices.first[i]) return;
      std::byte* base = nullptr;
      const int rank = choices.rank[i];
      if (r.is_failed(rank)) {
        // Nothing goes there.
      } else if (s.is_far(rank)) {
        staged = 1;
      } else {
        base = r.peer(rank) + s.row_at(r.set, s.rank, token);
      }
      m.base[j][choices.ordinal[i]] = base;
    });
    if constexpr (kWarpQuads) {
      if (s.far_any) staged = warp_or(staged);
    }
    if (lane_index() != 0) continue;
    m.count[j] = choices.ranks;
    m.staged[j] = static_cast<std::int32_t>(staged);
  }
  meet();
}

/// A worker's first quads.
template <bool kFp8>
MARROW_DEVICE void load_first_quads(const Shape& s, const DispatchArgs& a, int tokens, int block,
                                    int blocks, QuadInput (&in)[kQuadsAtOnce]) {
  load_quads<kFp8>(
      s, a, round_of(block, blocks, 0, tokens),
      Walk(thread_index() / kQuadLanes, block_size() / kQuadLanes, s.quads, s.by_quads),
      thread_index() % kQuadLanes, in);
}

/// Rows of this rank's tokens. Blocks 0 .. blocks-1. @param choice, in  what was loaded before
template <bool kFp8>
MARROW_DEVICE void send_rows(const Run& r, const DispatchArgs& a, int block, int blocks,
                             FirstChoice choice, QuadInput (&in)[kQuadsAtOnce]) {
  const Shape& s = r.s;
  Targets& m = *dynamic_shared<Targets>(kNumbersBytes);
  const std::int32_t tokens = tokens_of(s, a);
  const int lane = thread_index() % kQuadLanes;
  for (int from = 0;; from += kTokensAtOnce) {
    const Round round = round_of(block, blocks, from, tokens);
    if (round.count <= 0) return;
    Walk walk(thread_index() / kQuadLanes, block_size() / kQuadLanes, s.quads, s.by_quads);
    if (from > 0) {
      meet();  // the last round's rows are sent
      load_quads<kFp8>(s, a, round, walk, lane, in);
    }
    find_targets(r, a, m, round, choice);
    note(Point::targets_found);
    for (bool first = true; walk.number < round.count; first = false) {
      if (!first) load_quads<kFp8>(s, a, round, walk, lane, in);
      // One copy of the code for all of them: the kernel runs through it about once, so its size is time.
      MARROW_EP_ROLLED
      for (int u = 0; u < kQuadsAtOnce; ++u, walk.next()) {
        const int j = walk.number;
        if (j >= round.count) break;
        const int quad = walk.quad;
        QuadInput mine;
        pick(mine, in, u);
        Cell16 cell[kCellsPerLane];
        Cell16 extra;
        make_quad<kFp8>(s, mine, quad, lane, r.epoch, cell, &extra);
        const int token = round.token(j);
        const int distinct = m.count[j];
        const bool staged = s.far_any && m.staged[j] != 0;
        int d = distinct > 1 ? (s.rank + 1 + token) % distinct : 0;
        MARROW_EP_ROLLED
        for (int n = 0; n < distinct + (staged ? 1 : 0); ++n) {
          std::byte* base;
          if (n == distinct) {
            base = r.local + s.stage_rows +
                   (static_cast<std::uint64_t>(r.set) * s.tokens + token) * s.row_stride;
          } else {
            base = m.base[j][d];
            if (++d == distinct) d = 0;
          }
          if (!base) continue;
#if defined(__CUDACC__)
#pragma unroll
#endif
          for (int c = 0; c < kCellsPerLane; ++c) {
            const int index = quad * kQuadCells + c * kQuadLanes + lane;
            if (index < s.data_cells)
              store_cell(base + static_cast<std::uint64_t>(index) * 16, cell[c]);
          }
          if (lane == 0)
            store_cell(base + static_cast<std::uint64_t>(s.data_cells + quad) * 16, extra);
        }
      }
    }
  }
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
