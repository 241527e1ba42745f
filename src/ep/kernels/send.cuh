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
    constexpr int kGroupLanes = kOnGpu ? 8 : 1;  // 8 cells of 16 channels are a group
    constexpr int kGroups = kOnGpu ? 1 : 4;      // groups of one lane
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
    if constexpr (kOnGpu) {
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
      if constexpr (kOnGpu) {
        bits = warp_ballot(0xffffffffu, bit != 0);
      } else {
        bits |= bit << j;
      }
      v.word[3] &= ~1u;
      cell[j] = cell_of(v);
    }
    *extra = epoch_cell(bits, 0, 0, epoch);
  }
}

/// Which choices of 16 tokens count, and where their rows go. Writes the handle's own part.
MARROW_DEVICE void choose(const Run& r, const DispatchArgs& a, SendMemory& m, int block, int blocks,
                          int from, int count) {
  const Shape& s = r.s;
  const int K = s.top_k;
  for (int i = thread_index(); i < count * K; i += block_size()) {
    const int j = i / K;
    const int k = i % K;
    const std::int64_t id = a.ids[static_cast<std::uint64_t>(block + (from + j) * blocks) * K + k];
    const bool good = id >= 0 && id < s.experts;
    m.raw[j][k] = good ? static_cast<std::int32_t>(id) : -1;
    if (!good && id != -1) add_relaxed<Scope::device>(&r.control()->out_of_range, 1);
    if (k == 0) m.distinct[j] = m.staged[j] = 0;
  }
  block_sync();
  for (int i = thread_index(); i < count * K; i += block_size()) {
    const int j = i / K;
    const int k = i % K;
    const std::int32_t id = m.raw[j][k];
    bool repeats = false;
    for (int other = 0; other < k; ++other) repeats |= m.raw[j][other] == id;
    const bool counts = id >= 0 && !repeats;
    if (id >= 0 && repeats) add_relaxed<Scope::device>(&r.control()->duplicates, 1);
    m.id[j][k] = counts ? id : -1;
    m.rank[j][k] = counts ? rank_of_expert(s, r.local, id) : -1;
    float weight = 0;  // that of an ignored choice is not even read
    if (counts)
      weight = a.weights
                   ? a.weights[static_cast<std::uint64_t>(block + (from + j) * blocks) * K + k]
                   : 1.0f;
    m.weight[j][k] = weight;
  }
  block_sync();
  for (int i = thread_index(); i < count * K; i += block_size()) {
    const int j = i / K;
    const int k = i % K;
    const std::int32_t rank = m.rank[j][k];
    bool first = rank >= 0;
    for (int other = 0; other < k; ++other) first &= m.rank[j][other] != rank;
    m.first[j][k] = first;
  }
  block_sync();
  auto* own_rank = r.table<std::int16_t>(s.own_rank);
  auto* own_sorted = r.table<std::int16_t>(s.own_sorted);
  auto* own_weights = r.table<float>(s.own_weights);
  for (int i = thread_index(); i < count * K; i += block_size()) {
    const int j = i / K;
    const int k = i % K;
    const int token = block + (from + j) * blocks;
    const std::int32_t rank = m.rank[j][k];
    const std::uint64_t mine = static_cast<std::uint64_t>(token) * K + k;
    own_rank[mine] = static_cast<std::int16_t>(rank);
    own_weights[mine] = m.weight[j][k];
    if (!m.first[j][k]) continue;
    int ordinal = 0;
    for (int other = 0; other < K; ++other) ordinal += m.first[j][other] && m.rank[j][other] < rank;
    own_sorted[static_cast<std::uint64_t>(token) * K + ordinal] = static_cast<std::int16_t>(rank);
    std::byte* base = nullptr;
    if (r.is_failed(rank)) {
      // Nothing goes there.
    } else if (s.is_far(rank)) {
      store_relaxed<Scope::block>(&m.staged[j], 1u);
    } else {
      base = r.peer(rank) + s.row_at(r.set, s.rank, token);
    }
    m.base[j][ordinal] = base;
    (void)fetch_add_relaxed<Scope::block>(&m.distinct[j], 1u);
  }
  block_sync();
  auto* own_distinct = r.table<std::int32_t>(s.own_distinct);
  for (int j = thread_index(); j < count; j += block_size())
    own_distinct[block + (from + j) * blocks] = static_cast<std::int32_t>(m.distinct[j]);
}

/// The cells of 16 tokens' lists, to every rank: ids before weights.
MARROW_DEVICE void send_lists(const Run& r, SendMemory& m, int block, int blocks, int from,
                              int count) {
  const Shape& s = r.s;
  const int cells = s.id_cells + s.weight_cells;
  const int total = count * s.ranks * cells;
  for (int i = thread_index(); i < total; i += block_size()) {
    const int j = i % count;
    const int step = i / count / cells;
    const int c = i / count % cells;
    // Everybody starts at another peer.
    int peer = s.rank + 1 + step;
    if (peer >= s.ranks) peer -= s.ranks;
    const int token = block + (from + j) * blocks;
    Cell16 cell;
    std::uint64_t offset = 16;
    if (c < s.id_cells) {
      std::uint32_t half[kIdsPerCell];
      for (int x = 0; x < kIdsPerCell; ++x) {
        const int k = c * kIdsPerCell + x;
        half[x] = static_cast<std::uint16_t>(k < s.top_k ? m.id[j][k] : -1);
      }
      cell = epoch_cell(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                        r.epoch);
      offset += (static_cast<std::uint64_t>(token) * s.id_cells + c) * 16;
    } else {
      std::uint32_t word[kWeightsPerCell];
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

/// Everything of dispatch's sending side. Blocks 0 .. blocks-1.
template <bool kFp8>
MARROW_DEVICE void send_dispatch(const Run& r, const DispatchArgs& a, int block, int blocks) {
  const Shape& s = r.s;
  SendMemory& m = *dynamic_shared<SendMemory>();
  std::byte* local = r.local;
  std::int32_t tokens = a.device_tokens ? load_cached(a.device_tokens) : a.tokens;
  std::uint32_t flags = 0;
  if (tokens < 0 || tokens > s.tokens) {
    tokens = 0;
    flags = 1;
    r.note(Status::invalid);
  }
  if (block == 0) {
    for (int i = thread_index(); i < s.ranks; i += block_size()) {
      const int peer = (s.rank + 1 + i) % s.ranks;
      const Cell16 head = epoch_cell(static_cast<std::uint32_t>(tokens), flags, 0, r.epoch);
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
    // The first row is on its way while the lists are worked out.
    if (worker < items)
      load_quad<kFp8>(s, a, block + (from + worker / s.quads) * blocks, worker % s.quads, lane,
                      &next);
    block_sync();  // the last round's rows are sent
    choose(r, a, m, block, blocks, from, count);
    send_lists(r, m, block, blocks, from, count);
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
