// SPDX-License-Identifier: Apache-2.0
// Issue bench of the gda path on one GPU: what a post costs the thread that makes it, beside the floor (the
// same stores and release, by hand) and, when built with a DOCA GPUNetIO, its functions. No NIC and no
// engine: nobody reads the queues.
//   marrow_gda_issue [--json FILE] [--only-marrow]      77 without a GPU
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench.cuh"

namespace gda_bench {
namespace {

std::vector<Row> all_rows;
std::vector<Cost> all_costs;

std::uint32_t big(std::uint32_t v) { return __builtin_bswap32(v); }

struct Check {
  const std::byte* sq;
  const std::uint32_t* record;
  std::uint64_t posted;
  std::uint32_t qpn;
  bool every_block;
};
/// One thread a slot: is the last WQE that was written there the one that ought to be?
__global__ void check_ring(Check c, unsigned long long* wrong) {
  const std::uint32_t slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot == 0 &&
      (*c.record != __byte_perm(static_cast<std::uint32_t>(c.posted & 0xffff), 0, 0x0123)))
    atomicAdd(wrong, 1ull << 32);
  if (!c.every_block || slot >= c.posted) return;
  const std::uint64_t last = c.posted - 1;
  const std::uint64_t index = last - ((last - slot) & (kDepth - 1));
  const auto* words = reinterpret_cast<const std::uint32_t*>(c.sq + std::size_t{slot} * 64);
  const std::uint32_t control =
      __byte_perm(static_cast<std::uint32_t>(index & 0xffff) << 8 | 8, 0, 0x0123);
  const std::uint32_t qpn_ds = __byte_perm(c.qpn << 8 | 3, 0, 0x0123);
  if (words[0] != control || words[1] != qpn_ds || words[8] != __byte_perm(64, 0, 0x0123))
    atomicAdd(wrong, 1);
}

double at(const std::vector<double>& sorted, double quantile) {
  return sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(sorted.size() * quantile))];
}

void print(const Row& r) {
  std::printf("%-26s %-7s %-7s %-7s %-9s %6d thr %4d q  ", r.what.c_str(), r.sharing.c_str(),
              r.placement.c_str(), r.scope.c_str(), r.batch.c_str(), r.threads, r.queues);
  if (r.is_rate) {
    std::printf("%10.2f M WQE/s", r.value);
  } else {
    std::vector<double> c = r.cycles;
    double mean = 0;
    for (const double v : c) mean += v / static_cast<double>(c.size());
    std::sort(c.begin(), c.end());
    std::printf("%7.0f cycles %7.0f ns, p99 %7.0f ns, mean %6.0f ns", at(c, 0.5),
                at(c, 0.5) / r.per_ns, at(c, 0.99) / r.per_ns, mean / r.per_ns);
  }
  std::printf("%s  %s\n", r.verified ? "" : "  NOT VERIFIED", r.note.c_str());
  std::fflush(stdout);
}

void write_row(std::FILE* file, const Row& r, const char* gpu, const char* unit, double scale,
               const char* comma) {
  std::vector<double> v = r.cycles;
  if (r.is_rate) v = {r.value};
  for (double& x : v) x *= scale;
  std::sort(v.begin(), v.end());
  double mean = 0, spread = 0;
  for (const double x : v) mean += x / static_cast<double>(v.size());
  for (const double x : v) spread += (x - mean) * (x - mean) / static_cast<double>(v.size());
  std::fprintf(
      file,
      "%s\n{\"what\":\"gda issue: "
      "%s\",\"unit\":\"%s\",\"kind\":\"measured\",\"devices\":[{\"role\":"
      "\"kernels\",\"device\":\"gpu\",\"name\":\"%s\"}],\"parameters\":{\"sharing\":\"%s\",\"queue_"
      "memory\":"
      "\"%s\",\"release_scope\":\"%s\",\"wqe_per_doorbell\":\"%s\",\"threads\":%d,\"queues\":%d,"
      "\"depth\":%u,"
      "\"doorbell\":\"8 bytes, pinned host "
      "memory\",\"engine\":\"off\"},\"statistics\":{\"count\":%zu,"
      "\"min\":%.3f,\"median\":%.3f,\"mean\":%.3f,\"p99\":%.3f,\"max\":%.3f,\"stddev\":%.3f},"
      "\"verified\":%s,\"note\":\"%s\"}",
      comma, r.what.c_str(), unit, gpu, r.sharing.c_str(), r.placement.c_str(), r.scope.c_str(),
      r.batch.c_str(), r.threads, r.queues, kDepth, v.size(), v.front(), at(v, 0.5), mean,
      at(v, 0.99), v.back(), std::sqrt(spread), r.verified ? "true" : "false", r.note.c_str());
}

}  // namespace

void must(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

const Memory& memory(Placement placement) {
  static Memory made[2];
  static bool have[2];
  Memory& m = made[static_cast<int>(placement)];
  if (have[static_cast<int>(placement)]) return m;
  have[static_cast<int>(placement)] = true;
  const int count = placement == Placement::device ? kMostQueues : 1;
  const auto take = [&](std::size_t bytes) {
    void* p = nullptr;
    if (placement == Placement::device) {
      must(cudaMalloc(&p, bytes), "malloc");
    } else {
      must(cudaHostAlloc(&p, bytes, cudaHostAllocMapped), "pinned memory");
    }
    must(cudaMemset(p, 0, bytes), "memset");
    return static_cast<std::byte*>(p);
  };
  std::byte* rings = take(std::size_t{kDepth} * 64 * count);
  std::byte* records = take(4096 * count);
  m.cq = take(std::size_t{kDepth} * 64);
  void* bells = nullptr;
  must(cudaHostAlloc(&bells, 4096 * kMostQueues, cudaHostAllocMapped | cudaHostAllocPortable),
       "pinned memory");
  std::memset(bells, 0, 4096 * kMostQueues);
  for (int i = 0; i < count; ++i) {
    m.sq[i] = rings + std::size_t{kDepth} * 64 * i;
    m.record[i] = records + 4096 * i;
    m.doorbell[i] = m.doorbell_host[i] =
        reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(bells) + 4096 * i);
  }
  return m;
}

namespace {
template <class T>
T* device_words(std::size_t count) {
  void* p = nullptr;
  must(cudaMalloc(&p, count * sizeof(T)), "malloc");
  must(cudaMemset(p, 0, count * sizeof(T)), "memset");
  return static_cast<T*>(p);
}
}  // namespace

std::uint32_t* cycle_log() {
  static auto* words = device_words<std::uint32_t>(kCalls);
  return words;
}
Clock* clock_words() {
  static auto* words = device_words<Clock>(1);
  return words;
}
Rate* rate_words() {
  static auto* words = device_words<Rate>(1);
  return words;
}
void reset_rate() {
  const Rate none{0, ~0ull, 0};
  must(cudaMemcpy(rate_words(), &none, sizeof none, cudaMemcpyHostToDevice), "copy");
}

void add_times(Row row, int calls, int per_call) {
  std::vector<std::uint32_t> cycles(calls);
  Clock clock;
  must(
      cudaMemcpy(cycles.data(), cycle_log(), calls * sizeof(std::uint32_t), cudaMemcpyDeviceToHost),
      "copy");
  must(cudaMemcpy(&clock, clock_words(), sizeof clock, cudaMemcpyDeviceToHost), "copy");
  if (clock.ns) row.per_ns = static_cast<double>(clock.cycles) / static_cast<double>(clock.ns);
  // The first tenth warms up.
  for (int i = calls / 10; i < calls; ++i)
    row.cycles.push_back(static_cast<double>(cycles[i]) / per_call);
  print(row);
  all_rows.push_back(std::move(row));
}

void add_rate(Row row) {
  Rate r;
  must(cudaMemcpy(&r, rate_words(), sizeof r, cudaMemcpyDeviceToHost), "copy");
  // Every thread counts its own posts, so a post of a warp counts 32.
  row.is_rate = true;
  row.value = static_cast<double>(r.operations) * 1e3 / static_cast<double>(r.last_ns - r.first_ns);
  print(row);
  all_rows.push_back(std::move(row));
}

void add_cost(Cost cost) {
  std::printf("kernel: %-42s %3d registers %4d B stack %3d blocks of 128 an SM\n",
              cost.what.c_str(), cost.registers, cost.stack, cost.blocks_per_sm);
  all_costs.push_back(std::move(cost));
}

const std::vector<Row>& rows() { return all_rows; }

bool verify(Placement placement, int q, std::uint64_t posted, std::uint32_t qpn, bool every_block,
            bool bell_too) {
  static auto* wrong = device_words<unsigned long long>(1);
  if (posted == 0) return true;
  const Memory& m = memory(placement);
  must(cudaMemset(wrong, 0, sizeof *wrong), "memset");
  check_ring<<<kDepth / 256, 256>>>(
      {m.sq[q], reinterpret_cast<const std::uint32_t*>(m.record[q]) + 1, posted, qpn, every_block},
      wrong);
  unsigned long long found = 0;
  must(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), "check");
  const std::uint64_t bell =
      std::uint64_t{big(qpn << 8)} << 32 | big(static_cast<std::uint32_t>(posted & 0xffff) << 8);
  const std::uint64_t rung =
      bell_too ? *static_cast<volatile std::uint64_t*>(m.doorbell_host[q]) : bell;
  if (!bell_too) found &= 0xffffffffu;
  if (found || rung != bell)
    std::printf("queue %d, %llu posted: %u wrong entries%s%s\n", q,
                static_cast<unsigned long long>(posted), static_cast<unsigned>(found),
                found >> 32 ? ", wrong record" : "", rung != bell ? ", wrong doorbell" : "");
  return found == 0 && rung == bell;
}

#if !defined(MARROW_BENCH_GPUNETIO)
void gpunetio_rows() {
  std::printf("gpunetio rows skipped: built without -DMARROW_GPUNETIO=PATH\n");
}
#endif

}  // namespace gda_bench

int main(int argc, char** argv) {
  using namespace gda_bench;
  ::alarm(100);  // the host's watchdog: each kernel here runs for milliseconds
  std::string json;
  bool peers = true;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--json") && i + 1 < argc) json = argv[++i];
    if (!std::strcmp(argv[i], "--only-marrow")) peers = false;
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 1) {
    std::fprintf(stderr, "marrow_gda_issue: needs a GPU\n");
    return 77;
  }
  probe_rows();
  floor_rows();
  marrow_rows();
  unchecked_rows();
  if (peers) gpunetio_rows();
  bool good = true;
  for (const Row& r : rows()) good = good && r.verified;
  if (!json.empty()) {
    std::FILE* file = std::fopen(json.c_str(), "w");
    if (!file) return 1;
    cudaDeviceProp properties{};
    must(cudaGetDeviceProperties(&properties, 0), "properties");
    std::fprintf(file, "[");
    const char* comma = "";
    for (const Row& r : rows()) {
      if (r.is_rate) {
        write_row(file, r, properties.name, "Mops/s", 1, comma);
      } else {
        write_row(file, r, properties.name, "ns", 1 / r.per_ns, comma);
        write_row(file, r, properties.name, "cycles", 1, ",");
      }
      comma = ",";
    }
    for (const Cost& c : all_costs) {
      const struct {
        const char* what;
        int value;
        const char* unit;
      } figures[] = {{"registers", c.registers, "count"},
                     {"stack bytes", c.stack, "count"},
                     {"blocks of 128 threads an SM", c.blocks_per_sm, "count"}};
      for (const auto& f : figures) {
        std::fprintf(file,
                     ",\n{\"what\":\"gda probe: %s, "
                     "%s\",\"unit\":\"%s\",\"kind\":\"measured\",\"devices\":[{\"role\":"
                     "\"kernels\",\"device\":\"gpu\",\"name\":\"%s\"}],\"parameters\":{},"
                     "\"statistics\":{\"count\":1,"
                     "\"min\":%d,\"median\":%d,\"mean\":%d,\"p99\":%d,\"max\":%d,\"stddev\":0},"
                     "\"verified\":true,"
                     "\"note\":\"one operation in an otherwise empty kernel\"}",
                     c.what.c_str(), f.what, f.unit, properties.name, f.value, f.value, f.value,
                     f.value, f.value);
      }
    }
    std::fprintf(file, "\n]\n");
    std::fclose(file);
  }
  std::printf(good ? "all rows verified\n" : "SOME ROWS NOT VERIFIED\n");
  return good ? 0 : 1;
}
