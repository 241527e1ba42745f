// SPDX-License-Identifier: Apache-2.0
// Random WQEs posted by GPU threads to softnic's GPU engine, all queues and memory on the GPU, against the model that
// runs beside them (unit/softnic_posted.cuh): fences, completions left out, 16-bit wrap, a mistake and flushed WQEs at
// the end of each queue's run, then new queues.
//   softnic_posted_gpu_test [--wqes N] [--seconds S] [--queues Q]
#include <cuda_runtime.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "unit/softnic_posted.hpp"

namespace marrow::softnic_posted {
namespace {

std::uint64_t wqes = 1'000'000;
int seconds = 20;
int queues = 57;

TEST(SoftnicPosted, RandomWqesAndMistakesOnTheGpuEngine) {
  cudaStream_t stream{};
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const Place place = Place::gpu(0, stream);
  Communicator comm(UniqueId::create(), 1, 0, config(place, "engine=gpu"));
  const auto start = std::chrono::steady_clock::now();
  const auto took = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::uint64_t posted = 0, rounds = 0;
  while (posted < wqes && took() < seconds && !::testing::Test::HasFailure()) {
    ++rounds;
    // Every fourth round has mistakes early and often.
    posted += rounds % 4 == 0
                  ? round(comm, place, queues, 32, 1000 * rounds, 20'000, 3000, Memory::device)
                  : round(comm, place, queues, 32, 1000 * rounds, 80'000, ~0u, Memory::device);
  }
  std::printf("%llu WQEs over %d queues in %llu rounds, %.1f s, zero mismatches expected\n",
              static_cast<unsigned long long>(posted), queues,
              static_cast<unsigned long long>(rounds), took());
  EXPECT_GE(posted, std::min<std::uint64_t>(wqes, 10'000));
}

}  // namespace
}  // namespace marrow::softnic_posted

int main(int argc, char** argv) {
  using namespace marrow::softnic_posted;
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--wqes") wqes = std::strtoull(argv[i + 1], nullptr, 0);
    if (key == "--seconds") seconds = std::atoi(argv[i + 1]);
    if (key == "--queues") queues = std::atoi(argv[i + 1]);
  }
  ::alarm(static_cast<unsigned>(seconds) + 60);
  // A kernel that is loaded when it is first launched would wait for the engine, which never ends.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 1) {
    std::puts("skipped: no GPU");
    return 77;
  }
  return RUN_ALL_TESTS();
}
