// SPDX-License-Identifier: Apache-2.0
// Judge of Marrow's queues: DOCA GPUNetIO's device functions, unmodified, put, get, add and poll on queues that
// Marrow made and connected (one rank, to itself, on softnic); all data is compared. Prints a line a check;
// exit status 1 if any fails, 77 without a GPU.
//   marrow_gpunetio_device_judge [host|device]   host: queues and windows in pinned host memory, a CPU thread as
//                                                NIC; device: all in GPU memory, a GPU block as NIC
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../queue.cuh"
#include "marrow/abi/device_communicator.h"
#include "marrow/abi/gda_queue.h"
#include "marrow/marrow.hpp"

namespace {

constexpr auto kExclusive = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_EXCLUSIVE;
constexpr auto kShared = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU;
constexpr auto kHandler = DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB;
constexpr int kThreads = 64;
// Places in the window: its second half is the local side.
constexpr std::uint64_t kBytes = 1000, kValue = 2048, kWord = 4096, kWords = 8192, kLocal = 32768,
                        kGot = 49152, kSink = 61440, kWindow = 65536;

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Keys {
  std::uint64_t remote, local;
  std::uint32_t rkey, lkey;
};
struct Answers {
  int exclusive[5];
  int shared[kThreads];
};

/// Polls entry `index` for up to 5 s. @return 0, EBUSY, or gpunetio's error
template <auto kMode>
__device__ int poll(doca_gpu_dev_verbs_qp* qp, std::uint64_t index) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  int status;
  do {
    status = doca_gpu_dev_verbs_poll_one_cq_at<kMode>(doca_gpu_dev_verbs_qp_get_cq_sq(qp), index);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (status == EBUSY && now - start < 5000000000ull);
  return status;
}

__global__ void exclusive(doca_gpu_dev_verbs_qp* qp, Keys k, Answers* out) {
  doca_gpu_dev_verbs_ticket_t ticket;
  const auto remote = [&](std::uint64_t at) {
    return doca_gpu_dev_verbs_addr{k.remote + at, k.rkey};
  };
  const auto local = [&](std::uint64_t at) {
    return doca_gpu_dev_verbs_addr{k.local + at, k.lkey};
  };
  doca_gpu_dev_verbs_put<kExclusive, kHandler>(qp, remote(0), local(kLocal), kBytes, &ticket);
  out->exclusive[0] = poll<kExclusive>(qp, ticket);
  doca_gpu_dev_verbs_p<std::uint64_t, kExclusive, kHandler>(qp, remote(kValue),
                                                            0x0123456789abcdefull, &ticket);
  out->exclusive[1] = poll<kExclusive>(qp, ticket);
  for (int i = 0; i < 3; ++i) {
    doca_gpu_dev_verbs_signal<DOCA_GPUNETIO_VERBS_SIGNAL_OP_ADD, kExclusive, kHandler>(
        qp, remote(kWord), local(kSink), 5, &ticket);
  }
  out->exclusive[2] = poll<kExclusive>(qp, ticket);
  doca_gpu_dev_verbs_get<kExclusive, kHandler>(qp, remote(0), local(kGot), kBytes, local(kSink),
                                               &ticket);
  out->exclusive[3] = poll<kExclusive>(qp, ticket);
  // Past the ring's end, several laps.
  int worst = 0;
  for (int i = 0; i < 3000 && worst == 0; ++i) {
    doca_gpu_dev_verbs_put<kExclusive, kHandler>(qp, remote(kWords + 512 + i % 64 * 8),
                                                 local(kLocal + i % 64 * 8), 8, &ticket);
    if (i % 64 == 63) worst = poll<kExclusive>(qp, ticket);
  }
  out->exclusive[4] = worst ? worst : poll<kExclusive>(qp, ticket);
}

__global__ void shared(doca_gpu_dev_verbs_qp* qp, Keys k, Answers* out) {
  doca_gpu_dev_verbs_ticket_t ticket;
  const std::uint64_t at = threadIdx.x * 8;
  doca_gpu_dev_verbs_put<kShared, kHandler>(qp, {k.remote + kWords + at, k.rkey},
                                            {k.local + kLocal + at, k.lkey}, 8, &ticket);
  out->shared[threadIdx.x] = poll<kShared>(qp, ticket);
}

int failures = 0;
void check(bool good, const std::string& what) {
  std::printf("%-4s %s\n", good ? "ok" : "FAIL", what.c_str());
  std::fflush(stdout);
  failures += !good;
}

int judge(bool device) {
  using namespace marrow;
  // Before the communicator: with a GPU block as NIC nothing may be allocated later.
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::byte* staging = nullptr;
  must(cudaHostAlloc(&staging, kWindow, cudaHostAllocMapped), "pinned memory");
  Answers* answers = nullptr;
  must(cudaHostAlloc(&answers, sizeof *answers, cudaHostAllocMapped), "pinned memory");
  doca_gpu_dev_verbs_qp* qps = nullptr;
  must(cudaMalloc(&qps, 2 * sizeof *qps), "malloc");
  cudaFuncAttributes attributes;
  must(cudaFuncGetAttributes(&attributes, exclusive), "kernel");
  must(cudaFuncGetAttributes(&attributes, shared), "kernel");

  Config config;
  config.place = Place::gpu(0);
  Communicator comm(UniqueId::create(), 1, 0, config);
  Window window = comm.allocate(kWindow, device ? Memory::device : Memory::host);
  Requirements requirements;
  requirements.contexts = 2;
  DeviceCommunicatorOwner owner = comm.device_communicator(requirements);
  const DeviceCommunicator handle = owner.handle();
  const WindowHandle w = window.handle();
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy");
    must(cudaStreamSynchronize(stream), "copy");
  };

  // Our queues, as gpunetio sees them.
  copy(staging, handle.gda, sizeof(GdaDevice) + 2 * sizeof(GdaQueue));
  std::vector<GdaQueue> queues(2);
  std::memcpy(static_cast<void*>(queues.data()), staging + sizeof(GdaDevice), 2 * sizeof(GdaQueue));
  auto* image = reinterpret_cast<doca_gpu_dev_verbs_qp*>(staging);
  for (int i = 0; i < 2; ++i) {
    const GdaQueue& q = queues[i];
    image[i] = gpunetio::make_queue(mlx5::from_big32(q.qpn) >> 8, q.mask + 1u, q.sq, q.record,
                                    q.doorbell, const_cast<std::uint32_t*>(q.cq) - 15,
                                    mlx5::from_big32(q.cqn), q.reserved_index, q.completed_index);
  }
  copy(qps, staging, 2 * sizeof *qps);
  Keys keys{};
  copy(staging, w.gda_base, 8);
  std::memcpy(&keys.remote, staging, 8);
  copy(staging, w.gda_rkey, 4);
  std::memcpy(&keys.rkey, staging, 4);
  keys.local = w.gda_local;
  keys.lkey = w.gda_lkey;

  for (std::uint64_t i = 0; i < kWindow; ++i)
    staging[i] = i < kLocal || i >= kGot ? std::byte{0} : static_cast<std::byte>(i * 37 + 11);
  std::vector<std::byte> before(staging, staging + kWindow);
  copy(window.data(), staging, kWindow);
  std::memset(answers, 0x7f, sizeof *answers);
  exclusive<<<1, 1, 0, stream>>>(qps, keys, answers);
  must(cudaGetLastError(), "launch");
  must(cudaStreamSynchronize(stream), "exclusive");
  shared<<<1, kThreads, 0, stream>>>(qps + 1, keys, answers);
  must(cudaGetLastError(), "launch");
  must(cudaStreamSynchronize(stream), "shared");
  copy(staging, window.data(), kWindow);

  const char* names[] = {"put", "p (inline)", "signal (add)", "get", "3000 puts"};
  for (int i = 0; i < 5; ++i)
    check(answers->exclusive[i] == 0, std::string(names[i]) + ", exclusive: completes");
  int completed = 0;
  for (const int status : answers->shared) completed += status == 0;
  check(completed == kThreads, "64 threads put, shared: complete");
  const std::byte* source = before.data() + kLocal;
  const auto word = [&](std::uint64_t at) {
    std::uint64_t v;
    std::memcpy(&v, staging + at, 8);
    return v;
  };
  check(std::memcmp(staging, source, kBytes) == 0 && staging[kBytes] == std::byte{0},
        "put: 1000 bytes are there, no more");
  check(word(kValue) == 0x0123456789abcdefull && word(kValue + 8) == 0, "p: the value is there");
  check(word(kWord) == 15, "signal: 3 x 5");
  check(std::memcmp(staging + kGot, source, kBytes) == 0 && staging[kGot + kBytes] == std::byte{0},
        "get: 1000 bytes came");
  check(std::memcmp(staging + kWords, source, kThreads * 8) == 0, "shared: every thread's word");
  check(std::memcmp(staging + kWords + 512, source, 512) == 0, "after the ring's end: every word");
  try {
    comm.check();
    check(true, "no failed queue");
  } catch (const Error& error) {
    check(false, error.what());
  }
  return failures ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(60);  // the host's watchdog: kernels give up after 5 s a poll
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 1) {
    std::fprintf(stderr, "marrow_gpunetio_device_judge: needs a GPU\n");
    return 77;
  }
  const bool device = argc > 1 && !std::strcmp(argv[1], "device");
  setenv("MARROW_PATH", "gda", 1);
  setenv("MARROW_NIC", "softnic", 1);
  setenv("MARROW_SOFTNIC", device ? "engine=gpu" : "engine=cpu", 1);
  try {
    return judge(device);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
