// SPDX-License-Identifier: Apache-2.0
// ep on GPUs: first checks against the plain reference (tests/ep/scenario.hpp), then times. Ranks are threads of
// this process, rank r on GPU r mod the number of GPUs. Times of one rank, by three methods: in-kernel (earliest block start to
// latest block end on the global timer), graph (20 calls a graph, replayed back to back), events around each call. Floors of the same run: the
// link's measured rate, an empty kernel.
//   marrow_ep_gpu check|shapes|time [--json FILE] [--only standard|opaque|few-sms|tokens|routing]
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <thread>

#include "ep/routing.hpp"
#include "ep/scenario.hpp"
#include "marrow/device.cuh"

namespace {

using namespace marrow;

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::printf("FAIL: %s: %s\n", what, cudaGetErrorString(result));
  std::fflush(stdout);
  std::_Exit(1);
}

class GpuMemory : public ep_test::Memory {
 public:
  explicit GpuMemory(cudaStream_t stream) : stream_(stream) {}
  ~GpuMemory() override {
    for (void* p : blocks_) cudaFree(p);
  }
  void* allocate(std::size_t bytes) override {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes + 16), "cudaMalloc");
    blocks_.push_back(p);
    return p;
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
    check(cudaStreamSynchronize(stream_), "upload");
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
    check(cudaStreamSynchronize(stream_), "download");
  }
  void poison(void* at, std::size_t bytes) override {
    check(cudaMemsetAsync(at, 0xff, bytes, stream_), "poison");
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> blocks_;
};

int gpus() {
  int n = 0;
  check(cudaGetDeviceCount(&n), "cudaGetDeviceCount");
  return n;
}

/// Runs body(comm, memory, stream) on each rank's thread; returns what each said.
template <class Body>
std::vector<std::string> on_ranks(int ranks, const std::map<std::string, std::string>& parameters,
                                  Body&& body) {
  const UniqueId id = UniqueId::create();
  std::vector<std::string> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const int device = rank % gpus();
        check(cudaSetDevice(device), "cudaSetDevice");
        cudaStream_t stream = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        Config config;
        config.place = Place::gpu(device, stream);
        config.parameters = parameters;
        Communicator comm(id, ranks, rank, config);
        {
          GpuMemory memory(stream);
          results[rank] = body(comm, memory, stream);
          comm.barrier();
        }
        comm.close();
        cudaStreamDestroy(stream);
      } catch (const std::exception& error) {
        results[rank] = std::string("threw ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

int failures = 0;

void scenario(const char* what, int ranks, ep_test::Scenario s,
              std::map<std::string, std::string> parameters = {}) {
  if (ranks > gpus() && s.config.max_sms == 0)
    s.config.max_sms = 60 / ((ranks + gpus() - 1) / gpus());
  parameters["MARROW_WAIT_TIMEOUT"] = "10s";
  const auto results =
      on_ranks(ranks, parameters, [&](Communicator& comm, GpuMemory& memory, cudaStream_t) {
        ep_test::Checker checker(comm, s, memory);
        std::string wrong = checker.run();
        checker.group().close();
        return wrong;
      });
  bool good = true;
  for (const std::string& r : results) {
    if (r.empty()) continue;
    good = false;
    std::printf("FAIL: %s, %d ranks: %s\n", what, ranks, r.c_str());
  }
  if (good) std::printf("ok    %s, %d ranks\n", what, ranks);
  failures += !good;
  std::fflush(stdout);
}

ep_test::Scenario full(int ranks) {
  ep_test::Scenario s;
  s.config.experts.assign(ranks, 256 / ranks);
  s.config.max_tokens = 128;
  s.config.hidden = 7168;
  s.config.top_k = 8;
  s.config.deadline = std::chrono::seconds(5);
  s.tokens = {128, 127, 128};
  s.batches = 2;
  return s;
}

void checks() {
  for (int ranks : {1, 2, 4}) {
    ep_test::Scenario s = full(ranks);
    s.config.hidden = 1040;
    s.tokens = {128, 0, 77, 1};
    s.batches = 5;
    scenario("fp8 expert-major, small", ranks, s);
    s.config.payload = ep::Payload::opaque;
    s.config.row_bytes = 528;
    s.config.scale_bytes = 36;
    scenario("opaque", ranks, s);
    s.config.payload = ep::Payload::bf16;
    s.config.layout = ep::Layout::rank_major;
    scenario("bf16 rank-major", ranks, s);
  }
  scenario("fp8 7168", 2, full(2));
  ep_test::Scenario s = full(2);
  s.config.hidden = 512;
  s.split = true;
  s.config.batches_in_flight = 3;
  s.batches = 9;
  scenario("split, 3 in flight", 2, s);
  s.config.scales = ep::Scales::ue8m0;
  s.config.scale_order = ep::ScaleOrder::column_major;
  s.config.top_k = 32;
  scenario("ue8m0 column-major top-32", 2, s);
  s = full(2);
  s.config.hidden = 64;
  s.config.max_tokens = 3000;
  s.tokens = {300, 200};
  scenario("placed by a kernel of its own", 2, s);
  s = full(2);
  s.config.hidden = 1024;
  s.config.protocol = ep::Protocol::signals;
  scenario("signals over load/store", 2, s);
  s.config.protocol = ep::Protocol::automatic;
  s.tokens = {20, 11};
  scenario("proxy", 2, s, {{"MARROW_PATH", "proxy"}});
  scenario("gda", 2, s, {{"MARROW_PATH", "gda"}, {"MARROW_NIC", "softnic"}});
  s.config.experts.assign(4, 64);
  scenario("lsa teams of 2", 4, s, {{"MARROW_LSA_SIZE", "2"}, {"MARROW_NIC", "softnic"}});
}

/// Small sizes with every shape of grid: which of them fail says what is wrong.
void shapes() {
  for (const int ranks : {1, 2}) {
    for (const auto& [sms, threads] : std::vector<std::pair<int, int>>{
             {1, 32}, {1, 512}, {8, 32}, {8, 512}, {132, 32}, {132, 512}}) {
      ep_test::Scenario s = full(ranks);
      s.config.hidden = 1040;
      s.config.max_sms = sms;
      s.config.threads = threads;
      s.config.deadline = std::chrono::milliseconds(300);
      s.batches = 3;
      const std::string name = std::to_string(sms) + " blocks of " + std::to_string(threads);
      scenario(("fp8 " + name).c_str(), ranks, s);
      s.config.payload = ep::Payload::opaque;
      s.config.row_bytes = 528;
      s.config.scale_bytes = 36;
      scenario(("opaque " + name).c_str(), ranks, s);
    }
  }
}

// ---- times

__global__ void empty_kernel() {}

/// 16-byte stores to the peer: the link's rate, both directions at once.
__global__ void push(uint4* to, const uint4* from, std::size_t n) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step * 4) {
    uint4 v[4];
    for (int k = 0; k < 4; ++k)
      if (i + k * step < n) v[k] = from[i + k * step];
    for (int k = 0; k < 4; ++k)
      if (i + k * step < n) to[i + k * step] = v[k];
  }
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
double percentile99(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[std::min(v.size() - 1, v.size() * 99 / 100)];
}

/// In a build with -DMARROW_EP_TIMELINE: when the warps of the last kernel reached each place.
void print_timeline() {
  constexpr std::array kPoints{"begun",       "numbers read",   "choices taken",
                               "list sent",   "lists sent",     "targets found",
                               "rows sent",   "lists here",     "all lists here",
                               "rows placed", "tables written", "rows received"};
  constexpr std::size_t kWarps = 132 * 16;
  using Get = int (*)(void*, std::size_t);
  const auto get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "marrow_ep_timeline"));
  if (!get) return;
  std::vector<std::array<std::uint64_t, kPoints.size()>> warps(kWarps);
  if (get(warps.data(), kWarps * sizeof warps[0]) != 0) return;
  std::uint64_t first = ~std::uint64_t{0};
  for (const auto& w : warps)
    if (w[0]) first = std::min(first, w[0]);
  std::printf("us after the first warp began: warps, first, median, 90 %%, last\n");
  for (std::size_t i = 0; i < kPoints.size(); ++i) {
    std::vector<double> at;
    for (const auto& w : warps)  // older ones are of other kernels
      if (w[i] >= first) at.push_back(static_cast<double>(w[i] - first) / 1e3);
    if (at.empty()) continue;
    std::sort(at.begin(), at.end());
    std::printf("  %-16s %5zu %6.2f %6.2f %6.2f %6.2f\n", kPoints[i], at.size(), at.front(),
                at[at.size() / 2], at[at.size() * 9 / 10], at.back());
  }
}

struct Times {
  std::vector<double> in_kernel, graph, events;  // us
};

/// Times `call` (which launches on the stream) by the three methods, together with the other ranks.
template <class Call>
Times time_call(Communicator& comm, GpuMemory& memory, cudaStream_t stream, ep::Group& group,
                int in_graph, Call&& call) {
  Times t;
  for (int i = 0; i < 20; ++i) call(i);
  check(cudaStreamSynchronize(stream), "warm up");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  // In-kernel times are taken inside a graph as well, so that no rank waits for another one's host.
  auto* slots = static_cast<std::uint64_t*>(memory.allocate(16 * in_graph));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < in_graph; ++i) {
    group.record_times(slots + 2 * i);
    call(i);
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  group.record_times(nullptr);
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int round = 0; round < 5; ++round) {
    check(cudaMemsetAsync(slots, 0, 16 * in_graph, stream), "memset");
    check(cudaStreamSynchronize(stream), "memset");
    comm.barrier();
    check(cudaGraphLaunch(exec, stream), "graph");
    std::vector<std::uint64_t> words(2 * in_graph);
    memory.download(words.data(), slots, 16 * in_graph);
    for (int i = 4; i < in_graph; ++i)
      t.in_kernel.push_back(static_cast<double>(words[2 * i + 1] - ~words[2 * i]) / 1e3);
  }
  if (comm.rank() == 0) print_timeline();
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < in_graph; ++i) call(i);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int round = 0; round < 8; ++round) {
    comm.barrier();
    check(cudaGraphLaunch(exec, stream), "graph");
    cudaEventRecord(begin, stream);
    constexpr int kReplays = 10;
    for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(exec, stream), "graph");
    cudaEventRecord(end, stream);
    check(cudaStreamSynchronize(stream), "graph");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    t.graph.push_back(ms * 1e3 / (kReplays * in_graph));
  }
  std::vector<cudaEvent_t> events(201);
  for (auto& e : events) cudaEventCreate(&e);
  comm.barrier();
  for (int i = 0; i < 200; ++i) {
    cudaEventRecord(events[i], stream);
    call(i);
  }
  cudaEventRecord(events[200], stream);
  check(cudaStreamSynchronize(stream), "events");
  for (int i = 20; i < 200; ++i) {
    float ms = 0;
    cudaEventElapsedTime(&ms, events[i], events[i + 1]);
    t.events.push_back(ms * 1e3);
  }
  for (auto& e : events) cudaEventDestroy(e);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return t;
}

/// Of 20 empty kernels in a graph, each, us: what any kernel costs.
double empty_time() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < 20; ++i) empty_kernel<<<132, 512, 0, stream>>>();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int i = 0; i < 5; ++i) check(cudaGraphLaunch(exec, stream), "graph");
  cudaEventRecord(begin, stream);
  for (int i = 0; i < 20; ++i) check(cudaGraphLaunch(exec, stream), "graph");
  cudaEventRecord(end, stream);
  check(cudaStreamSynchronize(stream), "graph");
  float ms = 0;
  cudaEventElapsedTime(&ms, begin, end);
  return ms * 1e3 / 400;
}

struct Row {
  std::string what;
  int ranks, tokens, hidden, sms;
  double floor;
  Times times;
  int experts;
};
std::vector<Row> rows;

void print(const Row& row) {
  std::printf(
      "%-28s R%d T%-4d H%d sms %-3d floor %6.2f | in %6.2f (p99 %6.2f)  graph %6.2f  events "
      "%6.2f\n",
      row.what.c_str(), row.ranks, row.tokens, row.hidden, row.sms, row.floor,
      median(row.times.in_kernel), percentile99(row.times.in_kernel), median(row.times.graph),
      median(row.times.events));
  std::fflush(stdout);
}

/// GB/s a direction, both at once.
double link_rate() {
  if (gpus() < 2) return 0;
  std::vector<double> rates(2);
  constexpr std::size_t kBytes = 256 << 20;
  on_ranks(2, {}, [&](Communicator& comm, GpuMemory&, cudaStream_t stream) {
    Window w = comm.allocate(2 * kBytes);
    const WindowHandle h = w.handle();
    std::uint64_t peer = 0;
    check(cudaMemcpy(&peer, h.lsa + (1 - comm.rank()), 8, cudaMemcpyDefault), "peer's address");
    cudaEvent_t a, b;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    std::vector<double> times;
    for (int i = 0; i < 7; ++i) {
      comm.barrier();
      cudaEventRecord(a, stream);
      for (int k = 0; k < 4; ++k)
        push<<<132, 512, 0, stream>>>(reinterpret_cast<uint4*>(peer + kBytes),
                                      reinterpret_cast<const uint4*>(h.local), kBytes / 16);
      cudaEventRecord(b, stream);
      check(cudaStreamSynchronize(stream), "push");
      float ms = 0;
      cudaEventElapsedTime(&ms, a, b);
      times.push_back(4.0 * kBytes / ms / 1e6);
    }
    rates[comm.rank()] = median(times);
    comm.barrier();
    w.close();
    return std::string();
  });
  return std::min(rates[0], rates[1]);
}

/// Rows that leave the most loaded rank for another: once a token and rank, and once a choice.
struct Load {
  double deduplicated = 0, all = 0;
};
Load load_of(const ep_test::Checker& c, int ranks, int experts_each, int tokens) {
  Load most;
  for (int r = 0; r < ranks; ++r) {
    Load mine;
    for (int t = 0; t < tokens; ++t) {
      std::vector<bool> seen(ranks, false);
      for (int id : c.ids(r, 0, t)) {
        if (id < 0 || id / experts_each == r) continue;
        mine.all += 1;
        if (!seen[id / experts_each]) mine.deduplicated += 1;
        seen[id / experts_each] = true;
      }
    }
    most.deduplicated = std::max(most.deduplicated, mine.deduplicated);
    most.all = std::max(most.all, mine.all);
  }
  return most;
}

struct TimeCase {
  int ranks, tokens;
  int sms = 0;
  bool opaque = false;
  bool dispatch_only = false;
  const std::vector<std::vector<int>>* routing =
      nullptr;  ///< of 64 experts; else random ones of 256
};

void time_case(double rate, const TimeCase& c) {
  const auto [ranks, tokens, sms, opaque, dispatch_only, routing] = c;
  const int experts = routing ? 64 : 256;
  ep_test::Scenario s = full(ranks);
  s.config.experts.assign(static_cast<std::size_t>(ranks), experts / ranks);
  if (routing) {
    s.route = [&, tokens = tokens, routing = routing](int rank, int, int token,
                                                      int k) -> std::int64_t {
      const auto at = static_cast<std::size_t>(rank * tokens + token) % routing->size();
      return (*routing)[at][static_cast<std::size_t>(k)];
    };
  }
  s.config.max_tokens = tokens;
  s.config.max_sms = sms;
  s.tokens = {tokens};
  s.absent = 0;
  s.batches = 1;
  if (opaque) {
    s.config.payload = ep::Payload::opaque;
    s.config.row_bytes = 7168;
    s.config.scale_bytes = 224;
  }
  std::vector<Row> found;
  const auto results = on_ranks(
      c.ranks, {{"MARROW_WAIT_TIMEOUT", "10s"}},
      [&](Communicator& comm, GpuMemory& memory, cudaStream_t stream) {
        const auto [ranks, tokens, sms, opaque, dispatch_only, routing] = c;
        ep_test::Checker checker(comm, s, memory);
        if (std::string wrong = checker.run(); !wrong.empty()) return wrong;
        ep::Group& g = checker.group();
        const auto& b = checker.buffers(0);
        const ep::DispatchInput in{.tokens = tokens,
                                   .rows = b.rows,
                                   .scales = b.scales,
                                   .expert_ids = b.ids,
                                   .weights = b.weights};
        const ep::DispatchOutput out{b.y, b.ys};
        const ep::Handle h = g.handle(0);
        const Load load = load_of(checker, ranks, experts / ranks, tokens);
        const auto floor = [&](double bytes) { return rate > 0 ? bytes / rate / 1e3 + 2.5 : 0; };
        const auto add = [&](std::string what, double bytes, int in_graph, auto&& call) {
          if (routing) what += ", router's choices";
          const Times t = time_call(comm, memory, stream, g, in_graph, call);
          if (comm.rank() == 0) {
            found.push_back(
                {what, c.ranks, c.tokens, 7168, c.sms ? c.sms : 132, floor(bytes), t, experts});
            print(found.back());
          }
        };
        const double row = 7168 + 224;
        add(opaque ? "dispatch opaque 7168+224" : "dispatch fp8", load.deduplicated * row, 20,
            [&](int) { g.dispatch(in, out, h); });
        if (!dispatch_only) {
          ep::CombineInput c{.rows = b.z, .mode = ep::CombineMode::fast};
          add("combine fast", load.deduplicated * 14336, 20,
              [&](int) { g.combine(c, {b.out}, h); });
          ep::CombineInput e{.rows = b.z, .mode = ep::CombineMode::exact};
          add("combine exact", load.all * 14336, 20, [&](int) { g.combine(e, {b.out}, h); });
          add("pair fast", load.deduplicated * (row + 14336), 10, [&](int) {
            g.dispatch(in, out, h);
            g.combine(c, {b.out}, h);
          });
          add("pair exact", load.deduplicated * row + load.all * 14336, 10, [&](int) {
            g.dispatch(in, out, h);
            g.combine(e, {b.out}, h);
          });
        }
        // The last timed iteration's data.
        const ep::Report report = g.report();
        if (report.status != Status::ok) return std::string("status ") + name(report.status);
        std::string wrong = checker.check_dispatch(0, 0);
        if (wrong.empty() && !dispatch_only)
          wrong = checker.check_combine(0, 0, ep::CombineMode::exact);
        if (comm.rank() == 0)
          std::printf("      memory of the Group: %s\n", g.memory().text().c_str());
        g.close();
        return wrong;
      });
  for (const std::string& r : results) {
    if (r.empty()) continue;
    std::printf("FAIL: times, %d ranks, %d tokens: %s\n", ranks, tokens, r.c_str());
    ++failures;
  }
  rows.insert(rows.end(), found.begin(), found.end());
}

double mean(const std::vector<double>& v) {
  double sum = 0;
  for (double x : v) sum += x;
  return v.empty() ? 0 : sum / static_cast<double>(v.size());
}

/// Rows of bench/schema.json; ep.py makes them a document.
void write_json(const char* file, double rate, double empty) {
  std::ofstream out(file);
  const char* separator = "[\n";
  const auto row = [&](const std::string& what, const char* unit, const std::string& parameters,
                       const std::vector<double>& v, const std::string& note) {
    if (v.empty()) return;
    const double m = mean(v);
    double square = 0;
    for (double x : v) square += (x - m) * (x - m);
    out << separator << " {\"what\": \"" << what << "\", \"unit\": \"" << unit
        << "\", \"kind\": \"measured\", \"path\": \"lsa\", \"devices\": [{\"role\": \"kernels\", "
           "\"device\": \"gpu\", \"name\": \"NVIDIA H200\"}], \"parameters\": {"
        << parameters << "}, \"statistics\": {\"count\": " << v.size()
        << ", \"min\": " << *std::min_element(v.begin(), v.end()) << ", \"median\": " << median(v)
        << ", \"mean\": " << m << ", \"p99\": " << percentile99(v)
        << ", \"max\": " << *std::max_element(v.begin(), v.end())
        << ", \"stddev\": " << std::sqrt(square / static_cast<double>(v.size()))
        << "}, \"verified\": true, \"note\": \"" << note << "\"}";
    separator = ",\n";
  };
  if (rate > 0)
    row("link rate, both directions at once", "GB/s", "", {rate}, "floor of the rows below");
  row("empty kernel in a graph", "us", "", {empty}, "what any kernel costs");
  for (const Row& r : rows) {
    std::string parameters = "\"ranks\": " + std::to_string(r.ranks) +
                             ", \"tokens\": " + std::to_string(r.tokens) +
                             ", \"hidden\": " + std::to_string(r.hidden) +
                             ", \"top_k\": 8, \"experts\": " + std::to_string(r.experts) +
                             ", \"sms\": " + std::to_string(r.sms);
    if (rate > 0) parameters += ", \"floor_us\": " + std::to_string(r.floor);
    row(r.what + ", in-kernel", "us", parameters, r.times.in_kernel,
        "earliest block start to latest block end of rank 0; of a pair, of the first and the last "
        "kernel");
    row(r.what + ", in a graph", "us", parameters, r.times.graph, "calls back to back, replayed");
    row(r.what + ", events", "us", parameters, r.times.events, "event pairs, plain launches");
  }
  out << "\n]\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  if (gpus() == 0) {
    std::printf("no GPU\n");
    return 77;
  }
  if (what == "check") checks();
  if (what == "shapes") shapes();
  if (what == "time") {
    const double rate = link_rate();
    const double empty = empty_time();
    std::printf("link %.1f GB/s each way, both at once; an empty kernel in a graph %.2f us\n", rate,
                empty);
    std::vector<std::vector<int>> routing;
    if (const char* file = std::getenv("MARROW_TEST_EP_ROUTING"))
      routing = ep_test::real_routing(file, 4000);
    const auto option = [&](const char* name) {
      for (int i = 2; i + 1 < argc; ++i)
        if (std::string(argv[i]) == name) return std::string(argv[i + 1]);
      return std::string();
    };
    const std::string only = option("--only");
    int timed = 0;
    // A rank a GPU: of two and, where there are four, of four.
    for (const int ranks : {1, 2, 4}) {
      if (ranks > gpus() || (ranks == 1 && gpus() > 1)) continue;
      const std::pair<const char*, TimeCase> cases[] = {
          {"standard", {.ranks = ranks, .tokens = 128}},
          {"opaque", {.ranks = ranks, .tokens = 128, .opaque = true, .dispatch_only = true}},
          {"few-sms", {.ranks = ranks, .tokens = 128, .sms = 24, .dispatch_only = true}},
          {"tokens", {.ranks = ranks, .tokens = 345}},
          {"routing", {.ranks = ranks, .tokens = 128, .dispatch_only = true, .routing = &routing}}};
      for (const auto& [name, c] : cases) {
        if ((!only.empty() && only != name) || (c.routing && routing.empty())) continue;
        ++timed;
        time_case(rate, c);
      }
    }
    if (timed == 0) {
      std::printf("FAIL: nothing to time is called '%s' (routing needs MARROW_TEST_EP_ROUTING)\n",
                  only.c_str());
      ++failures;
    }
    if (const std::string file = option("--json"); !file.empty())
      write_json(file.c_str(), rate, empty);
  }
  std::printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures ? 1 : 0;
}
