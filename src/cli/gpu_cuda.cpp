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

}  // namespace marrow::cli::gpu
