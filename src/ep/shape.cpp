// SPDX-License-Identifier: Apache-2.0
#include "ep/shape.hpp"

#include <algorithm>
#include <cstdio>
#include <string>

namespace marrow::ep {
namespace {

/// The most shared memory that placing in the block may take on a GPU.
constexpr std::uint64_t kPlaceBytes = 96 * 1024;

void require(bool good, const char* what, long long value, const char* range) {
  if (good) return;
  throw Error(Code::invalid_argument,
              std::string("ep::Config::") + what + " is " + std::to_string(value), range);
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

std::string MemoryNeeded::text() const {
  char line[256];
  const auto mib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::snprintf(
      line, sizeof line,
      "%.1f MiB: %.1f receive_dispatch, %.1f receive_combine, %.1f staging, %.1f handles, "
      "%.1f control",
      mib(total), mib(receive_dispatch), mib(receive_combine), mib(staging), mib(handles),
      mib(control));
  return line;
}

Config checked(Config c, int ranks, bool on_gpu) {
  require(ranks >= 1 && ranks <= kMaxRanks, "experts.size()", ranks, "one number a rank, 1..1024");
  require(static_cast<int>(c.experts.size()) == ranks, "experts.size()",
          static_cast<long long>(c.experts.size()),
          "give one number for each rank of the communicator");
  long long sum = 0;
  for (int n : c.experts) {
    require(n >= 0 && n <= 2048, "experts[]", n, "0..2048 a rank");
    sum += n;
  }
  require(sum >= 1 && sum <= 2048, "experts (sum)", sum, "1..2048 experts in all");
  require(c.max_tokens >= 1 && c.max_tokens <= 65536, "max_tokens", c.max_tokens, "1..65536");
  require(static_cast<long long>(ranks) * c.max_tokens < (1LL << 31) / 2, "max_tokens",
          c.max_tokens, "ranks * max_tokens must stay below 2^30");
  require(c.hidden >= 1 && c.hidden <= 16384, "hidden", c.hidden, "1..16384 elements");
  require(c.hidden % 8 == 0, "hidden", c.hidden,
          "combine's bf16 rows need a multiple of 8 elements");
  if (c.payload == Payload::fp8)
    require(c.hidden % 16 == 0, "hidden", c.hidden, "a multiple of 16 elements for fp8 rows");
  require(c.top_k >= 1 && c.top_k <= kMaxTopK, "top_k", c.top_k, "1..32");
  if (c.payload == Payload::opaque) {
    require(c.row_bytes >= 16 && c.row_bytes <= 65536 && c.row_bytes % 16 == 0, "row_bytes",
            c.row_bytes, "a multiple of 16, 16..65536");
    require(c.scale_bytes <= 8192 && c.scale_bytes % 4 == 0, "scale_bytes", c.scale_bytes,
            "a multiple of 4, 0..8192");
  }
  require(c.batches_in_flight >= 1 && c.batches_in_flight <= 8, "batches_in_flight",
          c.batches_in_flight, "1..8");
  const int all = ranks * c.max_tokens;
  require(c.capacity >= 0 && c.capacity <= all, "capacity", c.capacity,
          "0 (R*M) .. ranks * max_tokens");
  if (c.capacity == 0) c.capacity = all;
  const long long most = *std::max_element(c.experts.begin(), c.experts.end());
  require(c.layout == Layout::rank_major || most * c.capacity < (1LL << 31), "capacity", c.capacity,
          "the largest number of experts of a rank times capacity must stay below 2^31");
  require(c.layout == Layout::rank_major ||
              static_cast<long long>(all) * std::min<long long>(c.top_k, most) < (1LL << 31),
          "max_tokens", c.max_tokens,
          "ranks * max_tokens * the most choices of a token on one rank must stay below 2^31");
  require(c.handles >= 0 && c.handles <= 64, "handles", c.handles, "0 (2*F) .. 64");
  if (c.handles == 0) c.handles = 2 * c.batches_in_flight;
  require(c.max_sms >= 0 && c.max_sms <= 1024, "max_sms", c.max_sms, "0 (all) .. 1024");
  if (c.max_sms == 0 && !on_gpu) c.max_sms = 1;
  if (c.threads == 0) c.threads = on_gpu ? 512 : 1;
  require(c.threads >= 1 && c.threads <= 1024, "threads", c.threads, "1..1024");
  if (on_gpu)
    require(c.threads % 32 == 0 && c.threads <= 512, "threads", c.threads,
            "a multiple of 32, at most 512, on a GPU");
  require(c.deadline.count() >= 1 && c.deadline.count() <= 3600000, "deadline", c.deadline.count(),
          "1 ms .. 1 h");
  return c;
}

Plan make_plan(const Config& c, int rank, const std::vector<bool>& far, bool staging) {
  Plan plan{};
  Shape& s = plan.shape;
  s.ranks = static_cast<int>(c.experts.size());
  s.rank = rank;
  s.tokens = c.max_tokens;
  s.top_k = c.top_k;
  s.hidden = c.hidden;
  s.uniform = c.experts[0];
  for (int r = 0; r < s.ranks; ++r) {
    if (r < rank) s.first += c.experts[r];
    s.experts += c.experts[r];
    s.most_local = std::max(s.most_local, c.experts[r]);
    if (c.experts[r] != c.experts[0]) s.uniform = 0;
    if (far[r]) {
      s.far[r / 64] |= std::uint64_t{1} << (r % 64);
      s.far_any = 1;
    }
  }
  s.local = c.experts[rank];
  s.capacity = c.capacity;
  s.sets = 2 * c.batches_in_flight;
  s.fp8 = c.payload == Payload::fp8;
  s.rank_major = c.layout == Layout::rank_major;
  s.column_major = c.scale_order == ScaleOrder::column_major;
  s.power_of_two = c.scales != Scales::f32;
  s.packed = c.scales == Scales::ue8m0;
  const int groups = (c.hidden + 127) / 128;
  const auto hidden = static_cast<std::uint32_t>(c.hidden);
  s.input_row_bytes = c.payload == Payload::opaque ? c.row_bytes : hidden * 2;
  s.scale_bytes = c.payload == Payload::opaque ? c.scale_bytes : 0;
  const std::uint32_t output_row = s.fp8 ? hidden : s.input_row_bytes;
  s.row_cells = static_cast<int>(output_row / 16);
  s.data_cells = s.row_cells + static_cast<int>((s.scale_bytes + 15) / 16);
  s.quads = (s.data_cells + kQuadCells - 1) / kQuadCells;
  s.pieces = (s.quads + kPieceQuads - 1) / kPieceQuads;
  s.scale_words =
      s.fp8 ? (s.packed ? (groups + 3) / 4 : groups) : static_cast<int>(s.scale_bytes / 4);
  s.combine_cells = c.hidden / 8;
  s.combine_quads = (s.combine_cells + kQuadCells - 1) / kQuadCells;
  s.combine_twos = (s.combine_quads + 1) / 2;
  s.combine_pieces = (s.combine_quads + kPieceQuads - 1) / kPieceQuads;
  s.id_cells = (c.top_k + kIdsPerCell - 1) / kIdsPerCell;
  s.weight_cells = (c.top_k + kWeightsPerCell - 1) / kWeightsPerCell;
  s.mask_words = (c.max_tokens + 31) / 32;
  s.per_token = std::min(c.top_k, std::max(1, s.most_local));
  s.deadline_ns = static_cast<std::uint64_t>(c.deadline.count()) * 1000000;
  s.row_stride = static_cast<std::uint64_t>(s.data_cells + s.quads) * 16;
  s.combine_stride = static_cast<std::uint64_t>(s.combine_cells) * 16;
  const std::uint64_t M = static_cast<std::uint64_t>(s.tokens);
  const std::uint64_t R = static_cast<std::uint64_t>(s.ranks);
  const std::uint64_t K = static_cast<std::uint64_t>(s.top_k);
  s.meta_stride = 16 + M * (s.id_cells + s.weight_cells) * 16;
  s.record_rows = (s.top_k + 3) / 4 * 4;
  s.record_stride = sizeof(Record) + static_cast<std::uint64_t>(s.record_rows) * 8;

  std::uint64_t at = 0;
  const auto take = [&at](std::uint64_t bytes) {
    const std::uint64_t here = at;
    at = round_up(at + bytes, 256);
    return here;
  };
  const std::uint64_t sets = static_cast<std::uint64_t>(s.sets);
  MemoryNeeded& m = plan.memory;
  s.meta = take(sets * R * s.meta_stride);
  s.rows = take(sets * R * M * s.row_stride);
  m.receive_dispatch = at;
  s.hello = take(sets * R * 16);
  s.combine = take(sets * M * K * s.combine_stride);
  m.receive_combine = at - m.receive_dispatch;
  std::uint64_t before = at;
  if (s.far_any || staging) {
    // 2*F sets as well: a NIC may still read a set when the next batch is written.
    s.stage_meta = take(sets * s.meta_stride);
    s.stage_rows = take(sets * M * s.row_stride);
    s.stage_combine = take(sets * R * M * s.per_token * s.combine_stride);
  }
  m.staging = at - before;
  before = at;
  s.control = take(sizeof(Control));
  s.failed = take(R * 4);
  s.given_up = take(R * 4);
  s.verdict = take(R * 8);
  s.waited = take(3 * R * 8);
  s.expert_rank = take(static_cast<std::uint64_t>(s.experts) * 2);
  m.control = at - before;
  before = at;

  // A handle, from its own start.
  const std::uint64_t window_at = at;
  at = sizeof(HandleHead);
  at = round_up(at, 256);
  const std::uint64_t L = static_cast<std::uint64_t>(s.most_local);
  const std::uint64_t output_rows = s.rank_major ? R * M : L * s.capacity;
  s.counts = take(std::max<std::uint64_t>(s.rank_major ? R : L, 1) * 4);
  s.source = take(output_rows * 4);
  s.weights = take((s.rank_major ? R * M * K : output_rows) * 4);
  s.expert_ids = take(s.rank_major ? R * M * K * 4 : 0);
  s.list = take(R * M * 4);
  s.pairs = take(s.rank_major ? 0 : R * M * s.per_token * sizeof(Pair));
  s.records = take(R * M * s.record_stride);
  s.own_rank = take(M * K * 2);
  s.own_sorted = take(M * K * 2);
  s.own_distinct = take(M * 4);
  s.own_weights = take(M * K * 4);
  s.handle_stride = at;
  at = window_at;
  s.handles = take(s.handle_stride * static_cast<std::uint64_t>(c.handles));
  m.handles = at - before;
  m.total = at;
  s.by_ranks = Divisor::by(static_cast<std::uint32_t>(s.ranks));
  s.by_tokens = Divisor::by(static_cast<std::uint32_t>(s.tokens));
  s.by_sets = Modulus::by(static_cast<std::uint32_t>(s.sets));
  s.by_top_k = Divisor::by(static_cast<std::uint32_t>(s.top_k));
  s.by_quads = Divisor::by(static_cast<std::uint32_t>(s.quads));
  s.by_pieces = Divisor::by(static_cast<std::uint32_t>(s.pieces));
  s.by_combine_quads = Divisor::by(static_cast<std::uint32_t>(s.combine_quads));
  s.by_combine_twos = Divisor::by(static_cast<std::uint32_t>(s.combine_twos));
  s.by_combine_pieces = Divisor::by(static_cast<std::uint32_t>(s.combine_pieces));
  s.by_uniform = Divisor::by(static_cast<std::uint32_t>(std::max(s.uniform, 1)));
  // Without products that could overflow: then it is too large anyway.
  const std::uint64_t most = (R * M) * (K * 2 + 16) + static_cast<std::uint64_t>(columns_of(s)) *
                                                          (R * s.mask_words * 8 + 16);
  s.place_in_block = most < (1u << 30);
  if (s.place_in_block) s.place_in_block = place_memory(s).bytes(s, kMostWorkers) < kPlaceBytes;
  return plan;
}

}  // namespace marrow::ep
