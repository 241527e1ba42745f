// SPDX-License-Identifier: Apache-2.0
// Litmus test: a 16-byte cell stored by store_cell is never seen half. One GPU stores changing cells
// while another polls them, over NVLink and over PCIe; a CPU thread polls host memory too, with its
// own rule (high word first, then low: low may be newer, never older). Time-boxed.
//   cells_litmus_test [seconds per case = 2] [--json FILE]
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "marrow/device/platform.cuh"

namespace {

constexpr int kBlocks = 64;
constexpr int kThreads = 256;
constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15ull;  // odd: a bijection

struct Counts {
  unsigned long long loads, changes, torn;
};

void must(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

/// Cell i of a thread's `count`: neighbouring (coalesced) or one per 128-byte line.
__device__ marrow::Cell16* cell(marrow::Cell16* cells, int thread, int spread) {
  return cells + thread * spread;
}

__global__ void store_all(marrow::Cell16* cells, int spread, std::uint64_t ns,
                          unsigned long long* stores) {
  const int me = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const std::uint64_t start = marrow::now_ns();
  std::uint64_t x = 0;
  do {
    for (int i = 0; i < 64; ++i) {
      ++x;
      marrow::store_cell(cell(cells, me, spread), {x * kFactor, x});
    }
  } while (marrow::now_ns() - start < ns);
  atomicAdd(stores, static_cast<unsigned long long>(x));
}

__global__ void poll_all(const marrow::Cell16* cells, int spread, std::uint64_t ns,
                         Counts* counts) {
  const int me = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const std::uint64_t start = marrow::now_ns();
  unsigned long long loads = 0, changes = 0, torn = 0;
  std::uint64_t last = 0;
  do {
    for (int i = 0; i < 64; ++i) {
      const marrow::Cell16 seen =
          marrow::load_cell(cell(const_cast<marrow::Cell16*>(cells), me, spread));
      ++loads;
      changes += seen.high != last;
      torn += seen.low != seen.high * kFactor;
      last = seen.high;
    }
  } while (marrow::now_ns() - start < ns);
  atomicAdd(&counts->loads, loads);
  atomicAdd(&counts->changes, changes);
  atomicAdd(&counts->torn, torn);
}

/// The CPU's rule: high first (acquire), then low; low belongs to the same store or a later one.
void poll_on_cpu(marrow::Cell16* cells, int spread, const std::atomic<bool>& stop, Counts& counts) {
  std::uint64_t inverse = 1;
  for (int i = 0; i < 6; ++i)
    inverse *= 2 - kFactor * inverse;  // Newton: kFactor * inverse == 1 mod 2^64
  std::vector<std::uint64_t> last(kBlocks * kThreads);
  while (!stop) {
    for (int i = 0; i < kBlocks * kThreads; ++i) {
      marrow::Cell16& at = cells[i * spread];
      const std::uint64_t high =
          std::atomic_ref<std::uint64_t>(at.high).load(std::memory_order_acquire);
      const std::uint64_t low =
          std::atomic_ref<std::uint64_t>(at.low).load(std::memory_order_relaxed);
      ++counts.loads;
      counts.changes += high != last[i];
      counts.torn += static_cast<std::int64_t>(low * inverse - high) < 0;
      last[i] = high;
    }
  }
}

struct Case {
  const char* name;
  int writer, reader;  // GPUs; reader -1: CPU
  int memory;          // GPU, or -1: host
  int spread;
};

}  // namespace

int main(int argc, char** argv) {
  ::alarm(110);
  double seconds = 2;
  const char* json = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--json") && i + 1 < argc)
      json = argv[++i];
    else
      seconds = std::atof(argv[i]);
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2) {
    std::printf("skipped: needs two GPUs\n");
    return 77;
  }
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, 0), "properties");
  const std::string name = properties.name;
  const Case cases[] = {
      {"NVLink, stored to the reader's memory, neighbouring cells", 0, 1, 1, 1},
      {"NVLink, stored to the reader's memory, one cell a line", 0, 1, 1, 8},
      {"NVLink, loaded from the writer's memory", 0, 1, 0, 1},
      {"own memory", 0, 0, 0, 1},
      {"PCIe, GPU to host memory, another GPU loads", 0, 1, -1, 1},
      {"PCIe, GPU to host memory, the same GPU loads", 0, 0, -1, 8},
      {"PCIe, GPU to host memory, the CPU loads", 0, -1, -1, 1},
  };
  std::FILE* file = json ? std::fopen(json, "w") : nullptr;
  if (file) std::fprintf(file, "[");
  bool bad = false;
  const char* comma = "";
  for (const Case& c : cases) {
    // PCIe is slower: more time for as many cells.
    const auto ns = static_cast<std::uint64_t>(seconds * (c.memory < 0 ? 3e9 : 1e9));
    const std::size_t bytes = std::size_t{kBlocks} * kThreads * c.spread * sizeof(marrow::Cell16);
    marrow::Cell16* cells = nullptr;
    for (int d = 0; d < 2; ++d) {
      must(cudaSetDevice(d), "set device");
      const cudaError_t peer = cudaDeviceEnablePeerAccess(1 - d, 0);
      if (peer == cudaErrorPeerAccessAlreadyEnabled)
        (void)cudaGetLastError();
      else
        must(peer, "peer access");
    }
    if (c.memory >= 0) {
      must(cudaSetDevice(c.memory), "set device");
      must(cudaMalloc(&cells, bytes), "malloc");
      must(cudaMemset(cells, 0, bytes), "memset");
      must(cudaDeviceSynchronize(), "sync");
    } else {
      must(cudaHostAlloc(&cells, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
           "host memory");
      std::memset(cells, 0, bytes);
    }
    unsigned long long* stores = nullptr;
    Counts* counts = nullptr;
    must(cudaSetDevice(c.writer), "set device");
    must(cudaMalloc(&stores, 8), "malloc");
    must(cudaMemset(stores, 0, 8), "memset");
    must(cudaDeviceSynchronize(), "sync");
    cudaStream_t writing, reading = nullptr;
    must(cudaStreamCreateWithFlags(&writing, cudaStreamNonBlocking), "stream");
    Counts seen{};
    std::atomic<bool> stop{false};
    std::thread cpu;
    if (c.reader >= 0) {
      must(cudaSetDevice(c.reader), "set device");
      must(cudaMalloc(&counts, sizeof(Counts)), "malloc");
      must(cudaMemset(counts, 0, sizeof(Counts)), "memset");
      must(cudaDeviceSynchronize(), "sync");
      must(cudaStreamCreateWithFlags(&reading, cudaStreamNonBlocking), "stream");
      poll_all<<<kBlocks, kThreads, 0, reading>>>(cells, c.spread, ns, counts);
      must(cudaGetLastError(), "launch");
    } else {
      cpu = std::thread([&] { poll_on_cpu(cells, c.spread, stop, seen); });
    }
    must(cudaSetDevice(c.writer), "set device");
    store_all<<<kBlocks, kThreads, 0, writing>>>(cells, c.spread, ns, stores);
    must(cudaGetLastError(), "launch");
    must(cudaStreamSynchronize(writing), "store");
    unsigned long long stored = 0;
    must(cudaMemcpy(&stored, stores, 8, cudaMemcpyDeviceToHost), "copy");
    if (c.reader >= 0) {
      must(cudaSetDevice(c.reader), "set device");
      must(cudaStreamSynchronize(reading), "poll");
      must(cudaMemcpy(&seen, counts, sizeof(seen), cudaMemcpyDeviceToHost), "copy");
      must(cudaFree(counts), "free");
      must(cudaStreamDestroy(reading), "stream");
    } else {
      stop = true;
      cpu.join();
    }
    std::printf("%-58s stores %.3g  loads %.3g  changes seen %.3g  torn %llu\n", c.name,
                double(stored), double(seen.loads), double(seen.changes), seen.torn);
    std::fflush(stdout);
    if (file) {
      const double torn = static_cast<double>(seen.torn);
      std::fprintf(
          file,
          "%s\n{\"what\":\"torn cells: "
          "%s\",\"unit\":\"count\",\"kind\":\"measured\",\"devices\":[{\"role\":\"kernels\","
          "\"device\":\"gpu\",\"name\":\"%s\"}],\"parameters\":{\"stores\":%llu,\"loads\":%llu,"
          "\"changes seen\":%llu},"
          "\"statistics\":{\"count\":1,\"min\":%g,\"median\":%g,\"mean\":%g,\"p99\":%g,\"max\":%g,"
          "\"stddev\":0},"
          "\"note\":\"every load compares both halves\"}",
          comma, c.name, name.c_str(), stored, seen.loads, seen.changes, torn, torn, torn, torn,
          torn);
      comma = ",";
    }
    bad = bad || seen.torn != 0 || seen.changes == 0;
    must(cudaSetDevice(c.writer), "set device");
    must(cudaStreamDestroy(writing), "stream");
    must(cudaFree(stores), "free");
    must(c.memory >= 0 ? cudaFree(cells) : cudaFreeHost(cells), "free");
  }
  if (file) {
    std::fprintf(file, "\n]\n");
    std::fclose(file);
  }
  std::printf(bad ? "FAILED\n" : "no torn cell\n");
  return bad ? 1 : 0;
}
