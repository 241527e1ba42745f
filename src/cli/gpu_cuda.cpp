// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "cli/gpu.hpp"
#include "cli/text.hpp"
#include "marrow/error.hpp"

namespace marrow::cli::gpu {
namespace {

void check(cudaError_t result, const char* what, int device) {
  if (result == cudaSuccess) return;
  throw Error(result == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::cuda,
              format("%s on GPU %d: %s", what, device, cudaGetErrorString(result)),
              "run `nvidia-smi` and `marrow info`; a smaller --sizes needs less memory");
}

}  // namespace

int count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

std::string why_none() {
  int n = 0;
  const cudaError_t result = cudaGetDeviceCount(&n);
  if (result == cudaSuccess && n > 0) return {};
  return std::string("no GPU: ") +
         (result == cudaSuccess ? "none is visible" : cudaGetErrorString(result));
}

std::string name(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "reading the properties", device);
  return properties.name;
}

std::string driver() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return {};
  return format("%d.%d", version / 1000, version % 1000 / 10);
}

void* create_stream(int device) {
  check(cudaSetDevice(device), "selecting", device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream", device);
  return stream;
}

void destroy_stream(int device, void* stream) noexcept {
  (void)cudaSetDevice(device);
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

void synchronize(int device, void* stream) {
  check(cudaSetDevice(device), "selecting", device);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for a kernel", device);
}

void* allocate(int device, std::size_t bytes, bool host) {
  check(cudaSetDevice(device), "selecting", device);
  void* memory = nullptr;
  if (host) {
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
          "allocating pinned memory", device);
    __builtin_memset(memory, 0, bytes);
  } else {
    check(cudaMalloc(&memory, bytes), "allocating memory", device);
    check(cudaMemset(memory, 0, bytes), "clearing memory", device);
    check(cudaStreamSynchronize(nullptr), "clearing memory", device);
  }
  return memory;
}

void release(int device, void* memory, bool host) noexcept {
  (void)cudaSetDevice(device);
  (void)(host ? cudaFreeHost(memory) : cudaFree(memory));
}

void copy(int device, void* stream, void* to, const void* from, std::size_t bytes) {
  check(cudaSetDevice(device), "selecting", device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
        "copying", device);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "copying", device);
}

Events::Events(int device, std::size_t count) : device_(device) {
  check(cudaSetDevice(device), "selecting", device);
  for (std::size_t i = 0; i < count; ++i) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "making an event", device);
    events_.push_back(event);
  }
}
Events::~Events() {
  for (void* event : events_) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
}
void Events::record(void* stream, std::size_t which) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(events_.at(which)),
                        static_cast<cudaStream_t>(stream)),
        "recording an event", device_);
}
double Events::elapsed_us(std::size_t from, std::size_t to) const {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(events_.at(from)),
                             static_cast<cudaEvent_t>(events_.at(to))),
        "reading events", device_);
  return static_cast<double>(ms) * 1e3;
}

Graph::Graph(int device, void* stream, const std::function<void()>& record) : device_(device) {
  const auto s = static_cast<cudaStream_t>(stream);
  check(cudaSetDevice(device), "selecting", device);
  check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "capturing a graph", device);
  cudaGraph_t recorded = nullptr;
  try {
    record();
  } catch (...) {
    (void)cudaStreamEndCapture(s, &recorded);
    if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
    throw;
  }
  check(cudaStreamEndCapture(s, &recorded), "capturing a graph", device);
  cudaGraphExec_t ready = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&ready, recorded, 0);
  (void)cudaGraphDestroy(recorded);
  check(made, "making a graph", device);
  graph_ = ready;
}
Graph::~Graph() {
  if (graph_ != nullptr) (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
}
void Graph::launch(void* stream) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), static_cast<cudaStream_t>(stream)),
        "launching a graph", device_);
}

}  // namespace marrow::cli::gpu
