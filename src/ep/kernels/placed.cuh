// SPDX-License-Identifier: Apache-2.0
// Where rows go. Every receiving block learns from the lists that arrive first which tokens chose which of our experts (a
// bit each in shared memory), so that it can tell the place of any row: the number of bits before its own. The handle's
// tables say the same for combine. Sizes that do not fit into shared memory are placed by a kernel of their own (place.cuh).
#pragma once

#include "ep/kernels/lists.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// What a block knows about rows: in its shared memory, or in the handle's records.
struct Placed {
  std::uint32_t* masks;     ///< [column][source][token / 32], a column column_stride words
  std::uint32_t* prefixes;  ///< set bits before each word, in its column
  std::uint32_t* ids;       ///< [slot][ids_stride], as they came: two in a word
  Origin* list;
  std::uint32_t* bases;  ///< rows of lower columns
  std::uint32_t* counts;
  int entries;
};

/// The k-th id of a slot's words.
MARROW_DEVICE int id_in(const std::uint32_t* words, int k) {
  return static_cast<std::int16_t>(words[k / 2] >> (k % 2 * 16));
}

/// Number of the row in its column.
MARROW_DEVICE int row_in_column(const Shape& s, const Placed& p, int column, Origin origin) {
  const int word = column * column_stride(s) + origin.source() * s.mask_words + origin.token() / 32;
  return static_cast<int>(p.prefixes[word]) +
         count_lanes(p.masks[word] & ((1u << (origin.token() % 32)) - 1));
}
MARROW_DEVICE int row_in_rank(const Shape& s, const Placed& p, Origin origin) {
  return row_in_column(s, p, 0, origin) -
         static_cast<int>(p.prefixes[origin.source() * s.mask_words]);
}

/// The k-th candidate for an output row of the entry; -1: none, or it did not fit.
MARROW_DEVICE std::int32_t row_of(const Run& r, const Placed& p, Origin origin, int k) {
  const Shape& s = r.s;
  if (!s.place_in_block) {
    const std::byte* record = record_at(r, 0, origin);
    return k < reinterpret_cast<const Record*>(record)->count ? rows_of(record)[k] : -1;
  }
  if (s.rank_major) return k == 0 ? origin.source() * s.tokens + row_in_rank(s, p, origin) : -1;
  const int column = id_in(p.ids + origin.slot(s.tokens) * ids_stride(s), k) - s.first;
  if (static_cast<unsigned>(column) >= static_cast<unsigned>(s.local)) return -1;
  const int row = row_in_column(s, p, column, origin);
  return row < s.capacity ? column * s.capacity + row : -1;
}

/// Writes the entry's output rows to `rows`. All lanes of a worker call. @return how many there are
MARROW_DEVICE int find_rows(const Run& r, const Placed& p, Origin origin, int lane,
                            std::int32_t* rows) {
  if constexpr (kWarpQuads) {
    const std::int32_t row = lane < r.s.top_k ? row_of(r, p, origin, lane) : -1;
    const std::uint32_t found = warp_ballot(0xffffffffu, row >= 0);
    if (row >= 0) rows[count_lanes(found & ((1u << lane) - 1))] = row;
    return count_lanes(found);
  } else {
    int count = 0;
    for (int k = 0; k < r.s.top_k; ++k) {
      const std::int32_t row = row_of(r, p, origin, k);
      if (row >= 0) rows[count++] = row;
    }
    return count;
  }
}

/// How many ranks below ours a token chose: our position among its ranks.
MARROW_DEVICE int lower_ranks(const Run& r, const auto& id_of) {
  const Shape& s = r.s;
  int count = 0;
  MARROW_EP_ROLLED
  for (int from = 0; from < s.rank; from += 32) {
    std::uint32_t seen = 0;  // ranks from .. from + 31
#if defined(__CUDACC__)
#pragma unroll 2
#endif
    for (int k = 0; k < s.top_k; ++k) {
      const int id = id_of(k);
      if (id < 0 || id >= s.first) continue;
      const int rank = rank_of_expert(s, r.local, id) - from;
      if (rank >= 0 && rank < 32) seen |= 1u << rank;
    }
    count += count_lanes(seen);
  }
  return count;
}

/// Choice k of an entry in its token's list.
struct InList {
  int order;  ///< choices before it that are ours
  // Of the entry:
  int count;    ///< choices that are ours
  int ordinal;  ///< lower ranks that were chosen
};
MARROW_DEVICE InList find_in_list(const Run& r, int k, const auto& id_of) {
  const Shape& s = r.s;
  InList in{0, 0, 0};
  MARROW_EP_ROLLED
  for (int other = 0; other < s.top_k; ++other) {
    const bool ours =
        static_cast<unsigned>(id_of(other) - s.first) < static_cast<unsigned>(s.local);
    in.order += ours && other < k;
    in.count += ours;
  }
  if (k == 0) in.ordinal = lower_ranks(r, id_of);
  return in;
}

/// Choice k of an entry (a token that reached us) in the handle's tables; k == 0 writes what is the entry's own.
/// @param entry   its number; not looked at if rows were placed by a kernel of their own
/// @param row     expert-major: in its expert, if it is one of ours; rank-major: the entry's
/// @param pair    its number among all pairs; -1: not kept
/// @param weight  0, if it is not ours
MARROW_DEVICE void write_choice(const Run& r, int entry, Origin origin, int k, int id, int row,
                                int pair, const InList& in, float weight) {
  const Shape& s = r.s;
  const int slot = origin.slot(s.tokens);
  const int column = id - s.first;
  const bool mine = static_cast<unsigned>(column) < static_cast<unsigned>(s.local);
  std::byte* bytes = record_at(r, entry, origin);
  auto* rows = rows_of(bytes);
  if (s.rank_major) {
    const std::uint64_t at_choice = static_cast<std::uint64_t>(row) * s.top_k + k;
    r.table<std::int32_t>(s.expert_ids)[at_choice] = mine ? column : -1;
    r.table<float>(s.weights)[at_choice] = weight;
  } else if (mine) {
    const std::int64_t out =
        row < s.capacity ? static_cast<std::int64_t>(column) * s.capacity + row : -1;
    rows[in.order] = static_cast<std::int32_t>(out);
    reinterpret_cast<float*>(rows + s.record_rows)[in.order] = weight;
    if (pair >= 0) r.table<Pair>(s.pairs)[pair] = Pair{origin, k, out};
    if (out >= 0) {
      r.table<std::int32_t>(s.source)[out] = slot;
      r.table<float>(s.weights)[out] = weight;
    }
  }
  if (k != 0) return;
  if (s.place_in_block) r.table<Origin>(s.list)[entry] = origin;
  if (s.rank_major) {
    rows[0] = row;
    r.table<std::int32_t>(s.source)[row] = slot;
  }
  *reinterpret_cast<Record*>(bytes) = {static_cast<std::int16_t>(s.rank_major ? 1 : in.count),
                                       static_cast<std::int16_t>(in.ordinal),
                                       origin,
                                       {}};
}

/// Waits for the lists of all sources, and fills the masks from them.
MARROW_DEVICE void take_lists(const Run& r, const Placed& p, std::uint32_t* any,
                              std::uint32_t* heads, bool notes_waits) {
  const Shape& s = r.s;
  const int slots = s.rows_per_batch();
  MARROW_EP_ROLLED
  for (int slot = thread_index(); slot < slots; slot += block_size()) {
    const int source = s.by_tokens.quotient(slot);
    const int token = slot - source * s.tokens;
    if (r.is_failed(source)) continue;
    const std::byte* meta = r.local + s.meta_at(r.set, source);
    const bool notes = notes_waits && token == 0;
    const std::uint64_t since = notes ? now_ns() : 0;  // before, others were waited for
    List list;
    unsigned looks = 0;
    // The head is one line for all blocks: one thread a block looks at it, others only if that one seems to be held up.
    const bool in_time = wait_for_source(r, source, [&] {
      if (look_at_list(s, meta, token, r.epoch, &list)) return true;
      std::uint32_t known = load_relaxed<Scope::block>(heads + source);
      if (known == 0 && (token == 0 || ++looks % 16 == 0)) {
        known = static_cast<std::uint32_t>(look_at_head(meta, r.epoch) + 1);
        if (known != 0) store_relaxed<Scope::block>(heads + source, known);
      }
      return known != 0 && token >= static_cast<int>(known) - 1;
    });
    if (notes) (void)r.note_wait(0, source, since);
    if (!in_time || !list.here) continue;
    std::uint32_t* ids = p.ids + slot * ids_stride(s);
    MARROW_EP_UNROLLED
    for (int c = 0; c < kMaxIdCells; ++c) {
      if (c >= s.id_cells) continue;
      for (int word = 0; word < kIdsPerCell / 2; ++word)
        ids[c * kIdsPerCell / 2 + word] = word_of(list.cell[c], word);
    }
    bool ours = false;
    const std::uint32_t bit_of_token = 1u << (token % 32);
    const int word = source * s.mask_words + token / 32;
#if defined(__CUDACC__)
#pragma unroll 4
#endif
    for (int k = 0; k < s.top_k; ++k) {
      const int column = id_in(ids, k) - s.first;
      if (static_cast<unsigned>(column) >= static_cast<unsigned>(s.local)) continue;
      ours = true;
      if (!s.rank_major) add_shared(&p.masks[column * column_stride(s) + word], bit_of_token);
    }
    if (!ours) continue;
    if (s.rank_major) add_shared(&p.masks[word], bit_of_token);
    const int bit = token * s.ranks + source;  // rows arrive in about this order
    add_shared(&any[bit / 32], 1u << (bit % 32));
  }
}

/// Set bits before each of n words. @return all
MARROW_DEVICE std::uint32_t count_before(const std::uint32_t* __restrict__ mask,
                                         std::uint32_t* __restrict__ prefix, int n) {
  std::uint32_t sum = 0;
#if defined(__CUDACC__)
#pragma unroll 8
#endif
  for (int i = 0; i < n; ++i) {
    prefix[i] = sum;
    sum += static_cast<std::uint32_t>(count_lanes(mask[i]));
  }
  return sum;
}

/// Fills what is known from the lists of all sources. `blocks` blocks do the same; the first one notes the waits.
MARROW_DEVICE Placed place_in_block(const Run& r, int block) {
  const Shape& s = r.s;
  const PlaceMemory m = place_memory(s);
  const int slots = s.rows_per_batch();
  const int columns = columns_of(s);
  const int any_count = any_words(s);
  std::uint32_t* any = dynamic_shared<std::uint32_t>(m.any);
  std::uint32_t* any_prefix = dynamic_shared<std::uint32_t>(m.any_prefix);
  std::uint32_t* heads = dynamic_shared<std::uint32_t>(m.heads);
  Placed p{dynamic_shared<std::uint32_t>(m.masks),
           dynamic_shared<std::uint32_t>(m.prefixes),
           dynamic_shared<std::uint32_t>(m.ids),
           dynamic_shared<Origin>(m.list),
           dynamic_shared<std::uint32_t>(m.bases),
           dynamic_shared<std::uint32_t>(m.counts),
           0};
  std::uint32_t* first = dynamic_shared<std::uint32_t>(m.taken);
  MARROW_EP_ROLLED
  for (int i = thread_index(); i < static_cast<int>((m.prefixes - m.taken) / 4); i += block_size())
    first[i] = 0;  // taken, heads, masks and any
  meet();
  take_lists(r, p, any, heads, block == 0);
  note(Point::lists_here);
  meet();
  note(Point::lists_of_block_here);
  // A thread a column, the last one all entries.
  MARROW_EP_ROLLED
  for (int c = block_size() - 1 - thread_index(); c <= columns; c += block_size()) {
    if (c == 0) {
      (void)count_before(any, any_prefix, any_count);
    } else {
      const int at_column = (c - 1) * column_stride(s);
      p.counts[c - 1] =
          count_before(p.masks + at_column, p.prefixes + at_column, s.ranks * s.mask_words);
    }
  }
  meet();
  p.entries = static_cast<int>(any_prefix[any_count - 1]) + count_lanes(any[any_count - 1]);
  MARROW_EP_ROLLED
  for (int bit = thread_index(); bit < slots; bit += block_size()) {
    const std::uint32_t word = any[bit / 32];
    if (!(word >> (bit % 32) & 1)) continue;
    const int token = s.by_ranks.quotient(bit);
    p.list[any_prefix[bit / 32] +
           static_cast<unsigned>(count_lanes(word & ((1u << (bit % 32)) - 1)))] =
        Origin::of(bit - token * s.ranks, token);
  }
  meet();
  note(Point::rows_placed);
  return p;
}

/// Rows of lower columns. By a warp on a GPU, else by all threads.
MARROW_DEVICE void find_bases(const Shape& s, const Placed& p) {
  const int columns = columns_of(s);
  if constexpr (kWarpQuads) {
    // Neighbouring columns a lane, so that lanes add up once.
    const int of_lane = (columns + 31) / 32;
    const int first = lane_index() * of_lane;
    const int end = first + of_lane < columns ? first + of_lane : columns;
    std::uint32_t mine = 0;
    for (int c = first; c < end; ++c) mine += p.counts[c];
    std::uint32_t sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t below = warp_shuffle(0xffffffffu, sum, (lane_index() - step) & 31);
      if (lane_index() >= step) sum += below;
    }
    std::uint32_t base = sum - mine;
    for (int c = first; c < end; ++c) {
      p.bases[c] = base;
      base += p.counts[c];
    }
  } else {
    for (int c = thread_index(); c < columns; c += block_size()) {
      p.bases[c] = 0;
      for (int lower = 0; lower < c; ++lower) p.bases[c] += p.counts[lower];
    }
  }
}

/// Where a choice of an entry goes.
struct ChoiceAt {
  Origin origin;
  int id = -1;
  int row = -1;   ///< as write_choice has it
  int pair = -1;  ///< likewise
};
MARROW_DEVICE ChoiceAt choice_at(const Shape& s, const Placed& p, int entry, int k) {
  const Origin origin = p.list[entry];
  const int id = id_in(p.ids + origin.slot(s.tokens) * ids_stride(s), k);
  if (s.rank_major) return {origin, id, origin.source() * s.tokens + row_in_rank(s, p, origin), -1};
  const int column = id - s.first;
  if (static_cast<unsigned>(column) >= static_cast<unsigned>(s.local)) return {origin, id, -1, -1};
  const int row = row_in_column(s, p, column, origin);
  return {origin, id, row, static_cast<int>(p.bases[column]) + row};
}

/// The handle's tables of n entries, `first` and others `apart`, by a warp: the turn-th part of them, a choice a lane.
/// @return whether there was one
MARROW_DEVICE bool write_tables_by_warp(const Run& r, const Placed& p, int first, int apart, int n,
                                        int turn) {
  constexpr std::uint32_t kAll = 0xffffffffu;
  const Shape& s = r.s;
  const int at_once = s.by_top_k.quotient(32);
  if (turn * at_once >= n) return false;
  const int lane = lane_index();
  const int e = s.by_top_k.quotient(lane);
  const int k = lane - e * s.top_k;
  const bool is_one = e < at_once && turn * at_once + e < n;
  const int entry = first + (turn * at_once + e) * apart;
  ChoiceAt c;
  bool mine = false;
  Cell16 seen{};
  if (is_one) {
    c = choice_at(s, p, entry, k);
    mine = static_cast<unsigned>(c.id - s.first) < static_cast<unsigned>(s.local);
    if (mine) seen = load_cell(weight_cell(r, c.origin.source(), c.origin.token(), k));
  }
  // Where it is in its list: by votes of the lanes that have the entry's other choices.
  const std::uint32_t lists = s.top_k == 32 ? kAll : ((1u << s.top_k) - 1) << ((e * s.top_k) & 31);
  const std::uint32_t lower = (1u << lane) - 1;
  const std::uint32_t ours = warp_ballot(kAll, mine) & lists;
  const bool is_lower = is_one && c.id >= 0 && c.id < s.first;
  const int rank = is_lower ? rank_of_expert(s, r.local, c.id) : 0;
  const std::uint32_t same = warp_match(kAll, is_lower ? e << 16 | rank : 1 << 30 | lane);
  const std::uint32_t ranks = warp_ballot(kAll, is_lower && (same & lower) == 0) & lists;
  if (!is_one) return true;
  float weight = 0;
  if (mine) weight = wait_for_weight(r, c.origin.source(), c.origin.token(), k, seen);
  write_choice(r, entry, c.origin, k, c.id, c.row, c.pair,
               InList{count_lanes(ours & lower), count_lanes(ours), count_lanes(ranks)}, weight);
  return true;
}

/// ... all of them by `threads` threads, this one being number me.
MARROW_DEVICE void write_tables_by_threads(const Run& r, const Placed& p, int first, int apart,
                                           int n, int me, int threads) {
  const Shape& s = r.s;
  MARROW_EP_ROLLED
  for (int i = me; i < n * s.top_k; i += threads) {
    const int e = s.by_top_k.quotient(i);
    const int k = i - e * s.top_k;
    const int entry = first + e * apart;
    const ChoiceAt c = choice_at(s, p, entry, k);
    float weight = 0;
    if (static_cast<unsigned>(c.id - s.first) < static_cast<unsigned>(s.local))
      weight = wait_for_weight(r, c.origin.source(), c.origin.token(), k);
    const std::uint32_t* ids = p.ids + c.origin.slot(s.tokens) * ids_stride(s);
    const InList in = find_in_list(r, k, [&](int other) { return id_in(ids, other); });
    write_choice(r, entry, c.origin, k, c.id, c.row, c.pair, in, weight);
  }
}

/// What the handle says of the batch as a whole: a block's part, by `threads` of its threads. Block 0 writes the head.
MARROW_DEVICE void write_totals(const Run& r, const Placed& p, int block, int blocks, int me,
                                int threads) {
  const Shape& s = r.s;
  const int columns = columns_of(s);
  auto* out = r.table<std::int32_t>(s.counts);
  MARROW_EP_ROLLED
  for (int c = block + me * blocks; c < (s.rank_major ? s.ranks : columns); c += threads * blocks) {
    if (s.rank_major) {
      const std::uint32_t end = c + 1 < s.ranks ? p.prefixes[(c + 1) * s.mask_words] : p.counts[0];
      out[c] = static_cast<std::int32_t>(end - p.prefixes[c * s.mask_words]);
      continue;
    }
    const int rows = static_cast<int>(p.counts[c]);
    out[c] = rows < s.capacity ? rows : s.capacity;
    if (rows > s.capacity)
      add_relaxed<Scope::device>(&r.control()->overflow,
                                 static_cast<std::uint64_t>(rows - s.capacity));
  }
  if (block != 0 || me != 0) return;
  auto* head = r.table<HandleHead>(0);
  head->entries = p.entries;
  head->pairs = s.rank_major || columns == 0
                    ? 0
                    : static_cast<std::int32_t>(p.bases[columns - 1] + p.counts[columns - 1]);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
