// SPDX-License-Identifier: Apache-2.0
// Where everything lies in a Group's window: plain numbers, the same on every rank, worked out once on the
// host and handed to the kernels by value. Transport format of a dispatched row:
//
//   data cells   the row's bytes (fp8: e4m3; opaque: row then scales), 16 bytes each
//   extra cells  one for every 32 data cells (a "quad": 512 bytes, what a GPU's warp carries at once)
//
// fp8: the extra cell holds the four scales of its quad's 512 channels. No cell of a fp8 row ever ends in an all-ones word
// (a NaN is 0x7f, scales are no NaN), so all-ones, the sentinel, means "not here yet".
// Raw rows may hold anything: the lowest bit of each cell's last word is cleared, and the extra cell holds the 32
// bits that were there: {0, 0, bits, epoch}.
#pragma once

#include <cstdint>

#include "marrow/abi/device_communicator.h"
#include "marrow/ep.hpp"

namespace marrow::ep {

inline constexpr int kQuadCells = 32;
inline constexpr int kPieceQuads =
    4;  ///< neighbouring quads of a row that a GPU's warp carries together
inline constexpr int kMaxTopK = 32;
inline constexpr std::uint32_t kSentinel = 0xffffffffu;
inline constexpr int kIdsPerCell = 6;      // int16 in 12 bytes; the last word is the epoch
inline constexpr int kWeightsPerCell = 3;  // float

/// Division by a number that is known at set-up: two multiplications. Exact for n < 2^30 and divisors to 2^16.
struct Divisor {
  std::uint64_t inverse = 0;  ///< 2^64 / divisor, rounded up; 0: divisor 1
  MARROW_HOST_DEVICE static Divisor by(std::uint32_t divisor) {
    return {divisor > 1 ? ~std::uint64_t{0} / divisor + 1 : 0};
  }
  MARROW_HOST_DEVICE int quotient(int n) const {
    const auto value = static_cast<std::uint32_t>(n);
    const std::uint64_t low = static_cast<std::uint32_t>(inverse) * std::uint64_t{value} >> 32;
    const std::uint64_t high = (inverse >> 32) * value;
    return inverse ? static_cast<int>((high + low) >> 32) : n;
  }
};

/// Remainder of any 64-bit number by one that is known at set-up.
struct Modulus {
  std::uint64_t inverse = 0;  ///< 2^64 / divisor, rounded down; 0: divisor 1
  std::uint32_t divisor = 1;
  MARROW_HOST_DEVICE static Modulus by(std::uint32_t divisor) {
    return {divisor > 1 ? (~std::uint64_t{0} - divisor + 1) / divisor + 1 : 0, divisor};
  }
  MARROW_HOST_DEVICE std::uint32_t remainder(std::uint64_t n) const {
    if (inverse == 0) return 0;
#if defined(__CUDA_ARCH__)
    const std::uint64_t quotient = __umul64hi(n, inverse);
#else
    __extension__ using Wide = unsigned __int128;
    const auto quotient = static_cast<std::uint64_t>(Wide{n} * inverse >> 64);
#endif
    const auto rest = static_cast<std::uint32_t>(n - quotient * divisor);  // below 2 * divisor
    return rest < divisor ? rest : rest - divisor;
  }
};

/// A token of a source in one word, since a division to take a slot (source * M + token) apart costs time.
struct Origin {
  std::uint32_t word = 0;  ///< source << 16 | token
  MARROW_HOST_DEVICE static Origin of(int source, int token) {
    return {static_cast<std::uint32_t>(source) << 16 | static_cast<std::uint32_t>(token)};
  }
  MARROW_HOST_DEVICE int source() const { return static_cast<int>(word >> 16); }
  MARROW_HOST_DEVICE int token() const { return static_cast<int>(word & 0xffff); }
  MARROW_HOST_DEVICE int slot(int tokens) const { return source() * tokens + token(); }
};

/// Expert rows of one token that a rank received, as combine needs them. By entry; if rows were placed by a kernel of
/// their own, by slot.
struct Record {
  std::int16_t count;    ///< experts of ours the token chose
  std::int16_t ordinal;  ///< how many lower ranks it chose
  Origin origin;
  std::int32_t reserved[2];
  // Then int32 rows (l * C + i, or -1: dropped), then float weights; `count` of each are set. There is room for K of
  // each, rounded up to 4, so that both are read 16 bytes at a time.
};
static_assert(sizeof(Record) == 16);

/// One expert row that goes back to its token's owner.
struct Pair {
  Origin origin;
  std::int32_t k;    ///< column of the token's list
  std::int64_t row;  ///< l * C + i; -1: dropped; -2 - n: the n-th of its record
};
static_assert(sizeof(Pair) == 16);

/// First words of a handle.
struct HandleHead {
  std::int32_t tokens;   ///< of ours, in this batch
  std::int32_t entries;  ///< (source, token) that reached us
  std::int32_t pairs;    ///< rows of them
  std::int32_t reserved;
};

/// First words of the control part, read and written by kernels only. Per-rank arrays follow.
struct Control {
  std::uint64_t dispatch_sent;  ///< number of the next batch to send, and so on
  std::uint64_t dispatch_received;
  std::uint64_t combine_sent;
  std::uint64_t combine_received;
  std::uint64_t signals_from;  ///< batch number at which signals counted 0
  std::uint64_t combine_signals_from;
  std::uint64_t any_failed;  ///< failed[] holds a rank
  std::uint64_t
      stopped;  ///< Status for which a source was given up: kernels exchange nothing until reset
  std::uint64_t
      started;  ///< when the first kernel of the running receive started, if there are several
  std::uint64_t arrived[4];  ///< blocks of the running kernel that have read its numbers
  std::uint64_t status;      ///< worst Status
  std::uint64_t dispatches;
  std::uint64_t combines;
  std::uint64_t duplicates;
  std::uint64_t out_of_range;
  std::uint64_t overflow;
};

/// All sizes and offsets. Offsets are bytes from the window's start.
struct Shape {
  std::int32_t ranks, rank, tokens /* M */, top_k, hidden;
  std::int32_t experts, local, first,
      most_local;        ///< all; ours; our first id; the largest of all ranks
  std::int32_t uniform;  ///< experts of each rank if all have the same number, else 0
  std::int32_t capacity;
  std::int32_t sets;
  std::int32_t row_cells;      ///< data cells of a row whose bytes go to the output's rows
  std::int32_t data_cells;     ///< ... and of its opaque scales
  std::int32_t quads;          ///< extra cells
  std::int32_t pieces;         ///< of kPieceQuads quads, the last one smaller
  std::int32_t scale_words;    ///< words of one row's scales in the output
  std::int32_t combine_cells;  ///< of a bf16 row
  std::int32_t combine_quads;
  std::int32_t combine_twos;    ///< pairs of neighbouring quads, the last one maybe alone
  std::int32_t combine_pieces;  ///< likewise of kPieceQuads quads
  std::int32_t id_cells, weight_cells;
  std::int32_t mask_words;   ///< of one source: bits of its tokens
  std::int32_t record_rows;  ///< K rounded up to 4
  std::int32_t per_token;    ///< min(K, most_local): rows a token can have here
  std::uint8_t fp8, rank_major, column_major, power_of_two, packed, place_in_block, far_any,
      reserved;
  std::uint32_t input_row_bytes, scale_bytes;
  std::uint64_t row_stride, combine_stride, meta_stride, record_stride;
  std::uint64_t meta, rows, combine, hello;             ///< receive buffers
  std::uint64_t stage_meta, stage_rows, stage_combine;  ///< on their way to far peers
  std::uint64_t control, failed, given_up, verdict, waited,
      expert_rank;  ///< see Control; u32[R] masked, u32[R] given up here, u64[R], u64[3R], u16[E]
  std::uint64_t handles, handle_stride;
  // Within a handle:
  std::uint64_t counts, source, weights, expert_ids, list, pairs, records;
  std::uint64_t own_rank, own_sorted, own_distinct, own_weights;
  std::uint64_t deadline_ns;
  Divisor by_ranks, by_tokens, by_top_k, by_uniform, by_quads, by_pieces, by_combine_quads,
      by_combine_twos, by_combine_pieces;
  Modulus by_sets;
  std::uint64_t far[kMaxRanks / 64];  ///< bit r: rank r is reached by puts and signals

  MARROW_HOST_DEVICE bool is_far(int peer) const {
    return far_any && (far[peer / 64] >> (peer % 64) & 1);
  }
  MARROW_HOST_DEVICE int rows_per_batch() const { return ranks * tokens; }
  MARROW_HOST_DEVICE std::uint64_t meta_at(int set, int source) const {
    return meta + (static_cast<std::uint64_t>(set) * ranks + source) * meta_stride;
  }
  MARROW_HOST_DEVICE std::uint64_t row_at(int set, int source, int token) const {
    return rows +
           ((static_cast<std::uint64_t>(set) * ranks + source) * tokens + token) * row_stride;
  }
  MARROW_HOST_DEVICE std::uint64_t combine_at(int set, int token, int column) const {
    return combine +
           ((static_cast<std::uint64_t>(set) * tokens + token) * top_k + column) * combine_stride;
  }
  MARROW_HOST_DEVICE std::uint64_t hello_at(int set, int source) const {
    return hello + (static_cast<std::uint64_t>(set) * ranks + source) * 16;
  }
};

/// Shared memory of a receiving block: the numbers of the batch, if it places rows itself, all it knows, and a line for each
/// worker: the output rows it writes to.
inline constexpr int kNumbersBytes = 32;  ///< at the start of every block's
inline constexpr int kTableWorkers =
    8;  ///< blocks with fewer workers have none that does only tables
inline constexpr int kMostWorkers = 16;  ///< of a GPU's block
struct PlaceMemory {
  std::uint32_t taken, heads, masks, any, prefixes, any_prefix, ids, list, counts, bases, lines;
  MARROW_HOST_DEVICE std::uint32_t bytes(const Shape& s, int workers) const {
    return lines + static_cast<std::uint32_t>(workers * s.record_rows) * 4;
  }
};
/// Columns that rows are counted in: experts, or (rank-major) one.
MARROW_HOST_DEVICE constexpr int columns_of(const Shape& s) { return s.rank_major ? 1 : s.local; }
MARROW_HOST_DEVICE constexpr int any_words(const Shape& s) {
  return (s.ranks * s.tokens + 31) / 32;
}
/// From one column's words to the next one's: odd, so that a thread a column meets no other in a bank.
MARROW_HOST_DEVICE constexpr int column_stride(const Shape& s) {
  return (s.ranks * s.mask_words) | 1;
}
/// Words from one token's ids to the next one's.
MARROW_HOST_DEVICE constexpr int ids_stride(const Shape& s) { return s.id_cells * kIdsPerCell / 2; }
MARROW_HOST_DEVICE inline PlaceMemory place_memory(const Shape& s) {
  PlaceMemory m{};
  const auto words = static_cast<std::uint32_t>(column_stride(s));
  const auto columns = static_cast<std::uint32_t>(columns_of(s));
  const auto slots = static_cast<std::uint32_t>(s.ranks * s.tokens);
  std::uint32_t at = kNumbersBytes;
  const auto take = [&at](std::uint32_t bytes) {
    const std::uint32_t here = at;
    at += (bytes + 15) & ~15u;
    return here;
  };
  m.lines = at;
  if (!s.place_in_block) return m;
  m.taken = take(4);
  m.heads = take(static_cast<std::uint32_t>(s.ranks) * 4);
  m.masks = take(columns * words * 4);
  m.any =
      take(static_cast<std::uint32_t>(any_words(s)) * 4);  // follows the masks: cleared together
  m.prefixes = take(columns * words * 4);
  m.any_prefix = take(static_cast<std::uint32_t>(any_words(s)) * 4);
  m.ids = take(slots * static_cast<std::uint32_t>(ids_stride(s)) * 4);
  m.list = take(slots * 4);
  m.counts = take(columns * 4);
  m.bases = take(columns * 4);
  m.lines = at;
  return m;
}

/// Works out everything but `rank`'s own numbers from a checked config. far: one bool a rank.
struct Plan {
  Shape shape;
  MemoryNeeded memory;
};
/// @throws Error(invalid_argument) naming the field, its value and its range
/// @param staging  some rank has far peers: all windows have the same size
Plan make_plan(const Config& config, int rank, const std::vector<bool>& far, bool staging = false);
/// Fills the defaults in. @throws Error(invalid_argument)
Config checked(Config config, int ranks, bool on_gpu);

}  // namespace marrow::ep
