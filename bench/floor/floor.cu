// SPDX-License-Identifier: Apache-2.0
// Floor kernels: the least a GPU pair needs for what Marrow's operations promise, written by hand
// without any library, to stand beside `marrow perf` in the same run. Each has the shape of the
// operation it bounds: a put loads its bytes from memory, so its floor does too.
//   floor [--json FILE] [--seconds N]     needs two GPUs with peer access; 77 without
#include <unistd.h>

#include <cstring>

#include "harness.cuh"

namespace floors {
namespace {

/// One side of a ping-pong. `turn`: 0 starts.
struct Side {
  char* window;        // ours
  char* peer;          // the other's, mapped
  const char* source;  // ours
  std::uint64_t* log;
  Clock* clock;
  int* failed;
  int turn;
  int rounds;
};

__device__ __forceinline__ void release_store(char* at, std::uint64_t value) {
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t acquire_load(const char* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void store_pair(char* at, std::uint64_t low, std::uint64_t high) {
  asm volatile("{.reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.b128 [%0], t;}" ::"l"(at),
               "l"(low), "l"(high)
               : "memory");
}
__device__ __forceinline__ void load_pair(const char* at, std::uint64_t& low, std::uint64_t& high) {
  asm volatile("{.reg .b128 t; ld.relaxed.sys.b128 t, [%2]; mov.b128 {%0, %1}, t;}"
               : "=l"(low), "=l"(high)
               : "l"(at)
               : "memory");
}

/// Calls round(r) on both sides in turn and times it on the side that starts.
template <class Send, class Receive>
__device__ void ping_pong(const Side& s, Send&& send, Receive&& receive) {
  const std::uint64_t c0 = clock64(), n0 = global_ns();
  for (int r = 1; r <= s.rounds; ++r) {
    const std::uint64_t begin = clock64();
    bool ok;
    if (s.turn == 0) {
      send(r);
      ok = receive(r);
    } else {
      ok = receive(r);
      if (ok) send(r);
    }
    if (threadIdx.x == 0) s.log[r - 1] = clock64() - begin;
    if (!ok) {
      *s.failed = r;
      return;
    }
  }
  if (threadIdx.x == 0) *s.clock = {clock64() - c0, global_ns() - n0};
}

/// Data, barrier, release store of a flag; acquire poll. The least a put with a strong signal can be.
/// kFromMemory: the data is loaded from memory first, as a put does.
template <bool kFromMemory>
__global__ void put_signal(Side s, std::size_t bytes) {
  const std::size_t words = bytes / 8;
  auto* to = reinterpret_cast<std::uint64_t*>(s.peer);
  const auto* from = reinterpret_cast<const std::uint64_t*>(s.source);
  ping_pong(
      s,
      [&](int r) {
        for (std::size_t i = threadIdx.x; i < words; i += blockDim.x)
          to[i] = kFromMemory ? from[i] : static_cast<std::uint64_t>(r);
        if (blockDim.x > 1) __syncthreads();
        if (threadIdx.x == 0) release_store(s.peer + kFlag, r);
      },
      [&](int r) {
        bool ok = true;
        if (threadIdx.x == 0)
          ok = spin_until(
              [&] { return acquire_load(s.window + kFlag) >= static_cast<std::uint64_t>(r); });
        if (blockDim.x > 1) ok = __syncthreads_and(ok);
        return ok;
      });
}

/// Cells of {value, epoch}, one a thread; no fence at all.
__global__ void packets(Side s) {
  const std::size_t at = kFlag + threadIdx.x * 16;
  ping_pong(
      s, [&](int r) { store_pair(s.peer + at, r * 1000003ull + threadIdx.x, r); },
      [&](int r) {
        std::uint64_t low = 0, high = 0;
        bool ok = spin_until([&] {
          load_pair(s.window + at, low, high);
          return high == static_cast<std::uint64_t>(r);
        });
        ok = ok && low == r * 1000003ull + threadIdx.x;
        if (blockDim.x > 1) ok = __syncthreads_and(ok);
        return ok;
      });
}

/// Raw push of 16-byte words, 8 loads in flight a thread, an even static split.
__global__ void push(uint4* to, const uint4* from, std::size_t words, int rounds) {
  // Whole 128-byte lines: NVLink carries those best.
  const std::size_t each = (words / gridDim.x + 7) / 8 * 8;
  const std::size_t begin = each * blockIdx.x < words ? each * blockIdx.x : words;
  const std::size_t share = words - begin < each ? words - begin : each;
  for (int r = 0; r < rounds; ++r) {
    std::size_t i = begin + threadIdx.x;
    for (; i + 7 * blockDim.x < begin + share; i += 8 * blockDim.x) {
      uint4 v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = from[i + k * blockDim.x];
#pragma unroll
      for (int k = 0; k < 8; ++k) to[i + k * blockDim.x] = v[k];
    }
    for (; i < begin + share; i += blockDim.x) to[i] = from[i];
  }
}

struct Row {
  std::string what, unit, note;
  std::size_t bytes;
  int blocks, threads;
  Summary summary;
};

class Bench {
 public:
  explicit Bench(std::vector<Gpu>& gpus) : gpus_(gpus) {}

  template <class Kernel, class... Args>
  void latency(const std::string& what, const std::string& note, std::size_t bytes, int threads,
               int rounds, Kernel kernel, Args... args) {
    clear_flags(gpus_);
    for (int d = 0; d < 2; ++d) {
      Gpu& g = gpus_[d];
      must(cudaSetDevice(d), "set device");
      kernel<<<1, threads, 0, g.stream>>>(
          Side{g.window, gpus_[1 - d].window, g.source, g.log, g.clock, g.failed, d, rounds},
          args...);
      must(cudaGetLastError(), what.c_str());
    }
    wait_all(gpus_, what.c_str());
    add({what, "ns", note, bytes, 1, threads, one_way(gpus_[0], rounds, rounds / 10)});
  }

  void bandwidth(std::size_t bytes, int blocks, bool both) {
    const int rounds = 10, repeats = 7;
    std::vector<double> rates;
    for (int i = 0; i < repeats; ++i) {
      for (int d = 0; d < (both ? 2 : 1); ++d) {
        Gpu& g = gpus_[d];
        must(cudaSetDevice(d), "set device");
        must(cudaEventRecord(g.begin, g.stream), "event");
        push<<<blocks, 1024, 0, g.stream>>>(reinterpret_cast<uint4*>(gpus_[1 - d].window),
                                            reinterpret_cast<const uint4*>(g.source), bytes / 16,
                                            rounds);
        must(cudaEventRecord(g.end, g.stream), "event");
      }
      wait_all(gpus_, "raw copy");
      double slowest = 0;
      for (int d = 0; d < (both ? 2 : 1); ++d) {
        float ms = 0;
        must(cudaEventElapsedTime(&ms, gpus_[d].begin, gpus_[d].end), "event time");
        slowest = std::max<double>(slowest, ms);
      }
      if (i > 0) rates.push_back(static_cast<double>(bytes) * rounds / slowest / 1e6);
    }
    check_copy(0, 1, bytes);
    if (both) check_copy(1, 0, bytes);
    add({both ? "raw copy, both directions" : "raw copy", "GB/s",
         both ? "per direction; 10 rounds a launch" : "10 rounds a launch", bytes, blocks, 1024,
         summary(rates)});
  }

  const std::vector<Row>& rows() const { return rows_; }

 private:
  void check_copy(int from, int to, std::size_t bytes) {
    std::vector<char> sent(bytes), got(bytes);
    must(cudaMemcpy(sent.data(), gpus_[from].source, bytes, cudaMemcpyDeviceToHost), "copy");
    must(cudaMemcpy(got.data(), gpus_[to].window, bytes, cudaMemcpyDeviceToHost), "copy");
    if (std::memcmp(sent.data(), got.data(), bytes) != 0) {
      std::fprintf(stderr, "raw copy: wrong data\n");
      std::exit(1);
    }
  }
  void add(Row row) {
    std::printf("%-34s %10zu B  %3d x %-4d  %10.1f %-5s p99 %.1f  %s\n", row.what.c_str(),
                row.bytes, row.blocks, row.threads, row.summary.median, row.unit.c_str(),
                row.summary.p99, row.note.c_str());
    std::fflush(stdout);
    rows_.push_back(std::move(row));
  }
  std::vector<Gpu>& gpus_;
  std::vector<Row> rows_;
};

}  // namespace
}  // namespace floors

int main(int argc, char** argv) {
  using namespace floors;
  ::alarm(60);  // the host's watchdog: no kernel here runs longer than seconds
  std::string json;
  for (int i = 1; i + 1 < argc; ++i) {
    if (!std::strcmp(argv[i], "--json")) json = argv[i + 1];
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
    std::fprintf(stderr, "floor: needs two GPUs\n");
    return 77;
  }
  std::vector<Gpu> gpus = open_gpus(2);
  Bench bench(gpus);
  bench.latency("put + signal", "data from a register", 8, 1, 5000, put_signal<false>,
                std::size_t{8});
  bench.latency("put + signal", "data from memory", 8, 1, 5000, put_signal<true>, std::size_t{8});
  bench.latency("put + signal", "data from memory", 8, 256, 5000, put_signal<true>, std::size_t{8});
  bench.latency("put + signal", "data from memory", 1024, 256, 5000, put_signal<true>,
                std::size_t{1024});
  bench.latency("put + signal", "data from memory", 65536, 1024, 1000, put_signal<true>,
                std::size_t{65536});
  bench.latency("packet", "one cell", 8, 1, 5000, packets);
  bench.latency("packet", "128 cells", 1024, 128, 5000, packets);
  for (int blocks : {8, 16, 32, 132}) bench.bandwidth(std::size_t{64} << 20, blocks, false);
  for (int blocks : {8, 16, 32, 64, 132}) bench.bandwidth(std::size_t{64} << 20, blocks, true);
  if (!json.empty()) {
    std::FILE* file = std::fopen(json.c_str(), "w");
    if (!file) return 1;
    // Rows as bench/schema.json wants them; bench/gpu/report.py puts them beside Marrow's.
    cudaDeviceProp properties{};
    must(cudaGetDeviceProperties(&properties, 0), "properties");
    std::fprintf(file, "[");
    const char* comma = "";
    for (const Row& r : bench.rows()) {
      const Summary& m = r.summary;
      std::fprintf(file,
                   "%s\n{\"what\":\"floor: "
                   "%s\",\"unit\":\"%s\",\"kind\":\"measured\",\"devices\":[{\"role\":\"kernels\","
                   "\"device\":\"gpu\",\"name\":\"%s\"}],\"parameters\":{\"bytes\":%zu,\"blocks\":%"
                   "d,\"threads\":%d},"
                   "\"statistics\":{\"count\":%zu,\"min\":%.3f,\"median\":%.3f,\"mean\":%.3f,"
                   "\"p99\":%.3f,\"max\":%.3f,"
                   "\"stddev\":%.3f},\"verified\":true,\"note\":\"%s\"}",
                   comma, r.what.c_str(), r.unit.c_str(), properties.name, r.bytes, r.blocks,
                   r.threads, m.samples.size(), m.min, m.median, m.mean, m.p99, m.max, m.stddev,
                   r.note.c_str());
      comma = ",";
    }
    std::fprintf(file, "\n]\n");
    std::fclose(file);
  }
  return 0;
}
