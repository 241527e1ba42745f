// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, a GPU each. Host code alone: the kernels are the library's.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "ep/site.hpp"

namespace marrow::ep_test {
namespace {

void must(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

int gpus() {
  int present = 0;
  return cudaGetDeviceCount(&present) == cudaSuccess ? present : 0;
}
int ranks_of_a_gpu() {
  const char* text = std::getenv("MARROW_TEST_EP_RANKS");
  return text ? std::max(1, std::atoi(text)) : 1;
}

class GpuMemory final : public Memory {
 public:
  explicit GpuMemory(cudaStream_t stream) : stream_(stream) {}
  ~GpuMemory() override {
    for (void* block : blocks_) (void)cudaFree(block);
  }
  void* allocate(std::size_t bytes) override {
    void* block = nullptr;
    must(cudaMalloc(&block, bytes + 16), "cudaMalloc");
    blocks_.push_back(block);
    return block;
  }
  // In the stream's order: what a kernel still reads is not overwritten.
  void upload(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void poison(void* at, std::size_t bytes) override {
    must(cudaMemsetAsync(at, 0xff, bytes, stream_), "cudaMemsetAsync");
  }

 private:
  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    must(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  cudaStream_t stream_;
  std::vector<void*> blocks_;
};

class GpuSite final : public Site {
 public:
  explicit GpuSite(int rank) : device_(rank % gpus()) {
    must(cudaSetDevice(device_), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    memory_ = std::make_unique<GpuMemory>(stream_);
  }
  ~GpuSite() override {
    memory_.reset();
    for (cudaGraphExec_t graph : graphs_) (void)cudaGraphExecDestroy(graph);
    (void)cudaEventDestroy(event_);
    (void)cudaStreamDestroy(other_);
    (void)cudaStreamDestroy(stream_);
  }
  Place place() override { return Place::gpu(device_, stream_); }
  Memory& memory() override { return *memory_; }
  void* other_stream() override { return other_; }
  void order(void* earlier, void* later) override {
    must(cudaEventRecord(event_, static_cast<cudaStream_t>(earlier)), "cudaEventRecord");
    must(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event_, 0), "cudaStreamWaitEvent");
  }
  void scribble(void* stream, void* at, std::size_t bytes) override {
    must(cudaMemsetAsync(at, 0xff, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  }
  void copy(void* stream, void* to, const void* from, std::size_t bytes) override {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
         "cudaMemcpyAsync");
  }
  std::function<void()> graph(const std::function<void()>& body) override {
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    body();
    must(cudaStreamEndCapture(stream_, &graph), "end of capture");
    cudaGraphExec_t ready = nullptr;
    must(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    (void)cudaGraphDestroy(graph);
    graphs_.push_back(ready);
    return [this, ready] {
      must(cudaGraphLaunch(ready, stream_), "cudaGraphLaunch");
      must(cudaStreamSynchronize(stream_), "a replayed graph");
    };
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t other_ = nullptr;
  cudaEvent_t event_ = nullptr;
  std::unique_ptr<GpuMemory> memory_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace

std::unique_ptr<Site> make_site(int rank) { return std::make_unique<GpuSite>(rank); }
int most_ranks() { return gpus() * ranks_of_a_gpu(); }
int sms_of_a_rank() { return ranks_of_a_gpu() == 1 ? 0 : 100 / ranks_of_a_gpu(); }
bool on_gpus() { return true; }
std::string context_lost() {
  for (int device = 0; device < gpus(); ++device) {
    (void)cudaSetDevice(device);
    if (const cudaError_t error = cudaFree(nullptr); error != cudaSuccess)
      return "GPU " + std::to_string(device) + ": " + cudaGetErrorString(error);
  }
  return {};
}
std::vector<std::string> paths() {
  std::vector<std::string> all{"lsa", "gda", "proxy", "alone"};
  if (ranks_of_a_gpu() > 1) all.insert(all.end(), {"mixed", "teams"});
  return all;
}

}  // namespace marrow::ep_test
