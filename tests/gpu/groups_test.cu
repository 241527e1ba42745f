// SPDX-License-Identifier: Apache-2.0
// Cooperative groups on a GPU, at sizes that cut warps: statuses agree, member 0's word arrives. Exits 77 without a GPU.
#include <unistd.h>

#include <cstdio>

#include "unit/groups_kernel.cuh"

namespace {
__global__ void groups_kernel(std::uint64_t* wrong) { marrow::groups_agree(wrong); }
}  // namespace

int main() {
  ::alarm(30);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("skipped: needs a GPU\n");
    return 77;
  }
  std::uint64_t* wrong = nullptr;
  if (cudaMallocHost(&wrong, sizeof(*wrong)) != cudaSuccess) return 1;
  int failed = 0;
  for (const int threads : {1, 6, 32, 37, 256, 1000}) {
    *wrong = 0;
    groups_kernel<<<2, threads, marrow::kGroupsSharedBytes>>>(wrong);
    const cudaError_t result = cudaDeviceSynchronize();
    const bool good = result == cudaSuccess && *wrong == 0;
    std::printf("%s  groups of %d threads: %llu wrong, %s\n", good ? "ok  " : "FAIL", threads,
                static_cast<unsigned long long>(*wrong), cudaGetErrorString(result));
    failed |= !good;
  }
  std::printf(failed ? "FAILED\n" : "all passed\n");
  return failed;
}
