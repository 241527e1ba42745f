// SPDX-License-Identifier: Apache-2.0
#include "ep/launches.hpp"
#include "ep/launches_body.cuh"

namespace marrow::ep {
namespace {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw Error(Code::cuda, std::string(what) + " failed: " + cudaGetErrorString(result),
              "an earlier kernel of the stream may have failed; run it under compute-sanitizer");
}

void synchronize(const Place& place) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(place.stream)), "waiting for ep's stream");
}

bool capturing(const Place& place) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(place.stream), &status),
        "asking whether ep's stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

int processors(const Place& place) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, place.device),
        "asking for the number of SMs");
  return count;
}

void load(const Place& place) {
  int before = place.device;
  check(cudaGetDevice(&before), "asking for the current GPU");
  check(cudaSetDevice(place.device), "using ep's GPU");
  const auto kernel = [](auto* function) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(function)),
          "loading ep's kernels");
  };
  kernel(&dispatch_kernel<true, false>);
  kernel(&dispatch_kernel<true, true>);
  kernel(&dispatch_kernel<false, false>);
  kernel(&dispatch_kernel<false, true>);
  kernel(&combine_kernel<true>);
  kernel(&combine_kernel<false>);
  kernel(&place_kernel);
  kernel(&far_put_kernel);
  kernel(&far_wait_kernel);
  kernel(&flush_kernel);
  kernel(&reset_kernel);
  kernel(&report_kernel);
  check(cudaSetDevice(before), "using the GPU that was current before");
}

}  // namespace

const Launches& gpu_launches() {
  static constexpr Launches kGpu{run_dispatch, run_combine, run_flush,  run_reset, run_report,
                                 synchronize,  capturing,   processors, load};
  return kGpu;
}

}  // namespace marrow::ep

#if defined(MARROW_EP_TIMELINE)
/// The current GPU's timeline of the last kernels; for bench/gpu/ep.cu, which looks it up by name.
extern "C" __attribute__((visibility("default"))) int marrow_ep_timeline(void* to,
                                                                         std::size_t bytes) {
  using marrow::ep::gpu_device::timeline;
  if (bytes != sizeof timeline) return -1;
  return cudaMemcpyFromSymbol(to, timeline, sizeof timeline);
}
#endif
