// SPDX-License-Identifier: Apache-2.0
// Experiments between ranks 0 and 1. Other ranks, if any, only take part in what is collective.
#include <algorithm>

#include "cli/experiments.hpp"
#include "cli/latency.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

constexpr const char* kHalf =
    "half of a round trip between ranks 0 and 1, timed on rank 0's device";

/// Iterations that move a fixed number of bytes, within bounds: small messages need many, large ones take long.
int iterations_of(const ExperimentContext& x, std::uint64_t bytes) {
  if (x.options.iterations > 0) return x.options.iterations;
  const bool gpu = x.comm.place().on_gpu();
  const std::uint64_t budget = gpu ? std::uint64_t{2} << 30 : std::uint64_t{128} << 20;
  return static_cast<int>(std::clamp<std::uint64_t>(budget / std::max<std::uint64_t>(bytes, 1), 20,
                                                    gpu ? 10000 : 1000));
}
int warmup_of(const ExperimentContext& x, int iterations) {
  return x.options.warmup > 0 ? x.options.warmup : std::max(2, iterations / 10);
}

/// Threads of the one block of a ping-pong: a lone thread for what one store moves, else a thread for 16 bytes.
int ping_threads(const ExperimentContext& x, std::uint64_t bytes) {
  if (x.options.threads > 0) return x.options.threads;
  if (!x.comm.place().on_gpu() || bytes <= 16) return 1;
  return static_cast<int>(std::min<std::uint64_t>((bytes / 16 + 31) / 32 * 32, 1024));
}

Memory memory_of(const ExperimentContext& x) {
  if (x.options.memory == "device") return Memory::device;
  if (x.options.memory == "host") return Memory::host;
  const int peer = x.comm.rank() == 0 ? 1 : 0;
  return default_memory(x.comm.place(), x.comm.peers().at(static_cast<std::size_t>(peer)).path);
}

Row figure(const PathUse& use, std::string what, std::string unit, std::vector<double> samples,
           std::string note) {
  Row row = make_row(use, std::move(what), std::move(unit));
  row.statistics = statistics_of(samples);
  row.samples = std::move(samples);
  row.note = std::move(note);
  return row;
}

using Parameters = std::vector<std::pair<std::string, Value>>;
Parameters describe(std::uint64_t bytes, int iterations, Shape shape) {
  return {{"bytes", static_cast<std::int64_t>(bytes)},
          {"iterations", std::int64_t{iterations}},
          {"blocks", std::int64_t{shape.blocks}},
          {"threads", std::int64_t{shape.threads}}};
}

/// Byte i of rank r's source, as Bench fills it.
bool holds_pattern_of(const Communicator& comm, int rank, const void* memory, std::uint64_t bytes) {
  std::vector<std::uint8_t> found(bytes);
  copy_out(comm.place(), found.data(), memory, bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (found[i] != static_cast<std::uint8_t>(i * 7 + static_cast<std::uint64_t>(rank) + 1))
      return false;
  }
  return true;
}

/// Whether every rank's answer is yes. Collective.
bool everywhere(Communicator& comm, bool mine) {
  const std::uint8_t byte = mine ? 1 : 0;
  const auto all = comm.allgather(&byte, 1);
  return std::all_of(all.begin(), all.end(),
                     [](const auto& one) { return one.size() == 1 && one[0] == std::byte{1}; });
}

/// A ping-pong experiment; the line on rank 0.
PerfLine ping(ExperimentContext& x, Bench& bench, Ping kind, const std::string& what,
              std::uint64_t bytes, int threads) {
  const int iterations = iterations_of(x, bytes);
  PerfLine line;
  line.bytes = bytes;
  line.iterations = static_cast<std::uint64_t>(iterations);
  if (x.comm.rank() == 0) x.progress.at(what + ", " + bytes_text(bytes));
  std::vector<double> us =
      bench.ping_pong(kind, bytes, iterations, warmup_of(x, iterations), threads);
  const bool moved = (kind != Ping::put && kind != Ping::floor) || !bench.plays() ||
                     holds_pattern_of(x.comm, bench.peer(), bench.window_data(), bytes);
  const bool verified = everywhere(x.comm, moved);
  line.time = figure(path_use(x.comm, bench.peer()), what, "us", std::move(us), kHalf);
  line.time.parameters = describe(bytes, iterations, {1, threads});
  if (kind == Ping::put || kind == Ping::floor) line.time.verified = verified;
  return line;
}

/// Bulk figures of one size, added to the line on rank 0.
void stream(ExperimentContext& x, Bench& bench, bool get, const std::string& what,
            std::uint64_t bytes, std::uint64_t& round, PerfLine& line) {
  const bool gpu = x.comm.place().on_gpu();
  const Shape shape{x.options.blocks > 0 ? x.options.blocks
                    : gpu                ? 8
                                         : 1,
                    x.options.threads > 0 ? x.options.threads
                    : gpu                 ? 1024
                                          : 1};
  const int iterations = iterations_of(x, bytes);
  std::vector<double> seconds;
  for (int run = 0; run < 4; ++run) {  // the first is warm-up
    x.comm.barrier();
    if (bench.plays()) {
      const int blocks = bench.first() ? shape.blocks : 1;
      const KernelLog log(x.comm.place(), blocks);
      StreamArguments a;
      a.comm = bench.device();
      a.window = bench.window();
      a.local = bench.local();
      a.bytes = bytes;
      a.iterations =
          static_cast<std::uint32_t>(run == 0 ? std::max(1, iterations / 10) : iterations);
      a.peer = bench.peer();
      a.round = round;
      a.initiator_blocks = static_cast<std::uint32_t>(shape.blocks);
      a.initiator = bench.first();
      a.get = get;
      a.log = log.log();
      launch_stream(x.comm.place(), {blocks, shape.threads}, a);
      log.finish(x.comm, what);
      if (run > 0) seconds.push_back(static_cast<double>(log.elapsed_ns()) * 1e-9);
    }
    if (!get) ++round;
  }
  x.comm.barrier();
  bool right = true;
  if (bench.plays()) {
    // put: rank 0's pattern lies in rank 1's window. get: rank 1's lies in rank 0's buffer.
    if (!get && !bench.first()) right = holds_pattern_of(x.comm, 0, bench.window_data(), bytes);
    if (get && bench.first()) right = holds_pattern_of(x.comm, 1, bench.source().data(), bytes);
  }
  const bool verified = everywhere(x.comm, right);
  if (x.comm.rank() != 0) return;
  const double count = iterations;
  std::vector<double> bandwidth, rate;
  for (const double s : seconds) {
    bandwidth.push_back(count * static_cast<double>(bytes) / s * 1e-9);
    rate.push_back(count / s * 1e-6);
  }
  const PathUse use = path_use(x.comm, bench.peer());
  const std::string note =
      format("%d blocks x %d threads, %s", shape.blocks, shape.threads,
             get ? "until the gets are readable here"
                 : "until rank 1 has answered that all of it is visible there");
  line.bandwidth = figure(use, what + " bandwidth", "GB/s", std::move(bandwidth), note);
  line.rate = figure(use, what + " rate", "Mops/s", std::move(rate), note);
  line.bandwidth->verified = verified;
  line.bandwidth->parameters = line.rate->parameters = describe(bytes, iterations, shape);
}

std::uint64_t largest(const std::vector<std::uint64_t>& sizes) {
  return *std::max_element(sizes.begin(), sizes.end());
}

}  // namespace

void run_put(ExperimentContext& x) {
  const std::vector<std::uint64_t> sizes = sizes_of(x, "8,1K,64K..1M");
  Bench bench(x.comm, largest(sizes), 0, memory_of(x));
  std::uint64_t round = 0;
  for (const std::uint64_t bytes : sizes) {
    PerfLine line = ping(x, bench, Ping::put, "put latency", bytes, ping_threads(x, bytes));
    stream(x, bench, false, "put", bytes, round, line);
    if (x.comm.rank() == 0) x.lines.push_back(std::move(line));
  }
}

void run_put_value(ExperimentContext& x) {
  Bench bench(x.comm, 64, 0, memory_of(x));
  for (const std::uint64_t bytes : sizes_of(x, "8,24")) {
    if (bytes != 8 && bytes != 24)
      throw UsageError(format("--sizes has %llu: put_value is timed with 8 and 24 bytes.",
                              static_cast<unsigned long long>(bytes)));
    PerfLine line = ping(x, bench, Ping::put_value, "put_value latency", bytes, 1);
    if (x.comm.rank() == 0) x.lines.push_back(std::move(line));
  }
}

void run_signal(ExperimentContext& x) {
  Bench bench(x.comm, 64, 0, memory_of(x));
  PerfLine line = ping(x, bench, Ping::signal, "signal latency", 0, 1);
  if (x.comm.rank() == 0) x.lines.push_back(std::move(line));
}

void run_packet(ExperimentContext& x) {
  const std::vector<std::uint64_t> sizes = sizes_of(x, "8,64,1K");
  if (largest(sizes) > 8u << 20 || *std::min_element(sizes.begin(), sizes.end()) < 8) {
    throw UsageError("--sizes: packets carry 8 bytes each; sizes from 8 to 8M.");
  }
  Bench bench(x.comm, 64, static_cast<int>(largest(sizes) / 8), memory_of(x));
  for (const std::uint64_t size : sizes) {
    const std::uint64_t bytes = size / 8 * 8;
    const bool gpu = x.comm.place().on_gpu();
    const int threads = x.options.threads > 0 ? x.options.threads
                        : gpu ? static_cast<int>(std::min<std::uint64_t>(bytes / 8, 1024))
                              : 1;
    PerfLine line = ping(x, bench, Ping::packet, "packet latency", bytes, threads);
    line.time.verified = true;  // the kernel compares every value; a wrong one ends the run
    if (x.comm.rank() == 0) x.lines.push_back(std::move(line));
  }
}

void run_floor(ExperimentContext& x) {
  const bool gpu = x.comm.place().on_gpu();
  const bool lsa = x.comm.peers().at(x.comm.rank() == 0 ? 1 : 0).path == Path::lsa;
  if (!everywhere(x.comm, lsa || x.comm.rank() > 1)) {
    throw UsageError("perf floor: ranks 0 and 1 must be on the lsa path; give --path lsa.");
  }
  // The smallest window, and one that shares its pages with nothing.
  const std::uint64_t large = gpu ? std::uint64_t{64} << 20 : std::uint64_t{1} << 20;
  for (const std::uint64_t window : {std::uint64_t{64}, large}) {
    Bench bench(x.comm, window, 0, memory_of(x));
    for (int turn = 0; turn < 7; ++turn) {
      for (const Ping kind : {Ping::put, Ping::floor}) {
        PerfLine line =
            ping(x, bench, kind, kind == Ping::put ? "put latency" : "floor: put + signal", 8, 1);
        if (x.comm.rank() != 0) continue;
        line.time.parameters.emplace_back("window", static_cast<std::int64_t>(window));
        line.time.note = "put, floor, put, floor, ...: one after the other, on the same memory";
        x.lines.push_back(std::move(line));
      }
    }
  }
}

void run_get(ExperimentContext& x) {
  const std::vector<std::uint64_t> sizes = sizes_of(x, "8,1K,64K..1M");
  Bench bench(x.comm, largest(sizes), 0, memory_of(x));
  // What rank 0 gets: rank 1's pattern.
  copy_in(x.comm.place(), bench.window_data(),
          bench.source().download<std::uint8_t>(largest(sizes)).data(), largest(sizes));
  std::uint64_t round = 0;
  for (const std::uint64_t bytes : sizes) {
    const int iterations = iterations_of(x, bytes), warmup = warmup_of(x, iterations);
    const int threads = ping_threads(x, bytes);
    PerfLine line;
    line.bytes = bytes;
    line.iterations = static_cast<std::uint64_t>(iterations);
    x.comm.barrier();
    if (bench.first()) {
      x.progress.at("get latency, " + bytes_text(bytes));
      const KernelLog log(x.comm.place(), 1,
                          static_cast<std::size_t>(iterations) + static_cast<std::size_t>(warmup));
      GetArguments a;
      a.comm = bench.device();
      a.window = bench.window();
      a.target = bench.local();
      a.bytes = bytes;
      a.iterations = static_cast<std::uint32_t>(iterations + warmup);
      a.peer = bench.peer();
      a.log = log.log();
      launch_get(x.comm.place(), {1, threads}, a);
      log.finish(x.comm, "get");
      std::vector<double> us;
      for (const std::uint64_t ns :
           log.samples(static_cast<std::size_t>(warmup), static_cast<std::size_t>(iterations)))
        us.push_back(static_cast<double>(ns) * 1e-3);
      line.time = figure(path_use(x.comm, bench.peer()), "get latency", "us", std::move(us),
                         "get + flush, whole, timed on rank 0's device");
      line.time.parameters = describe(bytes, iterations, {1, threads});
      line.time.verified = holds_pattern_of(x.comm, 1, bench.source().data(), bytes);
    }
    stream(x, bench, true, "get", bytes, round, line);
    if (x.comm.rank() == 0) x.lines.push_back(std::move(line));
  }
}

void run_barrier(ExperimentContext& x) {
  const int iterations = iterations_of(x, 0), warmup = warmup_of(x, iterations);
  const bool gpu = x.comm.place().on_gpu();
  const int threads = x.options.threads > 0 ? x.options.threads : gpu ? 32 : 1;
  const DeviceCommunicatorOwner device = x.comm.device_communicator(
      {.contexts = 1, .signals = 0, .counters = 0, .barriers = 1, .packets = 0});
  x.comm.barrier();
  const KernelLog log(x.comm.place(), 1,
                      static_cast<std::size_t>(iterations) + static_cast<std::size_t>(warmup));
  BarrierArguments a;
  a.comm = device.handle();
  a.iterations = static_cast<std::uint32_t>(iterations + warmup);
  a.log = log.log();
  launch_barrier(x.comm.place(), {1, threads}, a);
  log.finish(x.comm, "the barrier");
  if (x.comm.rank() == 0) {
    std::vector<double> us;
    for (const std::uint64_t ns :
         log.samples(static_cast<std::size_t>(warmup), static_cast<std::size_t>(iterations)))
      us.push_back(static_cast<double>(ns) * 1e-3);
    PerfLine line;
    line.iterations = static_cast<std::uint64_t>(iterations);
    line.time = figure(path_use(x.comm, x.comm.nranks() > 1 ? 1 : 0), "barrier latency", "us",
                       std::move(us),
                       format("whole barrier of %d ranks with Fence::put, timed on rank 0's device",
                              x.comm.nranks()));
    line.time.parameters = describe(0, iterations, {1, threads});
    line.time.parameters.emplace_back("ranks", std::int64_t{x.comm.nranks()});
    x.lines.push_back(std::move(line));
  }
  x.comm.barrier();
}

}  // namespace marrow::cli
