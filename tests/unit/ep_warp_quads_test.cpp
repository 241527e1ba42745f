// SPDX-License-Identifier: Apache-2.0
// The kernels of ep with the GPU's division of work, a quad of cells a warp of 32 lanes, on the CPU device, where warps are
// threads that ThreadSanitizer sees. (Built with ep's sources and MARROW_EP_WARP_QUADS; run with MARROW_CPU_LANES=32.)
#include <gtest/gtest.h>

#include "ep/launches.hpp"
#include "ep/random_scenario.hpp"
#include "ep/shape.hpp"
#include "marrow/device.cuh"
#include "thread_ranks.hpp"

namespace marrow::ep_test {
namespace {

void run(int ranks, const Scenario& scenario) {
  const auto results = test::as_threads(ranks, [&](int rank, const UniqueId& id) {
    Communicator comm(id, ranks, rank, {});
    HostMemory memory;
    std::string wrong;
    {
      Checker checker(comm, scenario, memory);
      wrong = checker.run();
      checker.group().close();
    }
    comm.close();
    return wrong;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "") << ranks;
}

Scenario small(int ranks) {
  Scenario s;
  s.config.experts.assign(static_cast<std::size_t>(ranks), 5);
  s.config.max_tokens = 9;
  s.config.hidden = 1040;  // two whole quads of fp8, and a cell
  s.config.top_k = 4;
  s.config.threads = 32;
  s.config.max_sms = 1;
  s.config.deadline = std::chrono::seconds(20);
  s.tokens = {9, 4};
  s.batches = 2;
  return s;
}

TEST(EpWarpQuads, OneBlockDoesBoth) {
  run(2, small(2));
  Scenario s = small(1);
  s.config.threads = 64;
  run(1, s);
}

TEST(EpWarpQuads, OtherBlocksReceive) {
  Scenario s = small(1);
  s.config.max_sms = 4;
  s.config.threads = 32;
  run(1, s);
}

// Blocks of 8 workers: one of them writes tables only.
TEST(EpWarpQuads, WorkersWithPartsOfTheirOwn) {
  Scenario s = small(1);
  s.config.threads = 256;
  s.config.max_sms = 4;
  s.config.top_k = 9;
  s.batches = 1;
  run(1, s);
}

TEST(EpWarpQuads, OpaqueRows) {
  Scenario s = small(2);
  s.config.payload = ep::Payload::opaque;
  s.config.row_bytes = 528;
  s.config.scale_bytes = 36;
  run(2, s);
  s.config.payload = ep::Payload::bf16;
  s.config.scale_bytes = 0;
  s.config.hidden = 264;
  s.config.layout = ep::Layout::rank_major;
  run(2, s);
}

TEST(EpWarpQuads, RandomSizes) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int ranks = 1 + static_cast<int>(seed % 2);
    Scenario s = random_scenario(seed, ranks, 5, seed % 3 == 0 ? 96 : 32);
    s.batches = 1;
    run(ranks, s);
  }
}

// Blocks of 9 warps, of which one writes tables only until rows run out; more tokens than a block takes at once; lists
// of 7 that do not fill a warp; a last quad of one cell.
TEST(EpWarpQuads, OneLargeBlock) {
  Scenario s = small(1);
  s.config.threads = 288;
  s.config.top_k = 7;
  s.config.max_tokens = 37;
  s.config.hidden = 16 * 33;
  s.config.capacity = 8;
  s.config.scales = ep::Scales::ue8m0;
  s.duplicate = s.foreign = 0.2;
  s.tokens = {19};
  s.batches = 1;
  run(1, s);
}

// Fewer entries than blocks: all is shared out by pieces. Scales longer than rows; a rank without experts.
TEST(EpWarpQuads, FewEntriesAndMuchOfThem) {
  Scenario s = small(2);
  s.config.experts = {0, 45};
  s.config.threads = 32;
  s.config.max_sms = 4;
  s.config.top_k = 32;
  s.config.max_tokens = 3;
  s.config.payload = ep::Payload::opaque;
  s.config.row_bytes = 48;
  s.config.scale_bytes = 8192;
  s.config.hidden = 8;
  s.tokens = {2, 1};
  s.split = true;
  s.batches = 2;
  s.config.batches_in_flight = 2;
  run(2, s);
}

// Sizes that do not fit into shared memory, and a source reached by puts.
TEST(EpWarpQuads, PlacedByAKernelOfItsOwn) {
  Scenario s = small(1);
  s.config.threads = 128;
  s.config.max_sms = 2;
  s.config.experts = {2};
  s.config.max_tokens = 1300;
  s.config.top_k = 32;
  s.config.capacity = 30;
  s.config.hidden = 48;
  s.config.protocol = ep::Protocol::signals;
  s.tokens = {40};
  s.batches = 1;
  run(1, s);
}

/// Rank 0 on memory of the test's own, so that its receive buffers can be looked into; all other ranks are masked, and
/// there is no memory of theirs.
class Alone {
 public:
  Alone(const ep::Config& wanted, int blocks, int threads)
      : config(ep::checked(wanted, static_cast<int>(wanted.experts.size()), false)) {
    const std::size_t ranks = config.experts.size();
    const ep::Plan plan = ep::make_plan(config, 0, std::vector<bool>(ranks));
    shape = plan.shape;
    memory.resize(plan.memory.total / 16 + 1);
    block.state = kControlOk;
    comm.nranks = static_cast<int>(ranks);
    comm.control = &block;
    comm.wait_ns = 20'000'000'000;
    window.local = reinterpret_cast<std::byte*>(memory.data());
    target = {Place::cpu(), blocks, threads, nullptr};
    for (std::size_t r = 0; r < ranks; ++r)
      experts.insert(experts.end(), static_cast<std::size_t>(config.experts[r]),
                     static_cast<std::uint16_t>(r));
    failed.assign(ranks, 1);
    failed[0] = 0;
    reset(0);
  }
  void reset(std::uint64_t batch) {
    calls.reset(target, comm, window, shape, batch, failed.data(), experts.data());
  }
  ep::Control& control() { return *at<ep::Control>(shape.control); }
  template <class T>
  T* at(std::uint64_t offset) {
    return reinterpret_cast<T*>(window.local + offset);
  }
  Cell16& cell(std::uint64_t offset) { return *at<Cell16>(offset); }
  /// Cells of `bytes` from `offset` on that are not the mark.
  int taken(std::uint64_t offset, std::uint64_t bytes) {
    int n = 0;
    for (std::uint64_t i = 0; i < bytes; i += 16)
      n += cell(offset + i).low != ~std::uint64_t{0} || cell(offset + i).high != ~std::uint64_t{0};
    return n;
  }

  struct alignas(16) Wide {
    std::byte bytes[16];
  };
  ep::Config config;
  ep::Shape shape;
  std::vector<Wide> memory;
  std::vector<std::uint16_t> experts;
  std::vector<std::uint32_t> failed;
  const ep::Launches& calls = ep::launches(Place::cpu());
  DeviceCommunicator comm{};
  WindowHandle window{};
  ep::Target target{};
  ControlBlock block{};
};

ep::Config rows_of_five_quads(ep::Payload payload) {
  ep::Config c;
  c.experts = {3};
  c.max_tokens = 6;
  c.hidden = payload == ep::Payload::fp8 ? 2064 : 1040;
  c.top_k = 3;
  c.payload = payload;
  c.row_bytes = 2064;
  c.scale_bytes = 36;
  c.deadline = std::chrono::seconds(20);
  return c;
}

// Blocks that send before they receive would overwrite what a batch left behind, so its data shows nothing of that.
TEST(EpWarpQuads, MarksAreBackAfterABatch) {
  for (const ep::Payload payload : {ep::Payload::fp8, ep::Payload::bf16, ep::Payload::opaque}) {
    SCOPED_TRACE("payload " + std::to_string(static_cast<int>(payload)));
    Alone a(rows_of_five_quads(payload), 4, 32);
    const ep::Shape& s = a.shape;
    std::vector<Alone::Wide> rows(6 * 4128 / 16), scales(64), y(18 * 4128 / 16 + 1), ys(18 * 17);
    std::vector<Alone::Wide> z(18 * 4128 / 16), out(6 * 4128 / 16);
    std::vector<std::int64_t> ids = {0, 1, 2, 2, -1, 0, 1, 1, 1, -1, -1, -1, 2, 1, 0, 9, 0, -1};
    a.calls.dispatch(
        a.target, a.comm, a.window, s,
        {.tokens = 6, .rows = rows.data(), .scales = scales.data(), .expert_ids = ids.data()},
        {.rows = y.data(), .scales = ys.data()}, s.handles, ep::Phase::both);
    const int cells = s.fp8 ? s.data_cells + s.quads : s.data_cells;
    for (int set = 0; set < s.sets; ++set)
      for (int token = 0; token < 6; ++token)
        ASSERT_EQ(a.taken(s.row_at(set, 0, token), static_cast<std::uint64_t>(cells) * 16), 0);
    for (const auto mode : {ep::CombineMode::exact, ep::CombineMode::fast}) {
      a.calls.combine(a.target, a.comm, a.window, s, {.rows = z.data(), .mode = mode},
                      {.rows = out.data()}, s.handles, ep::Phase::both);
      ASSERT_EQ(a.taken(s.combine, s.sets * 6 * 3 * s.combine_stride), 0);
    }
    EXPECT_EQ(a.control().status, 0u);
    EXPECT_EQ(a.control().duplicates, 2u);
    EXPECT_EQ(a.control().out_of_range, 1u);
  }
}

// A list is here, and of its row quads 0, 2 and 4; of quad 1 a cell is missing and of quad 3 the extra cell.
TEST(EpWarpQuads, QuadsThatDoNotComeAreZeros) {
  for (const ep::Payload payload : {ep::Payload::fp8, ep::Payload::bf16}) {
    SCOPED_TRACE("payload " + std::to_string(static_cast<int>(payload)));
    ep::Config c = rows_of_five_quads(payload);
    c.deadline = std::chrono::milliseconds(200);
    Alone a(c, 2, 64);
    const ep::Shape& s = a.shape;
    ASSERT_EQ(s.quads, 5);
    a.control().dispatch_sent = 1;
    const std::uint64_t meta = s.meta_at(0, 0);
    const auto word = [](std::uint64_t low, std::uint64_t high) { return low | high << 32; };
    a.cell(meta) = {0, word(1, 1)};                                    // one token
    a.cell(meta + 16) = {word(0xffff0002, 0xffff0000), word(~0u, 1)};  // experts 2, -1, 0
    a.cell(meta + 16 + 6 * 16) = {word(0x3f800000, 0), word(0x40000000, 1)};
    const std::uint64_t row = s.row_at(0, 0, 0);
    for (int i = 0; i < s.data_cells; ++i)
      if (i != 40) a.cell(row + i * 16u) = {word(2, 4), word(6, 8)};
    for (int quad = 0; quad < 5; ++quad)
      if (quad != 3)
        a.cell(row + static_cast<unsigned>(s.data_cells + quad) * 16) =
            s.fp8 ? Cell16{word(1, 2), word(3, 4)} : Cell16{0, word(~0u, 1)};
    const auto bytes = static_cast<std::size_t>(s.row_cells) * 16;
    std::vector<Alone::Wide> y(18 * bytes / 16), ys(18 * 17);
    a.calls.dispatch(a.target, a.comm, a.window, s, {}, {.rows = y.data(), .scales = ys.data()},
                     s.handles, ep::Phase::receive);
    EXPECT_EQ(a.control().status, static_cast<std::uint64_t>(Status::timeout));
    EXPECT_EQ(a.control().stopped, static_cast<std::uint64_t>(Status::timeout));
    const auto* out = reinterpret_cast<const std::uint32_t*>(y.data());
    for (const std::size_t expert : {0, 2}) {
      for (int i = 0; i < s.row_cells; ++i) {
        const bool here = i / 32 != 1 && i / 32 != 3;
        const std::uint32_t* cell =
            out + (expert * 6 * bytes) / 4 + static_cast<std::size_t>(i) * 4;
        EXPECT_EQ(cell[0], here ? 2u : 0u) << expert << " " << i;
        EXPECT_EQ(cell[3], here ? s.fp8 ? 8u : 9u : 0u) << expert << " " << i;
      }
    }
    EXPECT_EQ(a.at<std::int32_t>(s.handles + s.counts)[0], 1);
    EXPECT_EQ(a.at<std::int32_t>(s.handles + s.counts)[1], 0);
    EXPECT_EQ(a.at<std::int32_t>(s.handles + s.counts)[2], 1);
    // What came is cleared, what did not is left to reset.
    EXPECT_EQ(a.taken(row, 32 * 16), 0);
    EXPECT_EQ(a.taken(row + 64 * 16, 32 * 16), 0);
    EXPECT_EQ(a.taken(row + 32 * 16, 32 * 16), 31);
    a.reset(5);
    EXPECT_EQ(a.taken(row, static_cast<std::uint64_t>(s.data_cells) * 16), 0);
    EXPECT_EQ(a.control().stopped, 0u);
  }
}

// Their experts give zeros; nothing is sent to them or waited for.
TEST(EpWarpQuads, MaskedRanks) {
  for (const int blocks : {1, 5}) {
    ep::Config c = rows_of_five_quads(ep::Payload::bf16);
    c.experts = {3, 2, 4};
    c.batches_in_flight = 2;
    Alone a(c, blocks, 32);
    const ep::Shape& s = a.shape;
    const std::size_t row = 1040 * 2 / 16;
    std::vector<Alone::Wide> rows(6 * row), y(3 * 18 * row), z(3 * 18 * row), out(6 * row);
    const std::vector<std::int64_t> ids = {0, 4, 2, 3, 8, 5, 6, 1, -1, 2, 1, 0, 8, 3, 2, -1, -1, 7};
    const int ours[] = {2, 0, 1, 3, 1, 0};
    for (std::size_t i = 0; i < z.size(); ++i)  // ones
      for (int half = 0; half < 8; ++half)
        reinterpret_cast<std::uint16_t*>(z.data())[i * 8 + static_cast<unsigned>(half)] = 0x3f80;
    for (int batch = 0; batch < 2; ++batch) {
      a.calls.dispatch(a.target, a.comm, a.window, s,
                       {.tokens = 6, .rows = rows.data(), .expert_ids = ids.data()},
                       {.rows = y.data()}, s.handles, ep::Phase::both);
      const auto* counts = a.at<std::int32_t>(s.handles + s.counts);
      EXPECT_EQ(counts[0], 2);
      EXPECT_EQ(counts[1], 2);
      EXPECT_EQ(counts[2], 3);
      for (const auto mode : {ep::CombineMode::exact, ep::CombineMode::fast}) {
        a.calls.combine(a.target, a.comm, a.window, s, {.rows = z.data(), .mode = mode},
                        {.rows = out.data()}, s.handles, ep::Phase::both);
        for (std::size_t i = 0; i < 6 * 1040; ++i)
          ASSERT_EQ(from_bf16(reinterpret_cast<const std::uint16_t*>(out.data())[i]),
                    static_cast<float>(ours[i / 1040]))
              << i << " " << blocks;
      }
    }
    EXPECT_EQ(a.control().status, 0u);
  }
}

}  // namespace
}  // namespace marrow::ep_test

#if MARROW_WITH_CUDA
// The library's, which the sources of ep compiled into this test refer to, is hidden; nothing here runs on a GPU.
namespace marrow::ep {
struct Launches;
const Launches& gpu_launches();
const Launches& gpu_launches() {
  throw Error(Code::unsupported, "ep's kernels for GPUs are not in this test", "use libmarrow");
}
}  // namespace marrow::ep
#endif
