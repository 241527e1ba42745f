// SPDX-License-Identifier: Apache-2.0
// launch() on a GPU: threads that launch one kernel with different sizes of shared memory do not meet, and who
// asks for too much is told both numbers. Exits 77 without a GPU.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "marrow/device/launch.cuh"

namespace {

constexpr int kLaunches = 2000;

/// Writes its block's last word of shared memory and reads it; counts what came back right.
__global__ void last_word(int bytes, unsigned* right) {
  auto* words = marrow::dynamic_shared<volatile unsigned>();
  words[bytes / 4 - 1] = 0x1234;
  if (words[bytes / 4 - 1] == 0x1234) atomicAdd(right, 1u);
}

__global__ void with_static(unsigned* right) {
  __shared__ volatile unsigned fixed[8 * 1024];  // 32 KiB
  marrow::dynamic_shared<volatile unsigned>()[5 * 1024 - 1] = 7;
  fixed[threadIdx.x] = 9;
  if (marrow::dynamic_shared<volatile unsigned>()[5 * 1024 - 1] + fixed[threadIdx.x] == 16)
    atomicAdd(right, 1u);
}

bool check(bool good, const std::string& what) {
  std::printf("%s  %s\n", good ? "ok  " : "FAIL", what.c_str());
  return good;
}

}  // namespace

int main() {
  ::alarm(50);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("skipped: needs a GPU\n");
    return 77;
  }
  unsigned* right = nullptr;
  if (cudaMallocManaged(&right, sizeof(*right)) != cudaSuccess) return 1;
  *right = 0;
  bool good = true;

  int most = 0;
  (void)cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  const std::vector<int> sizes = {1024, 50 * 1024, most / 2 & ~3, most};
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (const int bytes : sizes) {
    threads.emplace_back([&, bytes] {
      cudaStream_t stream = nullptr;
      if (cudaSetDevice(0) != cudaSuccess ||
          cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        failures += kLaunches;
        return;
      }
      for (int i = 0; i < kLaunches; ++i) {
        try {
          marrow::launch(marrow::Place::gpu(0, stream), 1, 1, static_cast<std::size_t>(bytes),
                         last_word, bytes, right);
        } catch (const marrow::Error& error) {
          if (failures++ == 0) std::printf("%d bytes: %s\n", bytes, error.what());
        }
      }
      if (cudaStreamSynchronize(stream) != cudaSuccess) ++failures;
      (void)cudaStreamDestroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto meant = static_cast<unsigned>(kLaunches * sizes.size());
  good &= check(
      failures == 0 && *right == meant,
      "threads launch one kernel with different shared memory: " + std::to_string(failures.load()) +
          " failures, " + std::to_string(*right) + " of " + std::to_string(meant) + " right");

  // Together more than the 48 KiB that need no opening, though the launch asks for less.
  *right = 0;
  std::string said;
  try {
    marrow::launch(marrow::Place::gpu(0), 1, 32, 20 * 1024, with_static, right);
  } catch (const marrow::Error& error) {
    said = error.what();
  }
  good &= check(cudaDeviceSynchronize() == cudaSuccess && *right == 32,
                "static and dynamic shared memory together " + said);

  said.clear();
  try {
    marrow::launch(marrow::Place::gpu(0), 1, 32, static_cast<std::size_t>(most), with_static,
                   right);
  } catch (const marrow::Error& error) {
    said = error.what();
    good &= check(error.code() == marrow::Code::invalid_argument, "its code");
  }
  good &= check(said.find(std::to_string(most)) != std::string::npos &&
                    said.find(std::to_string(most - 32 * 1024)) != std::string::npos,
                "too much names both numbers: " + said);
  good &= check(cudaGetLastError() == cudaSuccess, "and leaves no error behind");
  std::printf(good ? "all passed\n" : "FAILED\n");
  return good ? 0 : 1;
}
