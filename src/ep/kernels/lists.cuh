// SPDX-License-Identifier: Apache-2.0
// Lists: which experts each token chose, and with what weights. They go to every rank as cells that carry the batch's number, before
// any row, and from blocks that send no rows if there are such: an SM's loads and stores queue behind its own rows.
#pragma once

#include "ep/kernels/common.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Tokens that a block works on at once, a line of shared memory each.
inline constexpr int kTokensAtOnce = 16;
inline constexpr int kMaxIdCells = (kMaxTopK + kIdsPerCell - 1) / kIdsPerCell;
inline constexpr int kMaxWeightCells = (kMaxTopK + kWeightsPerCell - 1) / kWeightsPerCell;
/// A token's list as it goes into cells.
struct ListLine {
  std::int16_t id[kMaxIdCells * kIdsPerCell];
  float weight[kMaxWeightCells * kWeightsPerCell];
};

/// One choice of a token.
struct Choice {
  std::int32_t id = -1;    ///< -1: ignored, as it is none or repeats an earlier one
  std::int32_t rank = -1;  ///< of the expert
  float weight = 0;
  bool first = false;  ///< no earlier choice has that rank
  int ordinal = 0;     ///< position of the rank among the token's ranks, in their order
};

/// What a thread loads before it knows the batch's number: a choice of its warp's first token.
struct FirstChoice {
  std::int64_t id = -1;
  float weight = 0;
};

/// The batch's tokens of this rank; -1: out of range.
MARROW_DEVICE std::int32_t tokens_of(const Shape& s, const DispatchArgs& a) {
  const std::int32_t tokens = a.device_tokens ? load_cached(a.device_tokens) : a.tokens;
  return tokens >= 0 && tokens <= s.tokens ? tokens : -1;
}

MARROW_DEVICE float weight_of(const DispatchArgs& a, std::uint64_t choice) {
  return a.weights ? a.weights[choice] : 1.0f;
}

/// Warp w of a block takes line w, and tokens block + w * blocks first.
MARROW_DEVICE FirstChoice load_first_choice(const Shape& s, const DispatchArgs& a, int tokens,
                                            int block, int blocks) {
  FirstChoice first;
  const int warp = thread_index() / warp_lanes();
  const int token = block + warp * blocks;
  if (warp < kTokensAtOnce && token < tokens && lane_index() < s.top_k) {
    const std::uint64_t choice = static_cast<std::uint64_t>(token) * s.top_k + lane_index();
    first.id = a.ids[choice];
    first.weight = weight_of(a, choice);
  }
  return first;
}

/// visit(k, choice) for all choices of a token, by a warp whose lanes have them in registers (on the CPU device, by one
/// thread); for some k past the last one, too, with no choice. @param ahead  the lanes' choices, if they are `loaded`
/// @param counts  this call counts the choices that are none  @return number of the token's ranks
template <class Visit>
MARROW_DEVICE int each_choice(const Run& r, const DispatchArgs& a, int token, FirstChoice ahead,
                              bool loaded, bool counts, Visit&& visit) {
  const Shape& s = r.s;
  const std::uint64_t first_choice = static_cast<std::uint64_t>(token) * s.top_k;
  const auto load = [&](int k, Choice* c) {
    const std::int64_t id = loaded && k == lane_index() ? ahead.id : a.ids[first_choice + k];
    c->weight = loaded && k == lane_index() ? ahead.weight : weight_of(a, first_choice + k);
    const bool good = id >= 0 && id < s.experts;
    if (good) {
      c->id = static_cast<std::int32_t>(id);
      c->rank = rank_of_expert(s, r.local, c->id);
    } else if (counts && id != -1) {
      add_relaxed<Scope::device>(&r.control()->out_of_range, 1);
    }
  };
  const auto settle = [&](Choice* c, bool repeats) {
    if (repeats && counts) add_relaxed<Scope::device>(&r.control()->duplicates, 1);
    if (repeats) c->id = -1;
    if (c->id < 0) c->weight = 0;
  };
  if constexpr (kWarpQuads) {
    constexpr std::uint32_t kAll = 0xffffffffu;
    const int k = lane_index();
    Choice c;
    if (k < s.top_k) load(k, &c);
    const std::uint32_t lower = (1u << k) - 1;
    const std::uint32_t same = warp_match(kAll, c.id);
    const std::uint32_t same_rank = warp_match(kAll, c.rank);
    const bool repeats = c.id >= 0 && (same & lower) != 0;
    c.first = c.id >= 0 && (same_rank & lower) == 0;
    settle(&c, repeats);
    int all = 0;
    MARROW_EP_ROLLED
    for (int from = 0; from < s.ranks; from += 32) {
      const bool here = c.first && c.rank >= from && c.rank < from + 32;
      const std::uint32_t ranks = warp_or(here ? 1u << (c.rank - from) : 0);
      all += count_lanes(ranks);
      if (c.rank >= from + 32) {
        c.ordinal += count_lanes(ranks);
      } else if (c.rank >= from) {
        c.ordinal += count_lanes(ranks & ((1u << (c.rank - from)) - 1));
      }
    }
    visit(k, c);
    if (s.top_k > 30 && k < 4) visit(k + 32, Choice{});  // the last cells' padding
    return all;
  } else {
    Choice c[kMaxTopK];
    int all = 0;
    for (int k = 0; k < s.top_k; ++k) {
      load(k, &c[k]);
      bool repeats = false;
      c[k].first = c[k].id >= 0;
      for (int other = 0; other < k; ++other) {
        repeats |= c[k].id >= 0 && a.ids[first_choice + other] == c[k].id;
        c[k].first &= c[other].rank != c[k].rank;
      }
      settle(&c[k], repeats);
      all += c[k].first;
    }
    for (int k = 0; k < s.top_k; ++k) {
      for (int other = 0; other < s.top_k; ++other)
        c[k].ordinal += c[other].first && c[other].rank < c[k].rank;
      visit(k, c[k]);
    }
    for (int k = s.top_k; k < kMaxIdCells * kIdsPerCell; ++k) visit(k, Choice{});
    return all;
  }
}

/// A line to every rank, by a warp: ids before weights.
MARROW_DEVICE void send_list(const Run& r, const ListLine& line, int token) {
  const Shape& s = r.s;
  const int cells = s.id_cells + s.weight_cells;
  MARROW_EP_ROLLED
  for (int i = kWarpQuads ? lane_index() : 0; i < s.ranks * cells; i += kWarpQuads ? 32 : 1) {
    const int c = s.by_ranks.quotient(i);
    // Everybody starts at another peer.
    int peer = s.rank + 1 + i - c * s.ranks;
    if (peer >= s.ranks) peer -= s.ranks;
    const bool ids = c < s.id_cells;
    const int nth = ids ? c : c - s.id_cells;
    std::uint32_t word[3];  // a cell carries 12 bytes of either
    std::memcpy(word,
                (ids ? reinterpret_cast<const std::byte*>(line.id)
                     : reinterpret_cast<const std::byte*>(line.weight)) +
                    nth * 12,
                12);
    const Cell16 cell = epoch_cell(word[0], word[1], word[2], r.epoch);
    const std::uint64_t offset = 16 +
                                 (ids ? static_cast<std::uint64_t>(token) * s.id_cells
                                      : static_cast<std::uint64_t>(s.tokens) * s.id_cells +
                                            static_cast<std::uint64_t>(token) * s.weight_cells) *
                                     16 +
                                 nth * 16;
    if (s.is_far(peer)) {
      store_cell(
          r.local + s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride + offset,
          cell);
    } else if (!r.is_failed(peer)) {
      store_cell(r.peer(peer) + s.meta_at(r.set, s.rank) + offset, cell);
    }
  }
}

/// What the handle keeps of choice k.
MARROW_DEVICE void keep_choice(const Run& r, std::uint64_t first_choice, int k, const Choice& c) {
  const Shape& s = r.s;
  r.table<std::int16_t>(s.own_rank)[first_choice + k] =
      static_cast<std::int16_t>(c.id < 0 ? -1 : c.rank);
  r.table<float>(s.own_weights)[first_choice + k] = c.weight;
  if (c.first)
    r.table<std::int16_t>(s.own_sorted)[first_choice + c.ordinal] =
        static_cast<std::int16_t>(c.rank);
}

/// Lists of this rank's tokens, the head that says how many they are, and what the handle keeps of them. Blocks 0 ..
/// blocks-1, whose warps work on their own.
MARROW_DEVICE void send_lists(const Run& r, const DispatchArgs& a, int block, int blocks,
                              FirstChoice ahead) {
  const Shape& s = r.s;
  std::int32_t tokens = tokens_of(s, a);
  const std::uint32_t flags = tokens < 0;
  if (tokens < 0) {
    tokens = 0;
    r.note(Status::invalid);
  }
  if (block == 0) {
    for (int i = thread_index(); i < s.ranks; i += block_size()) {
      int peer = s.rank + 1 + i;
      if (peer >= s.ranks) peer -= s.ranks;
      const Cell16 head = epoch_cell(flags, 0, static_cast<std::uint32_t>(tokens), r.epoch);
      if (s.is_far(peer)) {
        store_cell(r.local + s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride,
                   head);
      } else if (!r.is_failed(peer)) {
        store_cell(r.peer(peer) + s.meta_at(r.set, s.rank), head);
      }
    }
    if (thread_index() == 0) r.table<HandleHead>(0)->tokens = tokens;
  }
  auto* lines = dynamic_shared<ListLine>(kNumbersBytes);
  const int warps = (block_size() + warp_lanes() - 1) / warp_lanes();
  const int all_lines = warps < kTokensAtOnce ? warps : kTokensAtOnce;
  const int mine = thread_index() / warp_lanes();
  const std::uint32_t all = full_mask();
  if (mine >= all_lines || (!kWarpQuads && lane_index() != 0)) return;
  ListLine& line = lines[mine];
  bool loaded = true;
  MARROW_EP_ROLLED
  for (int token = block + mine * blocks; token < tokens; token += all_lines * blocks) {
    const std::uint64_t first_choice = static_cast<std::uint64_t>(token) * s.top_k;
    Choice mine_of_list;  // kWarpQuads: the lane's
    const int ranks = each_choice(r, a, token, ahead, loaded, true, [&](int k, const Choice& c) {
      if (k < kMaxIdCells * kIdsPerCell) line.id[k] = static_cast<std::int16_t>(c.id);
      if (k < kMaxWeightCells * kWeightsPerCell) line.weight[k] = c.weight;
      if (k >= s.top_k) return;
      if constexpr (kWarpQuads) {
        mine_of_list = c;
      } else {
        keep_choice(r, first_choice, k, c);
      }
    });
    loaded = false;
    if constexpr (kWarpQuads) warp_sync(all);  // the line is complete
    send_list(r, line, token);
    if constexpr (kWarpQuads) {
      if (lane_index() < s.top_k) keep_choice(r, first_choice, lane_index(), mine_of_list);
    }
    if (lane_index() == 0) r.table<std::int32_t>(s.own_distinct)[token] = ranks;
    if constexpr (kWarpQuads) warp_sync(all);  // the next token takes this line
  }
}

/// One token's list, from its id cells.
struct List {
  Cell16 cell[kMaxIdCells];
  bool here = false;
  MARROW_DEVICE int id(int k) const {
    const std::uint32_t word = word_of(cell[k / kIdsPerCell], k % kIdsPerCell / 2);
    return static_cast<std::int16_t>(word >> (k % 2 * 16));
  }
};

/// The source's number of tokens, -1: not known yet.
MARROW_DEVICE std::int32_t look_at_head(const std::byte* meta, std::uint32_t epoch) {
  const Cell16 head = load_cell(meta);
  return mark_of(head) == epoch ? static_cast<std::int32_t>(word_of(head, 2)) : -1;
}

/// Whether a head that was looked at says that there is no such token.
MARROW_DEVICE bool is_past(int token, std::int32_t head) { return head >= 0 && token >= head; }

/// One look at a list.
MARROW_DEVICE bool look_at_list(const Shape& s, const std::byte* meta, int token,
                                std::uint32_t epoch, List* list) {
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
  list->here = here;
  return here;
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

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
