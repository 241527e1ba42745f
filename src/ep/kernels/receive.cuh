// SPDX-License-Identifier: Apache-2.0
// Receiving side of dispatch. Every block learns from the lists that arrive first which tokens chose which of our experts
// (a bit each in shared memory), so that it can tell the place of any row: the number of bits before its own. Then its
// workers take quads as they arrive, all outstanding ones of a thread being looked at in each turn, and write each to
// the rows it belongs to. Sizes that do not fit into shared memory are placed by a kernel of their own (place.cuh).
#pragma once

#include "ep/kernels/send.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

inline constexpr int kMaxIdCells = (kMaxTopK + kIdsPerCell - 1) / kIdsPerCell;

/// One token's list, from its id cells.
struct List {
  Cell16 cell[kMaxIdCells];
  std::int32_t tokens = 0;  ///< that the source has; the list is valid below it
  MARROW_DEVICE int id(int k) const {
    const std::uint32_t word = word_of(cell[k / kIdsPerCell], k % kIdsPerCell / 2);
    return static_cast<std::int16_t>(word >> (k % 2 * 16));
  }
};

/// One look. @return whether the list is complete, or the source has fewer tokens
MARROW_DEVICE bool look_at_list(const Shape& s, const std::byte* meta, int token,
                                std::uint32_t epoch, List* list) {
  const Cell16 head = load_cell(meta);
  const std::byte* ids = meta + 16 + static_cast<std::uint64_t>(token) * s.id_cells * 16;
  bool here = true;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int c = 0; c < kMaxIdCells; ++c) {
    if (c < s.id_cells) {
      list->cell[c] = load_cell(ids + c * 16);
      here &= mark_of(list->cell[c]) == epoch;
    }
  }
  if (mark_of(head) != epoch) return false;
  list->tokens = static_cast<std::int32_t>(word_of(head, 2));
  return here || token >= list->tokens;
}

/// The weight of a choice, waited for; 0 if it does not come: its source is given up then.
MARROW_DEVICE float wait_for_weight(const Run& r, int source, int token, int k) {
  const Shape& s = r.s;
  const std::byte* at_cell = r.local + s.meta_at(r.set, source) + 16 +
                             (static_cast<std::uint64_t>(s.tokens) * s.id_cells +
                              static_cast<std::uint64_t>(token) * s.weight_cells +
                              static_cast<unsigned>(k / kWeightsPerCell)) *
                                 16;
  float weight = 0;
  const auto look = [&] {
    const Cell16 cell = load_cell(at_cell);
    const int x = k % kWeightsPerCell;
    weight = float_of(x == 0 ? word_of(cell, 0) : x == 1 ? word_of(cell, 1) : word_of(cell, 2));
    return mark_of(cell) == r.epoch;
  };
  if (look()) return weight;
  const Status status = wait_until(r.comm, r.time_left(), look);
  if (status == Status::ok) return weight;
  r.set_failed(source, status);
  return 0.0f;
}

/// What a block knows about rows: in its shared memory, or in the handle's records.
struct Placed {
  std::uint32_t* masks;
  std::uint32_t* prefixes;
  std::int16_t* ids;
  std::uint32_t* list;
  int entries;
};

/// Number of the row in its column. word: of the source's first mask word.
MARROW_DEVICE int row_in_column(const Shape& s, const Placed& p, int column, int source,
                                int token) {
  const int word = column * s.ranks * s.mask_words + source * s.mask_words + token / 32;
  return static_cast<int>(p.prefixes[word]) +
         count_lanes(p.masks[word] & ((1u << (token % 32)) - 1));
}

/// The k-th candidate for an output row of the slot; -1: none, or it did not fit.
MARROW_DEVICE std::int32_t row_of(const Run& r, const Placed& p, int slot, int k) {
  const Shape& s = r.s;
  if (!s.place_in_block) {
    const std::byte* record = record_at(r, 0, slot);
    return k < reinterpret_cast<const Record*>(record)->count
               ? reinterpret_cast<const std::int32_t*>(record + sizeof(Record))[k]
               : -1;
  }
  const int source = slot / s.tokens;
  const int token = slot - source * s.tokens;
  if (s.rank_major) {
    const int first = static_cast<int>(p.prefixes[source * s.mask_words]);
    return k == 0 ? source * s.tokens + row_in_column(s, p, 0, source, token) - first : -1;
  }
  const int column = p.ids[slot * s.top_k + k] - s.first;
  if (static_cast<unsigned>(column) >= static_cast<unsigned>(s.local)) return -1;
  const int row = row_in_column(s, p, column, source, token);
  return row < s.capacity ? column * s.capacity + row : -1;
}

/// Writes the slot's output rows to `rows`. All lanes of a worker call. @return how many there are
MARROW_DEVICE int find_rows(const Run& r, const Placed& p, int slot, int lane, std::int32_t* rows) {
  if constexpr (kWarpQuads) {
    const std::int32_t row = lane < r.s.top_k && slot >= 0 ? row_of(r, p, slot, lane) : -1;
    const std::uint32_t found = warp_ballot(0xffffffffu, row >= 0);
    if (row >= 0) rows[count_lanes(found & ((1u << lane) - 1))] = row;
    return count_lanes(found);
  } else {
    int count = 0;
    for (int k = 0; slot >= 0 && k < r.s.top_k; ++k) {
      const std::int32_t row = row_of(r, p, slot, k);
      if (row >= 0) rows[count++] = row;
    }
    return count;
  }
}

/// Whether choice k is the first one of a rank below ours: those count up to our ordinal.
MARROW_DEVICE bool first_of_lower_rank(const Run& r, int k, const auto& id_of) {
  const Shape& s = r.s;
  const int id = id_of(k);
  if (id < 0 || id >= s.first) return false;
  const int rank = rank_of_expert(s, r.local, id);
  MARROW_EP_ROLLED
  for (int other = 0; other < k; ++other) {
    const int earlier = id_of(other);
    if (earlier >= 0 && rank_of_expert(s, r.local, earlier) == rank) return false;
  }
  return true;
}

/// Choice k of an entry (a token that reached us) in the handle's tables; k == 0 writes what is the entry's own.
/// @param rank_major_row  its row, or -1 in expert-major
/// @param place           place(column) gives {row in the expert, number of the pair or -1}
MARROW_DEVICE void write_choice(const Run& r, int entry, int slot, int k, int rank_major_row,
                                const auto& id_of, const auto& place) {
  const Shape& s = r.s;
  const int source = slot / s.tokens;
  const int token = slot - source * s.tokens;
  const auto ours = [&](int choice) {
    return static_cast<unsigned>(id_of(choice) - s.first) < static_cast<unsigned>(s.local);
  };
  std::byte* bytes = record_at(r, entry, slot);
  auto* rows = reinterpret_cast<std::int32_t*>(bytes + sizeof(Record));
  const bool mine = ours(k);
  float weight = 0;
  if (mine) weight = wait_for_weight(r, source, token, k);
  const int column = id_of(k) - s.first;
  if (s.rank_major) {
    const std::uint64_t at_choice = static_cast<std::uint64_t>(rank_major_row) * s.top_k + k;
    r.table<std::int32_t>(s.expert_ids)[at_choice] = mine ? column : -1;
    r.table<float>(s.weights)[at_choice] = weight;
  } else if (mine) {
    int order = 0;  // among our experts
    MARROW_EP_ROLLED
    for (int other = 0; other < k; ++other) order += ours(other);
    const auto [row, pair] = place(column);
    const std::int64_t out =
        row < s.capacity ? static_cast<std::int64_t>(column) * s.capacity + row : -1;
    rows[order] = static_cast<std::int32_t>(out);
    reinterpret_cast<float*>(rows + s.record_rows)[order] = weight;
    if (pair >= 0) r.table<Pair>(s.pairs)[pair] = Pair{slot, k, out};
    if (out >= 0) {
      r.table<std::int32_t>(s.source)[out] = slot;
      r.table<float>(s.weights)[out] = weight;
    }
  }
  if (k != 0) return;
  int count = 0;
  int ordinal = 0;
  MARROW_EP_ROLLED
  for (int other = 0; other < s.top_k; ++other) {
    count += ours(other);
    ordinal += first_of_lower_rank(r, other, id_of);
  }
  if (s.rank_major) {
    rows[0] = rank_major_row;
    count = 1;
    r.table<std::int32_t>(s.source)[rank_major_row] = slot;
  }
  *reinterpret_cast<Record*>(bytes) = {
      static_cast<std::int16_t>(count), static_cast<std::int16_t>(ordinal), slot, {}};
}

/// Fills the masks from the lists of all sources, and what follows from them.
MARROW_DEVICE Placed place_in_block(const Run& r, int block, int blocks) {
  const Shape& s = r.s;
  const PlaceMemory m = place_memory(s, block_size() / kQuadLanes);
  const int slots = s.rows_per_batch();
  const int words = s.ranks * s.mask_words;
  const int columns = columns_of(s);
  const int any_count = any_words(s);
  std::uint32_t* any = dynamic_shared<std::uint32_t>(m.any);
  std::uint32_t* any_prefix = dynamic_shared<std::uint32_t>(m.any_prefix);
  std::uint32_t* counts = dynamic_shared<std::uint32_t>(m.counts);
  const Placed p{dynamic_shared<std::uint32_t>(m.masks), dynamic_shared<std::uint32_t>(m.prefixes),
                 dynamic_shared<std::int16_t>(m.ids), dynamic_shared<std::uint32_t>(m.list), 0};
  for (int i = thread_index(); i < static_cast<int>((m.prefixes - m.masks) / 4); i += block_size())
    p.masks[i] = 0;  // masks and any
  meet();
  std::uint64_t since = now_ns();  // before, others were waited for
  MARROW_EP_ROLLED
  for (int slot = thread_index(); slot < slots; slot += block_size()) {
    const int source = slot / s.tokens;
    const int token = slot - source * s.tokens;
    if (r.is_failed(source)) continue;
    const std::byte* meta = r.local + s.meta_at(r.set, source);
    List list;
    const bool in_time =
        wait_for_source(r, source, [&] { return look_at_list(s, meta, token, r.epoch, &list); });
    if (token == 0 && block == 0) since = r.note_wait(0, source, since);
    if (!in_time || token >= list.tokens) continue;
    bool ours = false;
    MARROW_EP_ROLLED
    for (int k = 0; k < s.top_k; ++k) {
      const int id = list.id(k);
      const int column = id - s.first;
      p.ids[slot * s.top_k + k] = static_cast<std::int16_t>(id);
      if (static_cast<unsigned>(column) >= static_cast<unsigned>(s.local)) continue;
      ours = true;
      if (!s.rank_major)
        add_shared(&p.masks[column * words + source * s.mask_words + token / 32],
                   1u << (token % 32));
    }
    if (!ours) continue;
    if (s.rank_major) add_shared(&p.masks[source * s.mask_words + token / 32], 1u << (token % 32));
    const int bit = token * s.ranks + source;  // rows arrive in about this order
    add_shared(&any[bit / 32], 1u << (bit % 32));
  }
  meet();
  MARROW_EP_ROLLED
  for (int i = thread_index(); i < columns * words + any_count; i += block_size()) {
    const bool of_any = i >= columns * words;
    const int word = of_any ? i - columns * words : i % words;
    const std::uint32_t* mask = of_any ? any : p.masks + (i - word);
    std::uint32_t sum = 0;
    MARROW_EP_ROLLED
    for (int w = 0; w < word; ++w) sum += static_cast<std::uint32_t>(count_lanes(mask[w]));
    (of_any ? any_prefix : p.prefixes + (i - word))[word] = sum;
    if (!of_any && word == words - 1)
      counts[i / words] = sum + static_cast<std::uint32_t>(count_lanes(mask[word]));
  }
  meet();
  Placed result = p;
  result.entries = static_cast<int>(any_prefix[any_count - 1]) + count_lanes(any[any_count - 1]);
  MARROW_EP_ROLLED
  for (int bit = thread_index(); bit < slots; bit += block_size()) {
    const std::uint32_t word = any[bit / 32];
    if (!(word >> (bit % 32) & 1)) continue;
    const int source = bit % s.ranks;
    const int token = bit / s.ranks;
    p.list[any_prefix[bit / 32] +
           static_cast<unsigned>(count_lanes(word & ((1u << (bit % 32)) - 1)))] =
        static_cast<std::uint32_t>(source * s.tokens + token);
  }
  std::uint32_t* bases = dynamic_shared<std::uint32_t>(m.bases);  // rows of lower experts
  MARROW_EP_ROLLED
  for (int l = thread_index(); l < columns; l += block_size()) {
    std::uint32_t sum = 0;
#if defined(__CUDACC__)
#pragma unroll 8
#endif
    for (int lower = 0; lower < l; ++lower) sum += counts[lower];
    bases[l] = sum;
  }
  meet();
  // The handle's tables: block 0 the totals, every block its share of the entries.
  if (block == 0) {
    auto* out = r.table<std::int32_t>(s.counts);
    if (s.rank_major) {
      for (int r = thread_index(); r < s.ranks; r += block_size()) {
        const std::uint32_t end = r + 1 < s.ranks ? p.prefixes[(r + 1) * s.mask_words] : counts[0];
        out[r] = static_cast<std::int32_t>(end - p.prefixes[r * s.mask_words]);
      }
    } else {
      MARROW_EP_ROLLED
      for (int l = thread_index(); l < columns; l += block_size()) {
        const int n = static_cast<int>(counts[l]);
        out[l] = n < s.capacity ? n : s.capacity;
        if (n > s.capacity)
          add_relaxed<Scope::device>(&r.control()->overflow,
                                     static_cast<std::uint64_t>(n - s.capacity));
      }
    }
    if (thread_index() == 0) {
      auto* head = r.table<HandleHead>(0);
      head->entries = result.entries;
      head->pairs = s.rank_major || columns == 0
                        ? 0
                        : static_cast<std::int32_t>(bases[columns - 1] + counts[columns - 1]);
    }
    MARROW_EP_ROLLED
    for (int e = thread_index(); e < result.entries; e += block_size())
      r.table<std::uint32_t>(s.list)[e] = p.list[e];
  }
  // By the last threads: the first warps' rows come first.
  const int mine = result.entries > block ? (result.entries - block + blocks - 1) / blocks : 0;
  for (int i = block_size() - 1 - thread_index(); i < mine * s.top_k; i += block_size()) {
    const int e = i / s.top_k;
    const int slot = static_cast<int>(p.list[block + e * blocks]);
    const int source = slot / s.tokens;
    const int token = slot - source * s.tokens;
    int row = -1;
    if (s.rank_major)
      row = source * s.tokens + row_in_column(s, p, 0, source, token) -
            static_cast<int>(p.prefixes[source * s.mask_words]);
    struct At {
      int row;
      int pair;
    };
    write_choice(
        r, block + e * blocks, slot, i - e * s.top_k, row,
        [&](int k) { return static_cast<int>(p.ids[slot * s.top_k + k]); },
        [&](int column) {
          const int in_column = row_in_column(s, p, column, source, token);
          return At{in_column, static_cast<int>(bases[column]) + in_column};
        });
  }
  return result;
}

/// Index of a row's scale word in the output.
MARROW_DEVICE std::uint64_t scale_at(const Shape& s, std::int64_t row, int word) {
  const auto at_row = static_cast<std::uint64_t>(row);
  if (!s.column_major) return at_row * s.scale_words + word;
  const auto rows = static_cast<std::uint64_t>(s.rank_major ? s.tokens : s.capacity);
  return (at_row / rows * s.scale_words + word) * rows + at_row % rows;
}

/// Writes one data cell of a row where it belongs.
MARROW_DEVICE void write_data(const Shape& s, const DispatchArgs& a, std::int64_t row, int index,
                              const Words16& v) {
  if (index < s.row_cells) {
    store_wide(a.out_rows + static_cast<std::uint64_t>(row) * s.row_cells * 16 +
                   static_cast<std::uint64_t>(index) * 16,
               v);
    return;
  }
  // Opaque scales: words, since a row of them need not start at 16 bytes.
  const int first = (index - s.row_cells) * 4;
  for (int i = 0; i < 4 && first + i < s.scale_words; ++i)
    reinterpret_cast<std::uint32_t*>(a.out_scales)[scale_at(s, row, first + i)] = v.word[i];
}

/// Writes a quad's four fp8 scales.
MARROW_DEVICE void write_scales(const Shape& s, const DispatchArgs& a, std::int64_t row, int quad,
                                const Words16& v) {
  auto* out = reinterpret_cast<std::uint32_t*>(a.out_scales);
  if (s.packed) {
    std::uint32_t word = 0;
    for (int g = 0; g < 4; ++g) word |= (v.word[g] >> 23) << (g * 8);
    out[scale_at(s, row, quad)] = word;
    return;
  }
  if (!s.column_major && s.scale_words % 4 == 0 &&
      (reinterpret_cast<std::uintptr_t>(out) & 15) == 0) {
    store_wide(out + scale_at(s, row, quad * 4), v);
    return;
  }
  for (int g = 0; g < 4 && quad * 4 + g < s.scale_words; ++g)
    out[scale_at(s, row, quad * 4 + g)] = v.word[g];
}

/// The rows: workers of all receiving blocks take (entry, quad) in turn, several at once. One copy of the code writes
/// them all: the kernel runs through it about once, so its size is time.
template <bool kFp8>
MARROW_DEVICE void receive_rows(const Run& r, const DispatchArgs& a, const Placed& p, int block,
                                int blocks) {
  const Shape& s = r.s;
  constexpr int kAtOnce = kWarpQuads ? kItemsAtOnce : 1;
  std::byte* local = r.local;
  const int lane = thread_index() % kQuadLanes;
  const int per_block = block_size() / kQuadLanes;
  std::int32_t* rows = dynamic_shared<std::int32_t>(place_memory(s, per_block).rows) +
                       thread_index() / kQuadLanes * kAtOnce * s.top_k;
  // Neighbouring quads to different blocks: all start with what arrives first.
  Walk walk(thread_index() / kQuadLanes * blocks + block, per_block * blocks, s.quads);
  while (walk.number < p.entries) {
    std::byte* from[kAtOnce];
    int quad[kAtOnce];
    int source[kAtOnce];
    int count[kAtOnce];
    std::uint32_t missing = 0;  // bit u: this lane's part of item u is not written yet
    if constexpr (kWarpQuads) warp_sync(0xffffffffu);  // the last round's rows were used
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int u = 0; u < kAtOnce; ++u) {
      quad[u] = walk.quad;
      const int slot = walk.number < p.entries ? static_cast<int>(p.list[walk.number]) : -1;
      walk.next();
      source[u] = slot < 0 ? 0 : slot / s.tokens;
      from[u] = local + s.row_at(r.set, source[u], slot < 0 ? 0 : slot - source[u] * s.tokens);
      if (slot >= 0) missing |= 1u << u;
      count[u] = find_rows(r, p, slot, lane, rows + u * s.top_k);
    }
    if constexpr (kWarpQuads) warp_sync(0xffffffffu);
    Status lost = Status::ok;  // else: what is missing counts as zeros
    const auto turn = [&] {
      Cell16 cell[kAtOnce][kCellsPerLane];
      Cell16 extra[kAtOnce] = {};
      std::uint32_t here = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int u = 0; u < kAtOnce; ++u) {
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int c = 0; c < kCellsPerLane; ++c) {
          const int index = quad[u] * kQuadCells + c * kQuadLanes + lane;
          cell[u][c] = {};
          if ((missing >> u & 1) && index < s.data_cells)
            cell[u][c] = load_cell(from[u] + static_cast<std::uint64_t>(index) * 16);
        }
        if ((missing >> u & 1) && (!kFp8 || lane == 0))
          extra[u] = load_cell(from[u] + static_cast<std::uint64_t>(s.data_cells + quad[u]) * 16);
      }
#if defined(__CUDACC__)
#pragma unroll
#endif
      for (int u = 0; u < kAtOnce; ++u) {
        bool all = kFp8 ? mark_of(extra[u]) != kSentinel : mark_of(extra[u]) == r.epoch;
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int c = 0; c < kCellsPerLane; ++c) all &= mark_of(cell[u][c]) != kSentinel;
        if (all || lost != Status::ok) here |= 1u << u;
      }
      here &= missing;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
      while (here) {
        const int u = lowest_lane(here);
        here &= here - 1;
        missing &= ~(1u << u);
        Words16 v[kCellsPerLane];
        Words16 w = words_of(extra[0]);
        std::byte* to = from[0];
        int q = quad[0];
        int n = count[0];
        int owner = source[0];
        for (int c = 0; c < kCellsPerLane; ++c) v[c] = words_of(cell[0][c]);
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (int other = 1; other < kAtOnce; ++other) {
          if (other != u) continue;
          w = words_of(extra[other]);
          to = from[other];
          q = quad[other];
          n = count[other];
          owner = source[other];
          for (int c = 0; c < kCellsPerLane; ++c) v[c] = words_of(cell[other][c]);
        }
        if (lost != Status::ok) {
          r.set_failed(owner, lost);
          w = {};
          for (int c = 0; c < kCellsPerLane; ++c) v[c] = {};
        } else {
          for (int c = 0; c < kCellsPerLane; ++c) {
            const int index = q * kQuadCells + c * kQuadLanes + lane;
            if constexpr (!kFp8) v[c].word[3] |= w.word[2] >> (c * kQuadLanes + lane) & 1;
            if (index < s.data_cells)
              store_cell(to + static_cast<std::uint64_t>(index) * 16, sentinel_cell());
          }
          if (kFp8 && lane == 0)
            store_cell(to + static_cast<std::uint64_t>(s.data_cells + q) * 16, sentinel_cell());
        }
#if defined(__CUDACC__)
#pragma unroll 1
#endif
        for (int i = 0; i < n; ++i) {
          const std::int64_t row = rows[u * s.top_k + i];
          for (int c = 0; c < kCellsPerLane; ++c) {
            const int index = q * kQuadCells + c * kQuadLanes + lane;
            if (index < s.data_cells) write_data(s, a, row, index, v[c]);
          }
          if (kFp8 && lane == 0) write_scales(s, a, row, q, w);
        }
      }
      return missing == 0;
    };
    for (;;) {
      const Status status = wait_until(r.comm, r.time_left(), turn);
      if (status == Status::ok) break;
      lost = status;
    }
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

/// dispatch_send, dispatch_receive, or both, by the numbers of blocks in the arguments.
template <bool kFp8>
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(512)
    dispatch_kernel(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                    const MARROW_GRID_CONSTANT WindowHandle window,
                    const MARROW_GRID_CONSTANT Shape s, const MARROW_GRID_CONSTANT DispatchArgs a) {
  await_previous_kernel();
  let_next_kernel_start();
  const std::uint64_t start = now_ns();
  auto* control = at<Control>(window.local, s.control);
  const int block = block_index();
  const bool sends = block < a.send_blocks;
  const bool receives = block >= a.receive_from;
  const std::uint64_t sent = load_relaxed<Scope::device>(&control->dispatch_sent);
  const std::uint64_t received = load_relaxed<Scope::device>(&control->dispatch_received);
  const bool failed = load_relaxed<Scope::device>(&control->any_failed) != 0;
  const std::uint64_t stopped = load_relaxed<Scope::device>(&control->stopped);
  First first;
  if (sends) load_first<kFp8>(s, a, block, a.send_blocks, &first);
  const bool any_send = a.send_blocks > 0;
  const bool any_receive = a.receive_from < grid_size();
  const bool invalid = out_of_turn(s, sent, received, any_send, any_receive);
  const Status stop =
      all_have_read(&control->arrived[0], sent ^ received ^ (failed ? 1 : 0), stopped, [&] {
        if (any_send) store_relaxed<Scope::device>(&control->dispatch_sent, sent + 1);
        if (any_receive) {
          store_relaxed<Scope::device>(&control->dispatch_received, received + 1);
          add_relaxed<Scope::device>(&control->dispatches, 1);
        }
        if (invalid) stop_as_invalid(control);
      });
  if (invalid || stop != Status::ok) {
    stop_dispatch(Run(comm, window, s, a.handle, sent, start, failed), a, sends, receives);
    note_times(a.times, start);
    return;
  }
  if (sends) {
    const Run r(comm, window, s, a.handle, sent, start, failed);
    send_dispatch<kFp8>(r, a, block, a.send_blocks, first);
    meet();  // shared memory changes its use
  }
  if (receives) {
    const Run r(comm, window, s, a.handle, received, call_start(s, control, start), failed);
    const int blocks = grid_size() - a.receive_from;
    Placed p{};
    if (s.place_in_block) {
      p = place_in_block(r, block - a.receive_from, blocks);
    } else {
      p.entries = r.table<HandleHead>(0)->entries;
      p.list = r.table<std::uint32_t>(s.list);
    }
    receive_rows<kFp8>(r, a, p, block - a.receive_from, blocks);
  }
  note_times(a.times, start);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
