// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Windows of device memory on the proxy path, with a copy engine that copies late: a signal, a flush and
// a counter must wait for the copies before them, whatever the order of the calls.
#include "unit/late_copy_engine.hpp"
#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

ProxyOptions with_late_copies() {
  ProxyOptions options;
  options.make_copy_engine = [] { return std::make_unique<LateCopyEngine>(); };
  return options;
}

MARROW_KERNEL rounds(DeviceCommunicator comm, WindowHandle device, WindowHandle host,
                     LocalBufferHandle local, int count, std::uint32_t* wrong, Status* out) {
  Gin gin(comm, 0);
  const int peer = 1 - comm.rank;
  Status status = Status::ok;
  for (int i = 1; i <= count && status == Status::ok; ++i) {
    const std::uint64_t half = (i & 1) * 4096;
    for (int b = 0; b < 1000; ++b)
      local.local[half + b] = static_cast<std::byte>(i * 3 + b + comm.rank);
    // To device memory, to host memory behind it, a value, then the signal: all must be there.
    status = worse(status, gin.put(peer, device, half, local, half, 1000));
    status = worse(status, gin.put(peer, host, half, local, half, 1000));
    status = worse(status, gin.put_value(peer, device, half + 1024, i));
    status = worse(status, gin.put_value(peer, host, half + 1024, i, SignalAdd{0, 1}));
    status = worse(status, gin.wait_signal(0, i));
    const auto check = [&](const std::byte* data) {
      for (int b = 0; b < 1000; ++b) {
        if (data[b] != static_cast<std::byte>(i * 3 + b + peer)) ++*wrong;
      }
      int value = 0;
      std::memcpy(&value, data + 1024, 4);
      if (value != i) ++*wrong;
    };
    check(device.local + half);
    check(host.local + half);
    // Read back what we wrote there, from device to device memory.
    status = worse(status, gin.get(peer, device, half, device, 8192, 1000, CounterInc{1}));
    status = worse(status, gin.wait_counter(1, i));
    for (int b = 0; b < 1000; ++b) {
      if (device.local[8192 + b] != local.local[half + b]) ++*wrong;
    }
    status = worse(status, gin.signal(peer, SignalAdd{1, 1}));
    status = worse(status, gin.wait_signal(1, i));
  }
  *out = worse(status, gin.flush());
}

TEST(ProxyDeviceMemory, SignalsWaitForTheCopiesBeforeThem) {
  run_proxy_ranks(
      2,
      [](ProxyRank& rank) {
        const WindowHandle device = rank.make_window(10, 16384, true);
        std::uint32_t wrong = 0;
        Status status = Status::invalid;
        rank.run(1, 1, rounds, device, rank.window, rank.local, 100, &wrong, &status);
        EXPECT_EQ(status, Status::ok);
        EXPECT_EQ(wrong, 0u);
        EXPECT_TRUE(rank.errors().empty());
        rank.bootstrap().barrier();
        rank.transport().deregister(10);
      },
      with_late_copies());
}

MARROW_KERNEL add_there(DeviceCommunicator comm, WindowHandle device, Status* out) {
  Gin gin(comm, 0);
  (void)gin.add(1 - comm.rank, device, 0, 1);
  *out = gin.flush();
}

TEST(ProxyDeviceMemory, AddsToItAreRefused) {
  run_proxy_ranks(
      2,
      [](ProxyRank& rank) {
        const WindowHandle device = rank.make_window(10, 4096, true);
        Status status = Status::ok;
        rank.run(1, 1, add_there, device, &status);
        EXPECT_EQ(status, Status::invalid);
        EXPECT_EQ(rank.errors().size(), 1u);
        rank.bootstrap().barrier();
        rank.transport().deregister(10);
      },
      with_late_copies());
}

TEST(ProxyDeviceMemory, WithoutACopyEngineItIsRefusedOnEveryRank) {
  run_proxy_ranks(2, [](ProxyRank& rank) {
    try {
      (void)rank.make_window(10, 4096, rank.rank() == 0);
      ADD_FAILURE() << "took it";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::unsupported) << error.what();
    }
  });
}

}  // namespace
}  // namespace marrow::test
