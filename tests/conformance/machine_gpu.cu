// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "conformance/machine.hpp"

namespace marrow::conformance {
namespace {

void must(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

class GpuMachine : public Machine {
 public:
  ~GpuMachine() override {
    if (stream_) (void)cudaStreamDestroy(stream_);
  }
  Place place(int rank, int gpus) override {
    int present = 0;
    must(cudaGetDeviceCount(&present), "cudaGetDeviceCount");
    const int used = gpus > 0 && gpus < present ? gpus : present;
    must(cudaSetDevice(rank % used), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    return Place::gpu(rank % used, stream_);
  }
  void* allocate(std::size_t bytes, bool host) override {
    void* pointer = nullptr;
    must(host ? cudaMallocHost(&pointer, bytes) : cudaMalloc(&pointer, bytes), "cudaMalloc");
    return pointer;
  }
  void release(void* pointer, bool host) override {
    (void)(host ? cudaFreeHost(pointer) : cudaFree(pointer));
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

int gpu_count() {
  int present = 0;
  return cudaGetDeviceCount(&present) == cudaSuccess ? present : 0;
}

std::unique_ptr<Machine> make_machine() { return std::make_unique<GpuMachine>(); }

}  // namespace marrow::conformance
