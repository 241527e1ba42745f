// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, a GPU each. Host code alone: the kernels are the library's.
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "ep/site.hpp"

namespace marrow::ep_test {
namespace {

void must(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
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
  explicit GpuSite(int rank) : device_(rank) {
    must(cudaSetDevice(rank), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    memory_ = std::make_unique<GpuMemory>(stream_);
  }
  ~GpuSite() override {
    memory_.reset();
    for (cudaGraphExec_t graph : graphs_) (void)cudaGraphExecDestroy(graph);
    (void)cudaStreamDestroy(stream_);
  }
  Place place() override { return Place::gpu(device_, stream_); }
  Memory& memory() override { return *memory_; }
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
  std::unique_ptr<GpuMemory> memory_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace

std::unique_ptr<Site> make_site(int rank) { return std::make_unique<GpuSite>(rank); }
int most_ranks() {
  int present = 0;
  return cudaGetDeviceCount(&present) == cudaSuccess ? present : 0;
}
bool on_gpus() { return true; }
std::vector<std::string> paths() { return {"lsa", "gda", "proxy", "alone"}; }

}  // namespace marrow::ep_test
