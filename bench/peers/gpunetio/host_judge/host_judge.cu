// SPDX-License-Identifier: Apache-2.0
// Judge of softnic's fidelity: DOCA GPUNetIO, unmodified, from library to kernel. Its host library makes
// and connects queue pairs (through the libibverbs.so.1 and libmlx5.so.1 that are found: softnic's), its
// service thread forwards the doorbells that its device functions leave, and what those put, signal,
// count and get is compared byte by byte. Prints one line a check; exit status 1 if any fails.
//   LD_LIBRARY_PATH=<softnic's libraries> MARROW_SOFTNIC=engine=copy marrow_gpunetio_host_judge
#include <cuda_runtime.h>
#include <doca_gpunetio_device.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "queue_pairs.hpp"

namespace judge {

inline void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) die(std::string(what) + ": " + cudaGetErrorString(status));
}

namespace {

constexpr auto kExclusive = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_EXCLUSIVE;
constexpr auto kShared = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU;
constexpr auto kAuto = DOCA_GPUNETIO_VERBS_NIC_HANDLER_AUTO;
constexpr auto kThread = DOCA_GPUNETIO_VERBS_EXEC_SCOPE_THREAD;
constexpr auto kWarp = DOCA_GPUNETIO_VERBS_EXEC_SCOPE_WARP;
constexpr auto kAdd = DOCA_GPUNETIO_VERBS_SIGNAL_OP_ADD;

/// One window, the far side's as seen from the queue pair: softnic delivers into it.
struct Window {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t words;  ///< signal, its sink, counter, its sink
  __be32 key;
  __device__ doca_gpu_dev_verbs_addr at(std::uint64_t address) const { return {address, key}; }
};

template <auto kMode>
__global__ void put_each(doca_gpu_dev_verbs_qp* qp, Window w, int count, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  for (int i = 0; i < count; ++i) {
    doca_gpu_dev_verbs_put<kMode, kAuto, kThread>(qp, w.at(w.to + std::uint64_t{bytes} * i),
                                                  w.at(w.from + std::uint64_t{bytes} * i), bytes,
                                                  &ticket);
  }
  doca_gpu_dev_verbs_wait<kMode, kAuto>(qp, ticket);
}
__global__ void put_collapsed(doca_gpu_dev_verbs_qp* qp, Window w, int count, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  for (int i = 0; i < count; ++i) {
    doca_gpu_dev_verbs_put<kExclusive, kAuto, kThread>(
        qp, w.at(w.to + std::uint64_t{bytes} * i), w.at(w.from + std::uint64_t{bytes} * i), bytes,
        &ticket,
        DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_AVAILABILITY_CHECK |
            DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_CPU_PROXY_UPDATE_PI);
    // Its argument is the index behind the one waited for, and it looks at the producer index first, which
    // the proxy's doorbell moves only when asked to.
    doca_gpu_dev_verbs_poll_cq_collapsed_at<kExclusive>(qp, ticket + 1);
  }
}
__global__ void put_many_threads(doca_gpu_dev_verbs_qp* qp, Window w, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  const std::uint64_t own = std::uint64_t{bytes} * threadIdx.x;
  doca_gpu_dev_verbs_put<kShared, kAuto, kThread>(qp, w.at(w.to + own), w.at(w.from + own), bytes,
                                                  &ticket);
  doca_gpu_dev_verbs_wait<kShared, kAuto>(qp, ticket);
}
__global__ void put_warp(doca_gpu_dev_verbs_qp* qp, Window w, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  const std::uint64_t own = std::uint64_t{bytes} * threadIdx.x;
  doca_gpu_dev_verbs_put<kShared, kAuto, kWarp>(qp, w.at(w.to + own), w.at(w.from + own), bytes,
                                                &ticket);
  doca_gpu_dev_verbs_wait<kShared, kAuto>(qp, ticket);
}
__global__ void put_values(doca_gpu_dev_verbs_qp* qp, Window w, int count) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  for (int i = 0; i < count; ++i) {
    doca_gpu_dev_verbs_p<std::uint64_t, kExclusive>(qp, w.at(w.to + 8ull * i),
                                                    0x0101010101010101ull * (i % 256), &ticket);
  }
  doca_gpu_dev_verbs_wait<kExclusive, kAuto>(qp, ticket);
}
__global__ void put_signals(doca_gpu_dev_verbs_qp* qp, Window w, int count, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t own = std::uint64_t{bytes} * i;
    doca_gpu_dev_verbs_put_signal<kAdd, kExclusive>(qp, w.at(w.to + own), w.at(w.from + own), bytes,
                                                    w.at(w.words), w.at(w.words + 8), 3, &ticket);
  }
  doca_gpu_dev_verbs_wait<kExclusive, kAuto>(qp, ticket);
}
__global__ void get_each(doca_gpu_dev_verbs_qp* qp, Window w, int count, std::uint32_t bytes) {
  doca_gpu_dev_verbs_ticket_t ticket = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t own = std::uint64_t{bytes} * i;
    doca_gpu_dev_verbs_get<kExclusive, kAuto, kThread, DOCA_GPUNETIO_VERBS_MCST_ENABLED>(
        qp, w.at(w.from + own), w.at(w.to + own), bytes, w.at(w.words), &ticket);
  }
  doca_gpu_dev_verbs_wait<kExclusive, kAuto>(qp, ticket);
}
/// The companion waits for the put's completion in the NIC, then adds to the counter here.
__global__ void put_counter(doca_gpu_dev_verbs_qp* qp, doca_gpu_dev_verbs_qp* companion, Window w,
                            int count, std::uint32_t bytes) {
  for (int i = 0; i < count; ++i) {
    const std::uint64_t own = std::uint64_t{bytes} * i;
    doca_gpu_dev_verbs_put_counter<kExclusive>(qp, w.at(w.to + own), w.at(w.from + own), bytes,
                                               companion, w.at(w.words + 16), w.at(w.words + 24),
                                               1);
  }
  while (*reinterpret_cast<volatile std::uint64_t*>(w.words + 16) <
         static_cast<std::uint64_t>(count)) {
  }
}

class Judge {
 public:
  explicit Judge(const Device& device) : device_(device) {
    must(cudaMalloc(&memory_, kBytes), "cudaMalloc");
    must(cudaMemset(memory_, 0, kBytes), "cudaMemset");
    region_ = device.calls.reg_mr(device.pd, memory_, kBytes, 0xf);
    if (region_ == nullptr) die("ibv_reg_mr of GPU memory failed");
    window_.from = reinterpret_cast<std::uint64_t>(memory_);
    window_.to = window_.from + kHalf;
    window_.words = window_.from + 2 * kHalf;
    window_.key = __builtin_bswap32(region_->rkey);
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  void close() {
    device_.calls.dereg_mr(region_);
    cudaStreamDestroy(stream_);
    cudaFree(memory_);
  }

  /// Runs a kernel; then `bytes` of the target must be those of the source.
  template <class Launch>
  void run(const char* name, std::size_t bytes, Launch&& launch) {
    std::vector<unsigned char> source(kHalf);
    for (std::size_t i = 0; i < kHalf; ++i) {
      source[i] = static_cast<unsigned char>(seed_ + i * 7 + i / 253);
    }
    seed_ += 31;
    fill(source);
    const auto start = std::chrono::steady_clock::now();
    launch(stream_, window_);
    finish(name, start);
    std::vector<unsigned char> target(kHalf);
    must(cudaMemcpy(target.data(), reinterpret_cast<void*>(window_.to), kHalf,
                    cudaMemcpyDeviceToHost),
         "copy back");
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kHalf; ++i) wrong += target[i] != (i < bytes ? source[i] : 0);
    report(name, wrong == 0, std::to_string(wrong) + " bytes differ", start);
  }
  std::uint64_t word(int index) {
    std::uint64_t value = 0;
    must(cudaMemcpy(&value, reinterpret_cast<void*>(window_.words + 8ull * index), 8,
                    cudaMemcpyDeviceToHost),
         "copy back");
    return value;
  }
  void expect(const char* name, std::uint64_t got, std::uint64_t wanted) {
    report(name, got == wanted, std::to_string(got) + ", not " + std::to_string(wanted),
           std::chrono::steady_clock::now());
  }
  void fill(const std::vector<unsigned char>& source) {
    must(cudaMemcpy(memory_, source.data(), kHalf, cudaMemcpyHostToDevice), "copy");
    must(cudaMemset(reinterpret_cast<void*>(window_.to), 0, kHalf + 64), "clear");
    must(cudaDeviceSynchronize(), "synchronize");
  }
  template <class Launch>
  void values(const char* name, int count, Launch&& launch) {
    fill(std::vector<unsigned char>(kHalf));
    const auto start = std::chrono::steady_clock::now();
    launch(stream_, window_);
    finish(name, start);
    std::vector<unsigned char> target(8 * count);
    must(cudaMemcpy(target.data(), reinterpret_cast<void*>(window_.to), target.size(),
                    cudaMemcpyDeviceToHost),
         "copy back");
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < target.size(); ++i) wrong += target[i] != (i / 8) % 256;
    report(name, wrong == 0, std::to_string(wrong) + " bytes differ", start);
  }
  int failures() const { return failures_; }

 private:
  static constexpr std::size_t kHalf = std::size_t{1} << 20;
  static constexpr std::size_t kBytes = 2 * kHalf + 65536;

  void finish(const char* name, std::chrono::steady_clock::time_point start) {
    must(cudaGetLastError(), name);
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream_);
      if (status == cudaSuccess) return;
      if (status != cudaErrorNotReady) must(status, name);
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(15)) {
        die(std::string(name) + ": the kernel does not end within 15 s");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  void report(const char* name, bool good, const std::string& why,
              std::chrono::steady_clock::time_point start) {
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-44s %s %9.2f ms%s%s\n", name, good ? "ok    " : "FAILED", ms, good ? "" : "  ",
                good ? "" : why.c_str());
    std::fflush(stdout);
    if (!good) ++failures_;
  }

  const Device& device_;
  void* memory_ = nullptr;
  verbs::ibv_mr* region_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Window window_{};
  unsigned seed_ = 1;
  int failures_ = 0;
};

doca_gpu_dev_verbs_qp* on_gpu(doca_gpu_verbs_qp_hl* qp) {
  doca_gpu_dev_verbs_qp* device = nullptr;
  must(doca_gpu_verbs_get_qp_dev(qp->qp_gverbs, &device), "get_qp_dev");
  return device;
}

int main_of_judge() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  char bus[32] = {};
  must(cudaSetDevice(0), "cudaSetDevice");
  must(cudaFree(nullptr), "cudaFree");
  must(cudaDeviceGetPCIBusId(bus, sizeof bus, 0), "PCI bus id");
  Device device(bus);
  std::printf("device %s, LID %d, GPU %s\n", device.name.c_str(), device.lid, bus);

  doca_gpu_verbs_qp_hl* ring[2];
  doca_gpu_verbs_qp_hl* collapsed[2];
  doca_gpu_verbs_qp_group_hl* group[2];
  for (int i = 0; i < 2; ++i) {
    auto init = device.attributes(false);
    must(doca_gpu_verbs_create_qp_hl(&init, &ring[i]), "create_qp_hl");
    init = device.attributes(true);
    must(doca_gpu_verbs_create_qp_hl(&init, &collapsed[i]), "create_qp_hl, collapsed");
    init = device.attributes(false);
    must(doca_gpu_verbs_create_qp_group_hl(&init, &group[i]), "create_qp_group_hl");
  }
  for (int i = 0; i < 2; ++i) {
    connect(device, ring[i]->qp, doca_verbs_qp_get_qpn(ring[1 - i]->qp));
    connect(device, collapsed[i]->qp, doca_verbs_qp_get_qpn(collapsed[1 - i]->qp));
    connect(device, group[i]->qp_main.qp, doca_verbs_qp_get_qpn(group[1 - i]->qp_main.qp));
  }
  // The companions work on this side's memory: with each other.
  for (int i = 0; i < 2; ++i) {
    connect(device, group[i]->qp_companion.qp,
            doca_verbs_qp_get_qpn(group[1 - i]->qp_companion.qp));
  }
  std::printf("doorbells by: %s\n",
              ring[0]->nic_handler == DOCA_GPUNETIO_VERBS_NIC_HANDLER_CPU_PROXY
                  ? "gpunetio's service thread (CPU proxy)"
                  : "the GPU");
  doca_gpu_verbs_service_t service = nullptr;
  must(doca_gpu_verbs_create_service(&service), "create_service");
  doca_gpu_verbs_qp* const served[] = {ring[0]->qp_gverbs, collapsed[0]->qp_gverbs,
                                       group[0]->qp_main.qp_gverbs,
                                       group[0]->qp_companion.qp_gverbs};
  for (doca_gpu_verbs_qp* qp : served) {
    if (qp->cpu_proxy) must(doca_gpu_verbs_service_monitor_qp(service, qp), "monitor_qp");
  }

  Judge judge(device);
  auto* q = on_gpu(ring[0]);
  auto* c = on_gpu(collapsed[0]);
  auto* main_qp = on_gpu(&group[0]->qp_main);
  auto* companion = on_gpu(&group[0]->qp_companion);
  judge.run("put, exclusive, 16 x 64 B", 16 * 64,
            [&](cudaStream_t s, Window w) { put_each<kExclusive><<<1, 1, 0, s>>>(q, w, 16, 64); });
  judge.run("put, exclusive, 600 x 64 B (wraps)", 600 * 64,
            [&](cudaStream_t s, Window w) { put_each<kExclusive><<<1, 1, 0, s>>>(q, w, 600, 64); });
  judge.run("put, shared by the GPU, 4 x 128 KiB", 4 << 17,
            [&](cudaStream_t s, Window w) { put_each<kShared><<<1, 1, 0, s>>>(q, w, 4, 1 << 17); });
  judge.run("put, 96 threads at once", 96 * 256,
            [&](cudaStream_t s, Window w) { put_many_threads<<<1, 96, 0, s>>>(q, w, 256); });
  judge.run("put, one warp", 32 * 512,
            [&](cudaStream_t s, Window w) { put_warp<<<1, 32, 0, s>>>(q, w, 512); });
  judge.values("p, inline, 300 x 8 B", 300,
               [&](cudaStream_t s, Window w) { put_values<<<1, 1, 0, s>>>(q, w, 300); });
  judge.run("put + signal, 20 x 4 KiB", 20 * 4096,
            [&](cudaStream_t s, Window w) { put_signals<<<1, 1, 0, s>>>(q, w, 20, 4096); });
  judge.expect("the signal's word", judge.word(0), 60);
  judge.expect("its last old value", judge.word(1), 57);
  judge.run("get with DUMP, 10 x 8 KiB", 10 * 8192,
            [&](cudaStream_t s, Window w) { get_each<<<1, 1, 0, s>>>(q, w, 10, 8192); });
  judge.run("put + counter on the companion, 50 x 1 KiB", 50 * 1024, [&](cudaStream_t s, Window w) {
    put_counter<<<1, 1, 0, s>>>(main_qp, companion, w, 50, 1024);
  });
  judge.expect("the counter's word", judge.word(2), 50);
  judge.run("put, collapsed CQ, 300 x 64 B", 300 * 64,
            [&](cudaStream_t s, Window w) { put_collapsed<<<1, 1, 0, s>>>(c, w, 300, 64); });

  must(doca_gpu_verbs_destroy_service(service), "destroy_service");
  for (int i = 0; i < 2; ++i) {
    must(doca_gpu_verbs_destroy_qp_hl(ring[i]), "destroy_qp_hl");
    must(doca_gpu_verbs_destroy_qp_hl(collapsed[i]), "destroy_qp_hl");
    must(doca_gpu_verbs_destroy_qp_group_hl(group[i]), "destroy_qp_group_hl");
  }
  judge.close();
  must(doca_gpu_destroy(device.gpu), "doca_gpu_destroy");
  if (device.calls.dealloc_pd(device.pd) != 0)
    die("ibv_dealloc_pd failed: something was left over");
  if (device.calls.close_device(device.context) != 0) die("ibv_close_device failed");
  std::printf("%s\n", judge.failures() == 0 ? "passed" : "FAILED");
  return judge.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace judge

int main() { return judge::main_of_judge(); }
