// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all tsan-all
// Driver table and topology, on machines with and without a GPU.
#include <gtest/gtest.h>

#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "memory/arena.hpp"
#include "memory/host_backing.hpp"
#include "topology/topology.hpp"

namespace marrow {
namespace {

TEST(CudaDriver, SaysWhyThereIsNone) {
  std::string reason;
  if (cuda::available(&reason)) {
    EXPECT_TRUE(reason.empty());
    EXPECT_GT(cuda::device_count(), 0);
    return;
  }
  EXPECT_FALSE(reason.empty());
  EXPECT_EQ(cuda::device_count(), 0);
  try {
    (void)cuda::driver();
    FAIL() << "driver() must throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_EQ(error.sentence(), reason);
    EXPECT_FALSE(error.next_step().empty());
  }
}

TEST(CudaDriver, ArenaOfAGpuThatIsNotThere) {
  try {
    (void)memory::Arena::create(Place::gpu(999));
    FAIL() << "there is no GPU 999";
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == Code::unsupported || error.code() == Code::invalid_argument)
        << error.what();
  }
}

TEST(Topology, ListsNeverThrow) {
  for (const topology::Gpu& gpu : topology::gpus()) EXPECT_EQ(gpu.uuid.size(), 40u) << gpu.name;
  for (const topology::Nic& nic : topology::nics()) EXPECT_FALSE(nic.name.empty());
  EXPECT_EQ(topology::numa_of_pci("no such device"), -1);
}

TEST(Topology, CpuDevicesReachEachOtherOnOneHostOnly) {
  const auto a = topology::endpoint(Place::cpu(), 1, 10);
  const auto b = topology::endpoint(Place::cpu(), 1, 11);
  const auto far = topology::endpoint(Place::cpu(), 2, 10);
  EXPECT_TRUE(topology::reach(a, b).lsa);
  EXPECT_FALSE(topology::reach(a, far).lsa);
  EXPECT_NE(topology::reach(a, far).reason.find("different hosts"), std::string::npos);
}

TEST(Topology, CpuAndGpuDoNotReachEachOther) {
  const auto a = topology::endpoint(Place::cpu(), 1, 10);
  topology::Endpoint gpu = a;
  gpu.device = 0;
  EXPECT_FALSE(topology::reach(a, gpu).lsa);
  EXPECT_FALSE(topology::reach(gpu, a).lsa);
  EXPECT_FALSE(topology::reach(gpu, a).reason.empty());
}

TEST(Topology, AnEndpointNeedsItsGpu) {
  EXPECT_THROW(topology::endpoint(Place::gpu(999), 1, 1), Error);
}

TEST(Topology, AHiddenGpuOfAPeerIsNamed) {
  topology::Endpoint me, peer;
  me.device = peer.device = 0;
  me.process = 1;
  peer.process = 2;
  peer.uuid.fill(0xab);
  const topology::Reach reach = topology::reach(me, peer);
  EXPECT_FALSE(reach.lsa);
  EXPECT_NE(reach.reason.find("GPU-abababab-abab"), std::string::npos) << reach.reason;
}

TEST(HostBacking, FindsTheFileOfASharedMappingOnly) {
  const base::Fd file = base::memfd("backing-test", 3 * 4096);
  const base::Mapping mapping = base::Mapping::of_fd(file.get(), 2 * 4096, 4096);
  const auto found = memory::host_backing(mapping.as<char>(100), 200);
  ASSERT_TRUE(found.fd.valid());
  EXPECT_EQ(found.offset, 4096u + 100u);
  EXPECT_EQ(base::file_size(found.fd.get()), 3u * 4096u);
  EXPECT_FALSE(memory::host_backing(mapping.as<char>(), 3 * 4096).fd.valid())
      << "past the mapping's end";
  const base::Mapping own = base::Mapping::anonymous(4096);
  EXPECT_FALSE(memory::host_backing(own.data(), 10).fd.valid());
}

}  // namespace
}  // namespace marrow
