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

/// Tokens that a block works on at once.
inline constexpr int kTokensAtOnce = 16;
inline constexpr int kMaxIdCells = (kMaxTopK + kIdsPerCell - 1) / kIdsPerCell;

/// What a thread loads before it knows the batch's number: a choice of its warp's first token.
struct FirstChoice {
  std::int64_t id = -1;
  float weight = 0;
};

/// A token's choices: on a GPU one a lane, else all with their thread.
struct Choices {
  static constexpr int kMine = kWarpQuads ? 1 : kMaxTopK;
  // Past the last choice they are 0: a list's cells carry whole words of them.
  std::int32_t id[kMine] = {};  ///< -1: ignored, as it is none or repeats an earlier one
  float weight[kMine] = {};     ///< 0: ignored
  bool bad[kMine];              ///< out of range, and not -1
  bool repeats[kMine];
  // What find_ranks finds:
  std::int32_t rank[kMine];  ///< of the expert
  bool first[kMine];         ///< no earlier choice has that rank
  // What order_ranks finds:
  int ordinal[kMine];  ///< position of the rank among the token's ranks, in their order
  int ranks;           ///< how many

  /// visit(k, i): choice k is at i here.
  MARROW_DEVICE void each(const Shape& s, const auto& visit) const {
    if constexpr (kWarpQuads) {
      if (lane_index() < s.top_k) visit(lane_index(), 0);
    } else {
      for (int k = 0; k < s.top_k; ++k) visit(k, k);
    }
  }
  /// Of any choice; past the last one of them it may be anything. All lanes of a warp call.
  MARROW_DEVICE std::uint32_t id_of(int k) const {
    if constexpr (kWarpQuads) {
      return warp_shuffle(0xffffffffu, static_cast<std::uint32_t>(id[0]), k & 31);
    } else {
      return k < kMaxTopK ? static_cast<std::uint32_t>(id[k]) : 0;
    }
  }
  MARROW_DEVICE std::uint32_t weight_of(int k) const {
    if constexpr (kWarpQuads) {
      return warp_shuffle(0xffffffffu, bits_of(weight[0]), k & 31);
    } else {
      return k < kMaxTopK ? bits_of(weight[k]) : 0;
    }
  }
};

/// The batch's tokens of this rank; -1: out of range.
MARROW_DEVICE std::int32_t tokens_of(const Shape& s, const DispatchArgs& a) {
  const std::int32_t tokens = a.device_tokens ? load_cached(a.device_tokens) : a.tokens;
  return tokens >= 0 && tokens <= s.tokens ? tokens : -1;
}

MARROW_DEVICE float weight_of(const DispatchArgs& a, std::uint64_t choice) {
  return a.weights ? a.weights[choice] : 1.0f;
}

/// Warp w of a block takes token block + w * blocks first.
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

/// What a token chose; as little as its list needs. @param ahead  the lanes' choices, if they are `loaded`
MARROW_DEVICE void take_choices(const Shape& s, const DispatchArgs& a, int token, FirstChoice ahead,
                                bool loaded, Choices& c) {
  const std::uint64_t first_choice = static_cast<std::uint64_t>(token) * s.top_k;
  const auto take = [&](int i, FirstChoice choice) {
    const bool good = choice.id >= 0 && choice.id < s.experts;
    c.id[i] = good ? static_cast<std::int32_t>(choice.id) : -1;
    c.bad[i] = !good && choice.id != -1;
    c.weight[i] = choice.weight;
  };
  const auto settle = [&](int i, bool repeats) {
    c.repeats[i] = repeats;
    if (repeats) c.id[i] = -1;
    if (c.id[i] < 0) c.weight[i] = 0;
  };
  if constexpr (kWarpQuads) {
    const int k = lane_index();
    if (!loaded) {
      ahead = {};
      if (k < s.top_k) ahead = {a.ids[first_choice + k], weight_of(a, first_choice + k)};
    }
    take(0, ahead);
    const std::uint32_t same = warp_match(0xffffffffu, c.id[0]);
    settle(0, c.id[0] >= 0 && (same & ((1u << k) - 1)) != 0);
  } else {
    for (int k = 0; k < s.top_k; ++k) {
      const bool here = loaded && k == lane_index();
      take(k, here ? ahead : FirstChoice{a.ids[first_choice + k], weight_of(a, first_choice + k)});
      bool repeats = false;
      for (int other = 0; other < k; ++other)
        repeats |= c.id[k] >= 0 && a.ids[first_choice + other] == c.id[k];
      settle(k, repeats);
    }
  }
}

/// The ranks of a token's choices. A warp's lanes call together.
MARROW_DEVICE void find_ranks(const Run& r, Choices& c) {
  const Shape& s = r.s;
  if constexpr (kWarpQuads) {
    c.rank[0] = c.id[0] < 0 ? -1 : rank_of_expert(s, r.local, c.id[0]);
    const std::uint32_t same_rank = warp_match(0xffffffffu, c.rank[0]);
    c.first[0] = c.id[0] >= 0 && (same_rank & ((1u << lane_index()) - 1)) == 0;
  } else {
    for (int k = 0; k < s.top_k; ++k) {
      c.rank[k] = c.id[k] < 0 ? -1 : rank_of_expert(s, r.local, c.id[k]);
      c.first[k] = c.id[k] >= 0;
      for (int other = 0; other < k; ++other) c.first[k] &= c.rank[other] != c.rank[k];
    }
  }
}

/// Their order. After find_ranks.
MARROW_DEVICE void order_ranks(const Shape& s, Choices& c) {
  c.ranks = 0;
  if constexpr (kWarpQuads) {
    c.ordinal[0] = 0;
    MARROW_EP_ROLLED
    for (int from = 0; from < s.ranks; from += 32) {
      const int rank = c.rank[0] - from;
      const std::uint32_t ranks = warp_or(c.first[0] && rank >= 0 && rank < 32 ? 1u << rank : 0);
      c.ranks += count_lanes(ranks);
      if (rank >= 32) {
        c.ordinal[0] += count_lanes(ranks);
      } else if (rank >= 0) {
        c.ordinal[0] += count_lanes(ranks & ((1u << rank) - 1));
      }
    }
  } else {
    for (int k = 0; k < s.top_k; ++k) {
      c.ranks += c.first[k];
      c.ordinal[k] = 0;
      for (int other = 0; other < s.top_k; ++other)
        c.ordinal[k] += c.first[other] && c.rank[other] < c.rank[k];
    }
  }
}

/// A token's list to every rank, by a warp: ids before weights.
MARROW_DEVICE void send_list(const Run& r, const Choices& choices, int token) {
  const Shape& s = r.s;
  const int cells = s.ranks * (s.id_cells + s.weight_cells);
  const int lanes = kWarpQuads ? 32 : 1;
  MARROW_EP_ROLLED
  for (int from = 0; from < cells; from += lanes) {
    const int i = from + (kWarpQuads ? lane_index() : 0);
    const int c = s.by_ranks.quotient(i);
    // Everybody starts at another peer.
    int peer = s.rank + 1 + i - c * s.ranks;
    if (peer >= s.ranks) peer -= s.ranks;
    const bool ids = c < s.id_cells;
    const int nth = ids ? c : c - s.id_cells;
    std::uint32_t word[3];  // a cell carries 12 bytes of either
    for (int w = 0; w < 3; ++w) {
      const std::uint32_t low = choices.id_of(nth * kIdsPerCell + 2 * w);
      const std::uint32_t high = choices.id_of(nth * kIdsPerCell + 2 * w + 1);
      const std::uint32_t weight = choices.weight_of(nth * kWeightsPerCell + w);
      word[w] = ids ? (low & 0xffff) | high << 16 : weight;
    }
    if (i >= cells) continue;
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

/// What the handle keeps of a token's choices, and what is counted of them.
MARROW_DEVICE void keep_choices(const Run& r, const Choices& c, int token) {
  const Shape& s = r.s;
  const std::uint64_t first_choice = static_cast<std::uint64_t>(token) * s.top_k;
  c.each(s, [&](int k, int i) {
    if (c.bad[i]) add_relaxed<Scope::device>(&r.control()->out_of_range, 1);
    if (c.repeats[i]) add_relaxed<Scope::device>(&r.control()->duplicates, 1);
    r.table<std::int16_t>(s.own_rank)[first_choice + k] = static_cast<std::int16_t>(c.rank[i]);
    r.table<float>(s.own_weights)[first_choice + k] = c.weight[i];
    if (c.first[i])
      r.table<std::int16_t>(s.own_sorted)[first_choice + c.ordinal[i]] =
          static_cast<std::int16_t>(c.rank[i]);
  });
  if (lane_index() == 0) r.table<std::int32_t>(s.own_distinct)[token] = c.ranks;
}

/// Lists of this rank's tokens, the head that says how many they are, and what the handle keeps of them. Blocks 0 ..
/// blocks-1, whose warps work on their own.
MARROW_DEVICE void send_lists(const Run& r, const DispatchArgs& a, int block, int blocks,
                              FirstChoice ahead) {
  const Shape& s = r.s;
  std::int32_t tokens = tokens_of(s, a);
  if (tokens < 0) {
    tokens = 0;
    r.note(Status::invalid);
  }
  if (block == 0) {
    for (int i = thread_index(); i < s.ranks; i += block_size()) {
      int peer = s.rank + 1 + i;
      if (peer >= s.ranks) peer -= s.ranks;
      const Cell16 head = epoch_cell(0, 0, static_cast<std::uint32_t>(tokens), r.epoch);
      if (s.is_far(peer)) {
        store_cell(r.local + s.stage_meta + static_cast<std::uint64_t>(r.set) * s.meta_stride,
                   head);
      } else if (!r.is_failed(peer)) {
        store_cell(r.peer(peer) + s.meta_at(r.set, s.rank), head);
      }
    }
    if (thread_index() == 0) r.table<HandleHead>(0)->tokens = tokens;
  }
  const int warps = (block_size() + warp_lanes() - 1) / warp_lanes();
  const int at_once = warps < kTokensAtOnce ? warps : kTokensAtOnce;
  const int mine = thread_index() / warp_lanes();
  if (mine >= at_once || (!kWarpQuads && lane_index() != 0)) return;
  bool loaded = true;
  MARROW_EP_ROLLED
  for (int token = block + mine * blocks; token < tokens; token += at_once * blocks) {
    Choices choices;
    take_choices(s, a, token, ahead, loaded, choices);
    loaded = false;
    note(Point::choices_taken);
    send_list(r, choices, token);
    note(Point::list_sent);
    find_ranks(r, choices);
    order_ranks(s, choices);
    keep_choices(r, choices, token);
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
  MARROW_EP_UNROLLED
  for (int c = 0; c < kMaxIdCells; ++c) {
    if (c < s.id_cells) {
      list->cell[c] = load_cell(ids + c * 16);
      here &= mark_of(list->cell[c]) == epoch;
    }
  }
  list->here = here;
  return here;
}

MARROW_DEVICE const std::byte* weight_cell(const Run& r, int source, int token, int k) {
  const Shape& s = r.s;
  return r.local + s.meta_at(r.set, source) + 16 +
         (static_cast<std::uint64_t>(s.tokens) * s.id_cells +
          static_cast<std::uint64_t>(token) * s.weight_cells +
          static_cast<unsigned>(k / kWeightsPerCell)) *
             16;
}

/// The weight of a choice, waited for; 0 if it does not come: its source is given up then.
/// @param seen  a look at its cell that was taken before
MARROW_DEVICE float wait_for_weight(const Run& r, int source, int token, int k, Cell16 seen) {
  const auto weight_in = [&](const Cell16& cell) {
    const int x = k % kWeightsPerCell;
    return float_of(x == 0 ? word_of(cell, 0) : x == 1 ? word_of(cell, 1) : word_of(cell, 2));
  };
  if (mark_of(seen) == r.epoch) return weight_in(seen);
  const std::byte* at_cell = weight_cell(r, source, token, k);
  const Status status = wait_until(r.comm, r.time_left(), [&] {
    seen = load_cell(at_cell);
    return mark_of(seen) == r.epoch;
  });
  if (status == Status::ok) return weight_in(seen);
  r.set_failed(source, status);
  return 0.0f;
}
MARROW_DEVICE float wait_for_weight(const Run& r, int source, int token, int k) {
  return wait_for_weight(r, source, token, k, load_cell(weight_cell(r, source, token, k)));
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
