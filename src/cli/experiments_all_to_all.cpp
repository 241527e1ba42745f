// SPDX-License-Identifier: Apache-2.0
// All-to-all with nccl-tests' convention: size is a rank's whole buffer, algbw = size / time, busbw = algbw x (n-1)/n;
// out of place, launch included, average over the ranks, every element checked.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "cli/experiments.hpp"
#include "cli/run_kernel.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

/// Buffers up to this size travel in cells: twice the bytes, but no fence.
constexpr std::uint64_t kSmallBytes = 256 << 10;
constexpr int kBatches = 5;
constexpr int kSenders = 64;    ///< blocks that push, on a GPU with load/store peers
constexpr int kOwnBlocks = 64;  ///< blocks that copy our own chunk
constexpr int kQueueBlocks = 8;
constexpr std::size_t kScratch = 132 * 1024;  ///< stages of bulk copies

std::uint64_t element(std::uint64_t from, std::uint64_t to, std::uint64_t i, std::uint64_t salt) {
  return (from << 56) ^ (to << 48) ^ (salt << 32) ^ (i * 0x9e3779b97f4a7c15ull);
}

/// One size. Collective.
class AllToAll {
 public:
  AllToAll(ExperimentContext& x, std::uint64_t size)
      : x_(x),
        comm_(x.comm),
        n_(static_cast<std::uint64_t>(comm_.nranks())),
        me_(static_cast<std::uint64_t>(comm_.rank())),
        chunk_(std::max<std::uint64_t>(size / n_ / 16 * 16, 16)),
        load_store_(all_load_store()),
        small_(size <= kSmallBytes && load_store_),
        memory_(choose_memory()),
        output_(comm_.allocate(chunk_ * n_, memory_)),
        cells_(comm_.allocate(small_ ? 2 * n_ * (chunk_ / 8) * 16 : 16, memory_)),
        device_(comm_.device_communicator({.contexts = 1,
                                           .signals = static_cast<int>(n_),
                                           .counters = 0,
                                           .barriers = 1,
                                           .packets = static_cast<int>(n_)})),
        input_(comm_.place(), chunk_ * n_, memory_),
        shape_(choose_shape()),
        log_(comm_.place(), shape_.blocks) {
    std::vector<std::uint64_t> values(chunk_ / 8 * n_);
    for (std::uint64_t to = 0; to < n_; ++to) {
      for (std::uint64_t i = 0; i < chunk_ / 8; ++i)
        values[to * (chunk_ / 8) + i] = element(me_, to, i, size);
    }
    salt_ = size;
    input_.upload(values);
    local_ = comm_.register_local(input_.data(), input_.bytes());
    AllToAllArguments& a = arguments_;
    a.comm = device_.handle();
    a.output = output_.handle();
    a.cells = cells_.handle();
    a.input = local_.handle();
    a.chunk = chunk_;
    a.cells_per_peer = small_ ? chunk_ / 8 : 0;
    a.blocks_per_peer = blocks_per_peer_;
    a.own_blocks = own_blocks_;
    a.scratch = static_cast<std::uint32_t>(shape_.shared);
    a.flush = !load_store_;
    a.log = log_.log();
  }

  void close() {
    comm_.barrier();
    device_.close();
    cells_.close();
    output_.close();
  }

  void launch_once() {
    arguments_.epoch = ++epoch_;
    launch_(comm_.place(), shape_, arguments_);
  }

  /// us a launch, averaged over a batch and the ranks; one entry a batch.
  std::vector<double> time(int iterations, int warmup) {
    const int each = std::max(1, iterations / kBatches);
    std::vector<double> us;
    for (int batch = -1; batch < kBatches; ++batch) {
      const int count = batch < 0 ? warmup : each;
      comm_.barrier();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) {
        // A failed peer ends the batch, not only what comes after it; rare enough to cost no time.
        if (i % 64 == 63) comm_.check();
        launch_once();
        if (!comm_.place().on_gpu()) log_.finish(comm_, "alltoall");  // has run: no wait for others
      }
      comm_.synchronize();
      const double mine =
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
              .count() /
          count;
      log_.finish(comm_, "alltoall");
      const auto all = comm_.allgather(&mine, sizeof mine);
      double sum = 0;
      for (const auto& bytes : all) {
        double one = 0;
        std::memcpy(&one, bytes.data(), sizeof one);
        sum += one;
      }
      if (batch >= 0) us.push_back(sum / static_cast<double>(n_));
    }
    return us;
  }

  bool right() const {
    std::vector<std::uint64_t> found(chunk_ / 8 * n_);
    copy_out(comm_.place(), found.data(), output_.data(), found.size() * 8);
    for (std::uint64_t from = 0; from < n_; ++from) {
      for (std::uint64_t i = 0; i < chunk_ / 8; ++i) {
        if (found[from * (chunk_ / 8) + i] != element(from, me_, i, salt_)) return false;
      }
    }
    return true;
  }

  std::uint64_t bytes() const { return chunk_ * n_; }
  Shape shape() const { return shape_; }
  bool small() const { return small_; }

 private:
  bool all_load_store() const {
    const std::vector<PeerInfo> peers = comm_.peers();
    return std::all_of(peers.begin(), peers.end(),
                       [](const PeerInfo& p) { return p.path == Path::lsa; });
  }
  Memory choose_memory() const {
    if (x_.options.memory == "device") return Memory::device;
    if (x_.options.memory == "host") return Memory::host;
    return load_store_ ? Memory::device : default_memory(comm_.place(), Path::proxy);
  }
  Shape choose_shape() {
    const bool gpu = comm_.place().on_gpu();
    const int threads = x_.options.threads > 0 ? x_.options.threads : !gpu ? 1 : small_ ? 512 : 256;
    if (small_) {
      const int wanted = static_cast<int>(
          std::clamp<std::uint64_t>(chunk_ / 8 / static_cast<std::uint64_t>(threads), 1, 32));
      return {x_.options.blocks > 0 ? x_.options.blocks : gpu ? wanted : 1, threads, 0, gpu};
    }
    // On a GPU every SM takes part: an even split among many loses least at the end.
    const int peers = std::max(1, static_cast<int>(n_) - 1);
    const int blocks = x_.options.blocks > 0 ? x_.options.blocks
                       : !gpu                ? 1
                       : load_store_         ? kSenders
                                             : kQueueBlocks;
    blocks_per_peer_ = std::max(1, blocks / peers);
    own_blocks_ = !gpu ? 1 : load_store_ ? kOwnBlocks : kQueueBlocks;
    const int grid = gpu ? blocks_per_peer_ * peers + own_blocks_ : blocks;
    // Few threads cannot keep a link full; the SM's copy engine can.
    return {grid, threads, gpu && load_store_ && threads <= 128 ? kScratch : 0, gpu};
  }

  ExperimentContext& x_;
  Communicator& comm_;
  const std::uint64_t n_, me_, chunk_;
  const bool load_store_, small_;
  const Memory memory_;
  int blocks_per_peer_ = 1, own_blocks_ = 1;
  Window output_, cells_;
  DeviceCommunicatorOwner device_;
  Buffer input_;
  LocalBuffer local_;
  const Shape shape_;
  KernelLog log_;
  AllToAllArguments arguments_;
  void (*const launch_)(const Place&, Shape,
                        const AllToAllArguments&) = small_        ? launch_small_all_to_all
                                                    : load_store_ ? launch_lsa_all_to_all
                                                                  : launch_large_all_to_all;
  std::uint64_t epoch_ = 0, salt_ = 0;
};

}  // namespace

void run_all_to_all(ExperimentContext& x) {
  const bool gpu = x.comm.place().on_gpu();
  for (const std::uint64_t size : sizes_of(x, "1K,64K,1M")) {
    AllToAll work(x, size);
    const std::uint64_t budget = (gpu ? std::uint64_t{64} << 30 : std::uint64_t{64} << 20) / size;
    const int iterations =
        x.options.iterations > 0
            ? x.options.iterations
            : static_cast<int>(std::clamp<std::uint64_t>(budget, 20, gpu ? 2000 : 200));
    if (x.comm.rank() == 0) x.progress.at("alltoall, " + bytes_text(size));
    std::vector<double> us = work.time(
        iterations, x.options.warmup > 0 ? x.options.warmup : std::max(2, iterations / 10));
    const std::uint8_t right = work.right() ? 1 : 0;
    const auto all = x.comm.allgather(&right, 1);
    const bool verified =
        std::all_of(all.begin(), all.end(), [](const auto& one) { return one[0] == std::byte{1}; });
    if (x.comm.rank() == 0) {
      const PathUse use = path_use(x.comm, x.comm.nranks() > 1 ? 1 : 0);
      PerfLine line;
      line.bytes = work.bytes();
      line.iterations = static_cast<std::uint64_t>(iterations);
      line.time = make_row(use, "alltoall time", "us");
      line.time.statistics = statistics_of(us);
      line.time.note = format("host clock, launch included, mean of the ranks, batches of %d",
                              std::max(1, iterations / kBatches));
      line.time.verified = verified;
      line.time.parameters = {{"bytes", static_cast<std::int64_t>(work.bytes())},
                              {"ranks", std::int64_t{x.comm.nranks()}},
                              {"iterations", std::int64_t{iterations}},
                              {"blocks", std::int64_t{work.shape().blocks}},
                              {"threads", std::int64_t{work.shape().threads}},
                              {"form", std::string(work.small() ? "cells" : "puts")},
                              {"in_place", false}};
      std::vector<double> bandwidth;
      bandwidth.reserve(us.size());
      for (const double t : us) bandwidth.push_back(static_cast<double>(work.bytes()) / t * 1e-3);
      line.bandwidth = make_row(use, "alltoall algbw", "GB/s");
      line.bandwidth->statistics = statistics_of(bandwidth);
      line.bandwidth->samples = std::move(bandwidth);
      line.bandwidth->parameters = line.time.parameters;
      line.bandwidth->verified = verified;
      line.bandwidth->note = "algbw = size / time, size is a rank's whole buffer";
      line.time.samples = std::move(us);
      x.lines.push_back(std::move(line));
    }
    work.close();
  }
}

}  // namespace marrow::cli
