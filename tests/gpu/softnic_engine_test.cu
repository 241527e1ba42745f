// SPDX-License-Identifier: Apache-2.0
// softnic's GPU engine against the plain model of the NIC, posted to from the CPU: many queue pairs at once, each
// with index wrap, fences, errors, flushes and resets. Then what must go wrong: bad key, length past the region,
// misaligned atomic, unknown opcode, overrun ring. And that the engine stands in nobody's way: calls that wait for
// all kernels return, a stopped heartbeat ends the block.
//   softnic_engine_test [--wqes N] [--seconds S] [--queues Q]
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "unit/softnic_model.hpp"

namespace marrow::softnic_test {
namespace {

std::uint64_t wqes = 200'000;
int seconds = 20;
int queues = 31;

TEST(SoftnicGpuEngine, RandomWqesAgainstTheModel) {
  const std::string job = unique_job("gpumodel");
  std::atomic<std::uint64_t> done{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int q = 0; q < queues; ++q) {
    threads.emplace_back([&, q] {
      for (std::uint64_t round = 0; done < wqes && !stop && !::testing::Test::HasFatalFailure();
           ++round) {
        compare_with_model(1000 * (q + 1) + round, q % 4 == 0 ? 6 : 10, 200'000, 4000, job, &done,
                           &stop);
      }
    });
  }
  while (done < wqes && std::chrono::steady_clock::now() - start < std::chrono::seconds(seconds) &&
         !::testing::Test::HasFatalFailure()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%llu WQEs over %d queue pairs in %.1f s, zero mismatches expected\n",
              static_cast<unsigned long long>(done.load()), queues, took);
  EXPECT_GE(done, std::min<std::uint64_t>(wqes, 10'000));
}

/// Runs one bad WQE; what follows is flushed, and the queue works again after a reset.
template <class Post>
void expect_failure(Syndrome syndrome, Post&& post) {
  Pair pair("gpufail");
  Pages memory(4096);
  auto* words = memory.as<std::uint64_t>();
  const std::uint32_t key = pair.a.region(words, 2048)->lkey;
  const std::uint32_t rkey = pair.b.region(words + 256, 1024)->rkey;
  for (int i = 256; i < 512; ++i) words[i] = 0x5555;
  post(pair, words, key, rkey);
  const std::uint16_t after = pair.a.nop();
  const Completed bad = pair.a.cq.poll();
  ASSERT_TRUE(bad.arrived) << pair.a.progress();
  EXPECT_EQ(bad.opcode, kRequesterError);
  EXPECT_EQ(int(bad.syndrome), int(syndrome));
  const Completed flushed = pair.a.cq.poll();
  ASSERT_TRUE(flushed.arrived);
  EXPECT_EQ(int(flushed.syndrome), int(kFlushError));
  EXPECT_EQ(flushed.counter, after);
  EXPECT_EQ(pair.a.state(), unsigned(kError));
  EXPECT_EQ(nic().failures(pair.a.context), 1u);
  for (int i = 256; i < 512; ++i) ASSERT_EQ(words[i], 0x5555u) << "a stray write";
  ASSERT_EQ(pair.a.modify(kToRst), 0) << nic().last_error();
  pair.a.producer = 0;
  std::atomic_ref<std::uint32_t>(pair.a.record->send).store(record_word(0));
  pair.a.connect(pair.b.qpn, pair.b.lid());
  words[0] = 77;
  pair.a.write(words, 8, key, Endpoint::u64(words + 256), rkey);
  EXPECT_TRUE(pair.a.cq.poll().ok());
  EXPECT_EQ(words[256], 77u);
}

TEST(SoftnicGpuEngine, BadRemoteKey) {
  expect_failure(kRemoteAccessError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t rkey) {
                   p.a.write(w, 8, key, Endpoint::u64(w + 256), rkey ^ 1);
                 });
}
TEST(SoftnicGpuEngine, KeyOfNobody) {
  expect_failure(kRemoteAccessError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t) {
                   p.a.write(w, 8, key, Endpoint::u64(w + 256), 0x123400);
                 });
}
TEST(SoftnicGpuEngine, BadLocalKey) {
  expect_failure(kLocalProtectionError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t rkey) {
                   p.a.write(w, 8, key ^ 1, Endpoint::u64(w + 256), rkey);
                 });
}
TEST(SoftnicGpuEngine, LengthPastTheRegion) {
  expect_failure(kRemoteAccessError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t rkey) {
                   p.a.write(w, 16, key, Endpoint::u64(w + 256) + 1016, rkey);
                 });
}
TEST(SoftnicGpuEngine, LocalLengthPastTheRegion) {
  expect_failure(kLocalProtectionError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t rkey) {
                   p.a.write(w + 255, 16, key, Endpoint::u64(w + 256), rkey);
                 });
}
TEST(SoftnicGpuEngine, MisalignedAtomic) {
  expect_failure(kRemoteInvalidRequestError,
                 [](Pair& p, std::uint64_t* w, std::uint32_t key, std::uint32_t rkey) {
                   p.a.fetch_add(w, key, Endpoint::u64(w + 256) + 4, rkey, 1);
                 });
}
TEST(SoftnicGpuEngine, UnknownOpcode) {
  expect_failure(kLocalQpOperationError, [](Pair& p, std::uint64_t*, std::uint32_t, std::uint32_t) {
    Endpoint::Wqe w;
    p.a.post(w, 0x3e);
  });
}

TEST(SoftnicGpuEngine, OverrunRing) {
  Pair pair("gpuoverrun");
  pair.a.producer = 40;  // the ring has 32
  pair.a.ring();
  const Completed bad = pair.a.cq.poll();
  ASSERT_TRUE(bad.arrived);
  EXPECT_EQ(int(bad.syndrome), int(kLocalQpOperationError));
  EXPECT_EQ(pair.a.state(), unsigned(kError));
}

TEST(SoftnicGpuEngine, WriteImmediateAndWait) {
  QpOptions receiver;
  receiver.receive_queue = true;
  Pair pair("gpuimm", "", {}, receiver);
  Pages memory(4096);
  auto* words = memory.as<std::uint64_t>();
  const std::uint32_t key = pair.a.region(words, 2048)->lkey;
  const std::uint32_t rkey = pair.b.region(words + 256, 1024)->rkey;
  pair.b.post_receive();
  words[0] = 5;
  Endpoint::Wqe w;
  w.add(Endpoint::remote(Endpoint::u64(words + 256), rkey)).add(Endpoint::data(words, 8, key));
  pair.a.post(w, kWriteImmediate, kCompletionAlways, 0, 1234);
  EXPECT_TRUE(pair.a.cq.poll().ok());
  const Completed got = pair.b.receive_cq.poll();
  ASSERT_TRUE(got.arrived);
  EXPECT_EQ(got.immediate, 1234u);
  EXPECT_EQ(words[256], 5u);
}

TEST(SoftnicGpuEngine, FaultsHappenOnce) {
  Pair pair("gpufault", "error_at=3");
  for (int i = 0; i < 2; ++i) {
    pair.a.nop();
    EXPECT_TRUE(pair.a.cq.poll().ok());
  }
  pair.a.nop();
  const Completed bad = pair.a.cq.poll();
  ASSERT_TRUE(bad.arrived);
  EXPECT_EQ(int(bad.syndrome), int(kRemoteOperationError));
}

TEST(SoftnicGpuEngine, StallEnds) {
  Pair pair("gpustall", "stall=2:300");
  pair.a.nop();
  EXPECT_TRUE(pair.a.cq.poll().ok());
  const auto start = std::chrono::steady_clock::now();
  pair.a.nop();
  EXPECT_TRUE(pair.a.cq.poll().ok());
  EXPECT_GT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(250));
}

/// cudaDeviceSynchronize and cudaFree wait for all kernels; the block makes room for them.
TEST(SoftnicGpuEngine, StandsInNobodysWay) {
  Pair pair("gpuidle");
  pair.a.nop();
  EXPECT_TRUE(pair.a.cq.poll().ok());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 1 << 20), cudaSuccess);
    ASSERT_EQ(cudaFree(memory), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
  pair.a.nop();
  EXPECT_TRUE(pair.a.cq.poll().ok());
}

}  // namespace
}  // namespace marrow::softnic_test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--wqes") marrow::softnic_test::wqes = std::strtoull(argv[i + 1], nullptr, 0);
    if (key == "--seconds") marrow::softnic_test::seconds = std::atoi(argv[i + 1]);
    if (key == "--queues") marrow::softnic_test::queues = std::atoi(argv[i + 1]);
  }
  ::alarm(static_cast<unsigned>(marrow::softnic_test::seconds) + 60);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 1) {
    std::puts("skipped: no GPU");
    return 77;
  }
  marrow::softnic_test::test_gpu() = 0;
  return RUN_ALL_TESTS();
}
