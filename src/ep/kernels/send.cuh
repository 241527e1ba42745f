// SPDX-License-Identifier: Apache-2.0
// Sending side of dispatch. A block takes tokens b, b + blocks, ...; for 16 of them at a time its threads first agree in
// shared memory which choices count and where each row goes, send that to every rank (receivers place rows by it, so it
// goes first), and then carry the rows: each quad is read, quantised and stored once per destination rank.
#pragma once

#include "ep/kernels/common.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Shared memory of a sending block.
struct SendMemory {
  std::byte* base[kTokensAtOnce][kMaxTopK];  ///< row slot at each destination; null: skip
  float weight[kTokensAtOnce][kMaxTopK];
  std::int32_t raw[kTokensAtOnce][kMaxTopK];    ///< id, or -1
  std::int32_t id[kTokensAtOnce][kMaxTopK];     ///< the same without repetitions
  std::int32_t rank[kTokensAtOnce][kMaxTopK];   ///< -1: no choice
  std::int32_t first[kTokensAtOnce][kMaxTopK];  ///< 1: no earlier choice has that rank
  std::uint32_t distinct[kTokensAtOnce];
  std::uint32_t staged[kTokensAtOnce];  ///< some destination is reached by puts
};

/// What one lane reads of a quad.
struct QuadInput {
  Words16 word[2][kCellsPerLane];
};

template <bool kFp8>
MARROW_DEVICE void load_quad(const Shape& s, const DispatchArgs& a, int token, int quad, int lane,
                             QuadInput* in) {
  const std::byte* row = a.rows + static_cast<std::uint64_t>(token) * s.input_row_bytes;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int j = 0; j < kCellsPerLane; ++j) {
    const int cell = quad * kQuadCells + j * kQuadLanes + lane;
    in->word[0][j] = {};
    if constexpr (kFp8) {
      in->word[1][j] = {};
      if (cell >= s.data_cells) continue;
      in->word[0][j] = load_words(row + static_cast<std::uint64_t>(cell) * 32);
      in->word[1][j] = load_words(row + static_cast<std::uint64_t>(cell) * 32 + 16);
    } else if (cell < s.row_cells) {
      in->word[0][j] = load_words(row + static_cast<std::uint64_t>(cell) * 16);
    } else if (cell < s.data_cells) {
      const std::uint32_t from = static_cast<std::uint32_t>(cell - s.row_cells) * 16;
      const auto* words = reinterpret_cast<const std::uint32_t*>(
          a.scales + static_cast<std::uint64_t>(token) * s.scale_bytes + from);
      MARROW_EP_ROLLED
      for (std::uint32_t i = 0; i < 4 && from + i * 4 < s.scale_bytes; ++i)
        in->word[0][j].word[i] = load_cached(words + i);
    }
  }
}

MARROW_DEVICE std::uint32_t largest_of(const Words16& v) {
  std::uint32_t largest = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    largest = larger_size(largest, size_of_bf16(v.word[i]));
    largest = larger_size(largest, size_of_bf16(v.word[i] >> 16));
  }
  return largest;
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
        largest = larger_size(largest, largest_of(in.word[0][j]));
        largest = larger_size(largest, largest_of(in.word[1][j]));
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

/// What a thread loads before it knows the batch's number: of its warp's first token, and of its first quad.
struct First {
  std::int64_t id = -1;
  float weight = 0;
  QuadInput input;
};

/// The batch's tokens of this rank; -1: out of range.
MARROW_DEVICE std::int32_t tokens_of(const Shape& s, const DispatchArgs& a) {
  const std::int32_t tokens = a.device_tokens ? load_cached(a.device_tokens) : a.tokens;
  return tokens >= 0 && tokens <= s.tokens ? tokens : -1;
}

MARROW_DEVICE float weight_of(const DispatchArgs& a, std::uint64_t choice) {
  return a.weights ? a.weights[choice] : 1.0f;
}

template <bool kFp8>
MARROW_DEVICE void load_first(const Shape& s, const DispatchArgs& a, int block, int blocks,
                              First* first) {
  const std::int32_t tokens = tokens_of(s, a);
  const int token = block + thread_index() / warp_lanes() * blocks;
  if (thread_index() / warp_lanes() < kTokensAtOnce && token < tokens && lane_index() < s.top_k) {
    const std::uint64_t choice = static_cast<std::uint64_t>(token) * s.top_k + lane_index();
    first->id = a.ids[choice];
    first->weight = weight_of(a, choice);
  }
  const int mine = tokens > block ? (tokens - block + blocks - 1) / blocks : 0;
  const int count = mine < kTokensAtOnce ? mine : kTokensAtOnce;
  const int worker = thread_index() / kQuadLanes;
  if (worker < count * s.quads)
    load_quad<kFp8>(s, a, block + worker / s.quads * blocks, worker % s.quads,
                    thread_index() % kQuadLanes, &first->input);
}

/// One token's list to every rank, by a warp: ids before weights.
MARROW_DEVICE void send_list(const Run& r, const SendMemory& m, int j, int token) {
  const Shape& s = r.s;
  const int cells = s.id_cells + s.weight_cells;
  MARROW_EP_ROLLED
  for (int i = lane_index(); i < s.ranks * cells; i += count_lanes(full_mask())) {
    const int c = i / s.ranks;
    // Everybody starts at another peer.
    int peer = s.rank + 1 + i - c * s.ranks;
    if (peer >= s.ranks) peer -= s.ranks;
    Cell16 cell;
    std::uint64_t offset = 16;
    if (c < s.id_cells) {
      std::uint32_t half[kIdsPerCell];
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int x = 0; x < kIdsPerCell; ++x) {
        const int k = c * kIdsPerCell + x;
        half[x] = static_cast<std::uint16_t>(k < s.top_k ? m.id[j][k] : -1);
      }
      cell = epoch_cell(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                        r.epoch);
      offset += (static_cast<std::uint64_t>(token) * s.id_cells + c) * 16;
    } else {
      std::uint32_t word[kWeightsPerCell];
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int x = 0; x < kWeightsPerCell; ++x) {
        const int k = (c - s.id_cells) * kWeightsPerCell + x;
        word[x] = k < s.top_k ? bits_of(m.weight[j][k]) : 0;
      }
      cell = epoch_cell(word[0], word[1], word[2], r.epoch);
      offset += (static_cast<std::uint64_t>(s.tokens) * s.id_cells +
                 static_cast<std::uint64_t>(token) * s.weight_cells + (c - s.id_cells)) *
                16;
    }
    if (s.is_far(peer)) {
      store_cell(
          r.local + s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride + offset,
          cell);
    } else if (!r.is_failed(peer)) {
      store_cell(r.peer(peer) + s.meta_at(r.set, s.rank) + offset, cell);
    }
  }
}

/// Which choices of 16 tokens count, and where their rows go; a warp takes a token. Sends their lists, and writes the
/// handle's own part.
MARROW_DEVICE void choose(const Run& r, const DispatchArgs& a, SendMemory& m, int block, int blocks,
                          int from, int count, const First& ahead) {
  const Shape& s = r.s;
  const int K = s.top_k;
  const int warps = (block_size() + warp_lanes() - 1) / warp_lanes();
  const std::uint32_t all = full_mask();
  const int lanes = count_lanes(all);  // of this warp: a block's last one may have fewer
  MARROW_EP_ROLLED
  for (int j = thread_index() / warp_lanes(); j < count; j += warps) {
    const int token = block + (from + j) * blocks;
    const std::uint64_t first_choice = static_cast<std::uint64_t>(token) * K;
    const bool loaded = from == 0 && j < warps;
    MARROW_EP_ROLLED
    for (int k = lane_index(); k < K; k += lanes) {
      const bool here = loaded && k == lane_index();
      const std::int64_t id = here ? ahead.id : a.ids[first_choice + k];
      const bool good = id >= 0 && id < s.experts;
      m.raw[j][k] = good ? static_cast<std::int32_t>(id) : -1;
      m.weight[j][k] = here ? ahead.weight : weight_of(a, first_choice + k);
      if (!good && id != -1) add_relaxed<Scope::device>(&r.control()->out_of_range, 1);
      if (k == 0) m.distinct[j] = m.staged[j] = 0;
    }
    warp_sync(all);
    MARROW_EP_ROLLED
    for (int k = lane_index(); k < K; k += lanes) {
      const std::int32_t id = m.raw[j][k];
      bool repeats = false;
      MARROW_EP_ROLLED
      for (int other = 0; other < k; ++other) repeats |= m.raw[j][other] == id;
      const bool counts = id >= 0 && !repeats;
      if (id >= 0 && repeats) add_relaxed<Scope::device>(&r.control()->duplicates, 1);
      m.id[j][k] = counts ? id : -1;
      m.rank[j][k] = counts ? rank_of_expert(s, r.local, id) : -1;
      if (!counts) m.weight[j][k] = 0;
    }
    warp_sync(all);
    send_list(r, m, j, token);
    MARROW_EP_ROLLED
    for (int k = lane_index(); k < K; k += lanes) {
      const std::int32_t rank = m.rank[j][k];
      bool first = rank >= 0;
      MARROW_EP_ROLLED
      for (int other = 0; other < k; ++other) first &= m.rank[j][other] != rank;
      m.first[j][k] = first;
    }
    warp_sync(all);
    MARROW_EP_ROLLED
    for (int k = lane_index(); k < K; k += lanes) {
      const std::int32_t rank = m.rank[j][k];
      r.table<std::int16_t>(s.own_rank)[first_choice + k] = static_cast<std::int16_t>(rank);
      r.table<float>(s.own_weights)[first_choice + k] = m.weight[j][k];
      if (!m.first[j][k]) continue;
      int ordinal = 0;
      MARROW_EP_ROLLED
      for (int other = 0; other < K; ++other)
        ordinal += m.first[j][other] && m.rank[j][other] < rank;
      r.table<std::int16_t>(s.own_sorted)[first_choice + ordinal] = static_cast<std::int16_t>(rank);
      std::byte* base = nullptr;
      if (r.is_failed(rank)) {
        // Nothing goes there.
      } else if (s.is_far(rank)) {
        store_relaxed<Scope::block>(&m.staged[j], 1u);
      } else {
        base = r.peer(rank) + s.row_at(r.set, s.rank, token);
      }
      m.base[j][ordinal] = base;
      add_shared(&m.distinct[j], 1u);
    }
    warp_sync(all);
    if (lane_index() == 0)
      r.table<std::int32_t>(s.own_distinct)[token] = static_cast<std::int32_t>(m.distinct[j]);
  }
  meet();
}

/// Everything of dispatch's sending side. Blocks 0 .. blocks-1.
template <bool kFp8>
MARROW_DEVICE void send_dispatch(const Run& r, const DispatchArgs& a, int block, int blocks,
                                 const First& ahead) {
  const Shape& s = r.s;
  SendMemory& m = *dynamic_shared<SendMemory>();
  std::byte* local = r.local;
  std::int32_t tokens = tokens_of(s, a);
  const std::uint32_t flags = tokens < 0;
  if (tokens < 0) {
    tokens = 0;
    r.note(Status::invalid);
  }
  if (block == 0) {
    for (int i = thread_index(); i < s.ranks; i += block_size()) {
      const int peer = (s.rank + 1 + i) % s.ranks;
      const Cell16 head = epoch_cell(flags, 0, static_cast<std::uint32_t>(tokens), r.epoch);
      if (s.is_far(peer)) {
        store_cell(local + s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride, head);
      } else if (!r.is_failed(peer)) {
        store_cell(r.peer(peer) + s.meta_at(r.set, s.rank), head);
      }
    }
    if (thread_index() == 0) r.table<HandleHead>(0)->tokens = tokens;
  }
  const int mine = tokens > block ? (tokens - block + blocks - 1) / blocks : 0;
  const int worker = thread_index() / kQuadLanes;
  const int workers = block_size() / kQuadLanes;
  const int lane = thread_index() % kQuadLanes;
  for (int from = 0; from < mine; from += kTokensAtOnce) {
    const int count = mine - from < kTokensAtOnce ? mine - from : kTokensAtOnce;
    const int items = count * s.quads;
    QuadInput next;
    if (from == 0) {
      next = ahead.input;
    } else if (worker < items) {
      // The first row is on its way while the lists are worked out.
      load_quad<kFp8>(s, a, block + (from + worker / s.quads) * blocks, worker % s.quads, lane,
                      &next);
    }
    if (from > 0) meet();  // the last round's rows are sent
    choose(r, a, m, block, blocks, from, count, ahead);
    for (int item = worker; item < items; item += workers) {
      const int j = item / s.quads;
      const int quad = item % s.quads;
      const int token = block + (from + j) * blocks;
      const QuadInput in = next;
      const int after = item + workers;
      if (after < items)
        load_quad<kFp8>(s, a, block + (from + after / s.quads) * blocks, after % s.quads, lane,
                        &next);
      Cell16 cell[kCellsPerLane];
      Cell16 extra;
      make_quad<kFp8>(s, in, quad, lane, r.epoch, cell, &extra);
      const int distinct = static_cast<int>(m.distinct[j]);
      const bool staged = s.far_any && m.staged[j] != 0;
      int d = distinct > 1 ? (s.rank + 1 + token) % distinct : 0;
      MARROW_EP_ROLLED
      for (int n = 0; n < distinct + (staged ? 1 : 0); ++n) {
        std::byte* base;
        if (n == distinct) {
          base = local + s.stage_rows +
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

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
