// SPDX-License-Identifier: Apache-2.0
// DOCA GPUNetIO's own put, unmodified, in the set-up of bench/gda: the figures to stand beside ours.
#include "bench.cuh"
#include "queue.cuh"

namespace gda_bench {
namespace {

constexpr auto kExclusive = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_EXCLUSIVE;
constexpr auto kBlock = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_CTA;
constexpr auto kDevice = DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU;
constexpr auto kHandler = DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB;
constexpr auto kSkip = DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_AVAILABILITY_CHECK;

template <auto kMode, auto kScope, unsigned kOptions>
__device__ __forceinline__ void post(doca_gpu_dev_verbs_qp* qp, std::uint64_t offset) {
  doca_gpu_dev_verbs_ticket_t ticket;
  const doca_gpu_dev_verbs_addr remote{0x1000000 + offset, 0x77000000};
  const doca_gpu_dev_verbs_addr local{0x2000000 + offset, 0x66000000};
  doca_gpu_dev_verbs_put<kMode, kHandler, kScope>(qp, remote, local, 64, &ticket, kOptions);
}

template <auto kMode, auto kScope, unsigned kOptions>
__global__ void issue(doca_gpu_dev_verbs_qp* qp, int every, std::uint32_t* log, Clock* clock) {
  if (every == 1) {
    timed(log, clock, kCalls, [&](int i) { post<kMode, kScope, kOptions>(qp, i * 64ull); });
  } else {
    timed(log, clock, kCalls, [&](int i) {
      if (((i + 1) & (every - 1)) == 0) {
        post<kMode, kScope, kOptions>(qp, i * 64ull);
      } else {
        post<kMode, kScope, kOptions | DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_DB_RINGING>(qp,
                                                                                         i * 64ull);
      }
    });
  }
}

template <auto kMode, auto kScope>
__global__ void rate(doca_gpu_dev_verbs_qp* qps, int queues, int every, std::uint64_t ns,
                     Rate* out) {
  const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
  doca_gpu_dev_verbs_qp* qp =
      qps + (static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32) % queues;
  const std::uint64_t own = (blockIdx.x * blockDim.x + threadIdx.x) * 64ull;
  rated(out, ns, every, [&](int i) {
    if (((i + 1) & (every - 1)) == 0) {
      post<kMode, kScope, kSkip>(qp, own);
    } else {
      post<kMode, kScope, kSkip | DOCA_GPUNETIO_VERBS_GPU_CODE_OPT_SKIP_DB_RINGING>(qp, own);
    }
  });
}

class Queues {
 public:
  explicit Queues(int count) : count_(count) {
    const Memory& m = memory(Placement::device);
    std::vector<doca_gpu_dev_verbs_qp> image;
    for (int i = 0; i < count; ++i) {
      image.push_back(gpunetio::make_queue(0x100 + i, kDepth, m.sq[i],
                                           reinterpret_cast<std::uint32_t*>(m.record[i]) + 1,
                                           m.doorbell[i], m.cq, 1, 0, kFarAhead));
    }
    must(cudaMalloc(&qps, image.size() * sizeof image[0]), "malloc");
    must(cudaMemcpy(qps, image.data(), image.size() * sizeof image[0], cudaMemcpyHostToDevice),
         "copy");
  }
  ~Queues() { cudaFree(qps); }
  /// @param bell_too  the last doorbell is that of the last entry. put_warp's is an earlier one (seen with 2.0.1:
  ///                  it rings for its first lane's entry)
  bool good(bool all_rung, bool bell_too) {
    std::vector<doca_gpu_dev_verbs_qp> image(count_);
    must(cudaMemcpy(image.data(), qps, count_ * sizeof image[0], cudaMemcpyDeviceToHost), "copy");
    bool ok = true;
    for (int i = 0; i < count_ && all_rung; ++i)
      ok = verify(Placement::device, i, image[i].sq_rsvd_index, 0x100 + i, true, bell_too) && ok;
    return ok;
  }
  doca_gpu_dev_verbs_qp* qps = nullptr;

 private:
  int count_;
};

const char* name(int mode) {
  return mode == kExclusive ? "thread" : mode == kBlock ? "block" : "device";
}

template <auto kMode, auto kScope, unsigned kOptions>
void issue_row(int every, const char* note) {
  constexpr bool kWarp = kScope == DOCA_GPUNETIO_VERBS_EXEC_SCOPE_WARP;
  Queues q(1);
  issue<kMode, kScope, kOptions><<<1, kWarp ? 32 : 1>>>(q.qps, every, cycle_log(), clock_words());
  must(cudaGetLastError(), "gpunetio");
  must(cudaDeviceSynchronize(), "gpunetio");
  Row row;
  row.what = kWarp ? "gpunetio put_warp 64 B" : "gpunetio put 64 B";
  row.sharing = name(kMode);
  row.placement = "device";
  row.scope = "device";
  row.batch = kWarp ? "32 a call" : every == 1 ? "1" : "32";
  row.threads = kWarp ? 32 : 1;
  row.note = note;
  row.verified = q.good(true, !kWarp);
  add_times(std::move(row), kCalls);
}

template <auto kMode, auto kScope>
void rate_row(int blocks, int threads, int queues, int every) {
  Queues q(queues);
  reset_rate();
  rate<kMode, kScope><<<blocks, threads>>>(q.qps, queues, every, 8'000'000, rate_words());
  must(cudaGetLastError(), "gpunetio");
  must(cudaDeviceSynchronize(), "gpunetio");
  Row row;
  row.what = kScope == DOCA_GPUNETIO_VERBS_EXEC_SCOPE_WARP ? "gpunetio rate, put_warp"
                                                           : "gpunetio rate, put";
  row.sharing = name(kMode);
  row.placement = "device";
  row.scope = "device";
  row.batch = every == 1 ? "1" : "32";
  row.threads = blocks * threads;
  row.queues = queues;
  row.verified = q.good(every == 1, kScope != DOCA_GPUNETIO_VERBS_EXEC_SCOPE_WARP);
  add_rate(std::move(row));
}

}  // namespace

void gpunetio_rows() {
  constexpr auto kThread = DOCA_GPUNETIO_VERBS_EXEC_SCOPE_THREAD;
  constexpr auto kWarp = DOCA_GPUNETIO_VERBS_EXEC_SCOPE_WARP;
  const char* skip = "availability check skipped";
  issue_row<kExclusive, kThread, kSkip>(1, skip);
  issue_row<kExclusive, kThread, kSkip>(32, skip);
  issue_row<kExclusive, kThread, 0>(1, "");
  issue_row<kBlock, kThread, kSkip>(1, skip);
  issue_row<kBlock, kThread, 0>(1, "");
  issue_row<kDevice, kThread, kSkip>(1, skip);
  issue_row<kDevice, kThread, 0>(1, "");
  issue_row<kExclusive, kWarp, kSkip>(1, skip);
  issue_row<kDevice, kWarp, kSkip>(1, skip);
  rate_row<kDevice, kThread>(1, 1, 1, 1);
  rate_row<kDevice, kThread>(132, 128, 8, 1);
  rate_row<kDevice, kThread>(132, 128, 8, 32);
  rate_row<kDevice, kThread>(132, 128, 132, 1);
  rate_row<kDevice, kThread>(132, 128, 132, 32);
  rate_row<kDevice, kWarp>(132, 128, 132, 1);
  rate_row<kExclusive, kWarp>(1, 32, 1, 1);
  rate_row<kExclusive, kWarp>(132, 32, 132, 1);
}

}  // namespace gda_bench
