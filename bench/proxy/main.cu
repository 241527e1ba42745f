// SPDX-License-Identifier: Apache-2.0
// The proxy path on this machine's first GPU, each figure beside its floor in the same run: rates by producers and
// progress threads, GPU to CPU one way, issue, waking up, idle cost, completion over shm; and an MSCCL++'s FIFO if built
// with one.
//   marrow_proxy_bench [--json FILE] [--only PART,...]    77 without a GPU
//   parts: bare, rates, latencies, shm, mscclpp; placement alone; staging (bench/gpu/staging.sh) only when asked for
#include <algorithm>
#include <cctype>
#include <cstring>

#include "bench.cuh"

namespace proxy_bench {
namespace {
std::vector<Row> rows;

void write_json(const char* path) {
  std::FILE* file = std::fopen(path, "w");
  if (!file) {
    std::perror(path);
    std::exit(1);
  }
  cudaDeviceProp gpu{};
  must(cudaGetDeviceProperties(&gpu, 0), "properties");
  std::fprintf(file, "[");
  const char* comma = "";
  for (const Row& r : rows) {
    std::fprintf(file, "%s\n{\"what\":\"%s\",\"unit\":\"%s\",\"kind\":\"%s\",", comma,
                 r.what.c_str(), r.unit.c_str(), r.gpu ? "measured" : "measured (host)");
    if (!r.network.empty())
      std::fprintf(file, "\"path\":\"proxy\",\"network\":\"%s\",", r.network.c_str());
    std::fprintf(file, "\"devices\":[");
    if (r.gpu)
      std::fprintf(file, "{\"role\":\"producers\",\"device\":\"gpu\",\"name\":\"%s\"},", gpu.name);
    std::fprintf(file, "{\"role\":\"threads that drain\",\"device\":\"host\",\"name\":\"CPU\"}],");
    std::fprintf(file, "\"parameters\":{\"producers\":%d,\"threads\":%d},", r.producers, r.threads);
    const Summary& s = r.summary;
    std::fprintf(
        file,
        "\"statistics\":{\"count\":%zu,\"min\":%.4f,\"median\":%.4f,\"mean\":%.4f,\"p99\":%"
        ".4f,\"max\":%.4f,\"stddev\":%.4f},\"verified\":%s,\"note\":\"%s\"}",
        s.samples.size(), s.min, s.median, s.mean, s.p99, s.max, s.stddev,
        r.verified ? "true" : "false", r.note.c_str());
    comma = ",";
  }
  std::fprintf(file, "\n]\n");
  std::fclose(file);
}
}  // namespace

void add(Row row) {
  if (row.summary.samples.empty()) {
    std::printf("%-44s not measured\n", row.what.c_str());
    return;
  }
  std::printf("%-44s %6d producers %d threads  %12.4f %-6s p99 %.4f%s  %s\n", row.what.c_str(),
              row.producers, row.threads, row.summary.median, row.unit.c_str(), row.summary.p99,
              row.verified ? "" : "  (not checked)", row.note.c_str());
  std::fflush(stdout);
  rows.push_back(std::move(row));
}

const std::vector<int>& cpus() {
  static const std::vector<int> found = [] {
    char bus[32] = {};
    must(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0), "bus id");
    std::string pci = bus;
    std::transform(pci.begin(), pci.end(), pci.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    const std::string node = placement::line_of("/sys/bus/pci/devices/" + pci + "/numa_node");
    std::vector<int> list = placement::one_each_core(node.empty() ? -1 : std::atoi(node.c_str()));
    std::printf(
        "GPU 0 at %s, NUMA node %s (-1: the machine does not say); nodes %s; CPUs used: %s for "
        "what waits, then",
        pci.c_str(), node.c_str(), placement::line_of("/sys/devices/system/node/online").c_str(),
        std::to_string(list.front()).c_str());
    for (std::size_t i = 1; i < list.size(); ++i)
      std::printf(" %d(of core %s)", list[i],
                  placement::text(placement::siblings(list[i])).c_str());
    std::printf("\n");
    return list;
  }();
  return found;
}

double timed(cudaStream_t stream, const std::function<void()>& launch) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (!begin) {
    must(cudaEventCreate(&begin), "event");
    must(cudaEventCreate(&end), "event");
  }
  must(cudaEventRecord(begin, stream), "event");
  launch();
  must(cudaGetLastError(), "launch");
  must(cudaEventRecord(end, stream), "event");
  must(cudaEventSynchronize(end), "kernel");
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin, end), "event");
  return ms * 1e6;
}

}  // namespace proxy_bench

int main(int argc, char** argv) {
  const char* json = nullptr;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--json")) json = argv[i + 1];
    if (!std::strcmp(argv[i], "--only")) only = argv[i + 1];
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 1) {
    std::fprintf(stderr, "marrow_proxy_bench: needs a GPU\n");
    return 77;
  }
  proxy_bench::must(cudaSetDevice(0), "device");
  proxy_bench::pin_self(proxy_bench::host_cpu());
  if (only == "placement") {
    proxy_bench::marrow_placement();
    return 0;
  }
  if (proxy_bench::wanted(only, "bare")) proxy_bench::bare_rows();
#if defined(MARROW_BENCH_MSCCLPP)
  if (proxy_bench::wanted(only, "mscclpp")) proxy_bench::mscclpp_rows();
#else
  std::printf("skipped: MSCCL++'s FIFO (build with -DMARROW_MSCCLPP=its prefix)\n");
#endif
  if (only == "staging") proxy_bench::staging_rows();
  proxy_bench::marrow_rows(only);
  if (json) proxy_bench::write_json(json);
  return 0;
}
