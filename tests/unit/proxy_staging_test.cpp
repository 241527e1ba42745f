// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// Memory that the network cannot reach, on the proxy path: everything that moves goes through pinned slots and a
// copy engine that copies late, and every promise about puts, gets and signals holds all the same.
#include "proxy/staging.hpp"

#include <gmock/gmock.h>

#include "unit/late_copy_engine.hpp"
#include "unit/proxy_support.hpp"
#include "unit/scripted_network.hpp"

namespace marrow::test {
namespace {

/// @param total  of staging memory: slots are as small as can be by default
ProxyOptions staged(const std::string& network = "shm", const std::string& kernel_bytes = "1024",
                    const std::string& total = "0") {
  ProxyOptions options;
  options.make_copy_engine = [] { return std::make_unique<LateCopyEngine>(); };
  options.parameters.set("MARROW_PROXY_STAGE", "always");
  options.parameters.set("MARROW_NETWORK", network);
  options.parameters.set("MARROW_PROXY_STAGE_KERNEL_BYTES", kernel_bytes);
  options.parameters.set("MARROW_PROXY_STAGE_BYTES", total);
  return options;
}

std::byte pattern(int round, int rank, std::uint64_t at) {
  return static_cast<std::byte>(static_cast<std::uint64_t>(round * 3 + rank * 7) + at * 5 +
                                at / 251);
}

/// Each round: puts of `bytes` and a value, then a strong signal; what the peer reads then, and what a get brings
/// back, must be all there.
MARROW_KERNEL rounds(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                     int count, std::uint64_t bytes, std::uint64_t stride, std::uint32_t* wrong,
                     Status* out) {
  Gin gin(comm, 0);
  const int peer = 1 - comm.rank;
  Status status = Status::ok;
  for (int i = 1; i <= count && status == Status::ok; ++i) {
    const std::uint64_t at = (i & 1) * stride;
    for (std::uint64_t b = 0; b < bytes; ++b) local.local[at + b] = pattern(i, comm.rank, b);
    status = worse(status, gin.put(peer, window, at, local, at, bytes));
    status = worse(status, gin.put_value(peer, window, at + bytes, i));
    status = worse(status, gin.signal(peer, SignalAdd{0, 1}));
    status = worse(status, gin.wait_signal(0, static_cast<std::uint64_t>(i)));
    int value = 0;
    std::memcpy(&value, window.local + at + bytes, 4);
    if (value != i) ++*wrong;
    for (std::uint64_t b = 0; b < bytes; ++b)
      if (window.local[at + b] != pattern(i, peer, b)) ++*wrong;
    status = worse(status, gin.flush_remote());  // else the get may overtake our put
    status = worse(status, gin.get(peer, window, at, local, 2 * stride, bytes, CounterInc{1}));
    status = worse(status, gin.wait_counter(1, static_cast<std::uint64_t>(i)));
    for (std::uint64_t b = 0; b < bytes; ++b)
      if (local.local[2 * stride + b] != pattern(i, comm.rank, b)) ++*wrong;
    status = worse(status, gin.signal(peer, SignalAdd{1, 1}));
    status = worse(status, gin.wait_signal(1, static_cast<std::uint64_t>(i)));
  }
  *out = worse(status, gin.flush());
}

void run_rounds(int count, std::uint64_t bytes, ProxyOptions options) {
  const std::uint64_t stride = (bytes + 4 + 63) / 64 * 64;
  options.window_bytes = 3 * stride;
  run_proxy_ranks(
      2,
      [&](ProxyRank& rank) {
        EXPECT_TRUE(rank.window.staged);
        std::uint32_t wrong = 0;
        Status status = Status::invalid;
        rank.run(1, 1, rounds, rank.window, rank.local, count, bytes, stride, &wrong, &status);
        EXPECT_EQ(status, Status::ok);
        EXPECT_EQ(wrong, 0u);
        for (const auto& [peer, error] : rank.errors()) ADD_FAILURE() << error.what();
      },
      options);
}

TEST(ProxyStaging, KernelWritesSmallPuts) { run_rounds(60, 1000, staged()); }
TEST(ProxyStaging, CopyEngineMovesLargePuts) { run_rounds(30, 3000, staged()); }
TEST(ProxyStaging, ManyChunksMoreThanThereAreSlots) { run_rounds(6, 20 * 4096 + 17, staged()); }
TEST(ProxyStaging, LargeSlots) { run_rounds(6, 200001, staged("shm", "0", "4194304")); }
TEST(ProxyStaging, OnANetworkThatDoesNotOrder) {
  run_rounds(20, 3000, staged("shm?reorder=7"));
  run_rounds(6, 20 * 4096 + 17, staged("shm?reorder=8"));
  run_rounds(30, 500, staged("shm?reorder=9"));
}

/// Both ways at once: puts larger than all slots together, gets as large, and values, all to one peer.
MARROW_KERNEL flood(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                    int count, std::uint64_t bytes, Status* out) {
  Gin gin(comm, 0);
  const int peer = 1 - comm.rank;
  Status status = Status::ok;
  for (int i = 0; i < count; ++i) {
    status = worse(status, gin.put(peer, window, 0, local, 0, bytes));
    status = worse(status, gin.get(peer, window, 0, local, bytes, bytes));
    status = worse(status, gin.put(peer, window, 0, local, 0, 600, SignalAdd{0, 1}));
    status = worse(status, gin.put_value(peer, window, bytes, i));
  }
  status = worse(status, gin.flush_remote());
  *out = worse(status, gin.wait_signal(0, static_cast<std::uint64_t>(count)));
}

TEST(ProxyStaging, BothWaysAtOnceWithMoreThanAllSlotsHold) {
  for (const char* network : {"shm", "shm?reorder=3"}) {
    ProxyOptions options = staged(network);
    constexpr std::uint64_t kBytes = 20 * 4096;
    options.window_bytes = 3 * kBytes;
    options.parameters.set("MARROW_PROXY_RING", "16");
    run_proxy_ranks(
        2,
        [&](ProxyRank& rank) {
          Status status = Status::invalid;
          rank.run(1, 1, flood, rank.window, rank.local, 12, kBytes, &status);
          EXPECT_EQ(status, Status::ok);
          for (const auto& [peer, error] : rank.errors()) ADD_FAILURE() << error.what();
        },
        options);
  }
}

/// A group's puts, and many threads' that are more than there are slots. Thread t of block b puts its own place.
template <class Coop>
void many_puts(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
               std::uint64_t bytes, int times, std::uint32_t* wrong, Status* out) {
  Gin gin(comm, 0);
  const Coop coop;
  const int peer = 1 - comm.rank;
  const bool alone = coop.size() == 1;
  const int place = alone ? block_index() * block_size() + thread_index() : block_index();
  const std::uint64_t at = static_cast<std::uint64_t>(place) * bytes;
  Status status = Status::ok;
  for (int i = 1; i <= times; ++i) {
    for (std::uint64_t b = static_cast<std::uint64_t>(coop.rank()); b < bytes;
         b += static_cast<std::uint64_t>(coop.size()))
      local.local[at + b] = pattern(i, comm.rank, at + b);
    status = worse(status, gin.put(peer, window, at, local, at, bytes, coop));
    status = worse(status, gin.flush(coop));
  }
  status = worse(status, gin.signal(peer, SignalAdd{0, 1}, coop));
  const int all = grid_size() * (alone ? block_size() : 1);
  status = worse(status, gin.wait_signal(0, static_cast<std::uint64_t>(all), coop));
  for (std::uint64_t b = static_cast<std::uint64_t>(coop.rank()); b < bytes;
       b += static_cast<std::uint64_t>(coop.size()))
    if (window.local[at + b] != pattern(times, peer, at + b))
      std::atomic_ref(*wrong).fetch_add(1, std::memory_order_relaxed);
  if (status != Status::ok) std::atomic_ref(*out).store(status, std::memory_order_relaxed);
}
MARROW_KERNEL puts_of_threads(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                              std::uint64_t bytes, int times, std::uint32_t* wrong, Status* out) {
  many_puts<Thread>(comm, window, local, bytes, times, wrong, out);
}
MARROW_KERNEL puts_of_blocks(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                             std::uint64_t bytes, int times, std::uint32_t* wrong, Status* out) {
  many_puts<Block>(comm, window, local, bytes, times, wrong, out);
}

TEST(ProxyStaging, ManyThreadsAndGroupsWriteSlots) {
  for (const bool groups : {false, true}) {
    ProxyOptions options = staged();
    options.parameters.set("MARROW_PROXY_RING", "16");  // and as many slots
    options.window_bytes = 8 * 8 * 1000;
    run_proxy_ranks(
        2,
        [&](ProxyRank& rank) {
          std::uint32_t wrong = 0;
          Status status = Status::ok;
          rank.run(4, 8, groups ? puts_of_blocks : puts_of_threads, rank.window, rank.local,
                   std::uint64_t{1000}, 10, &wrong, &status);
          EXPECT_EQ(status, Status::ok);
          EXPECT_EQ(wrong, 0u);
          for (const auto& [peer, error] : rank.errors()) ADD_FAILURE() << error.what();
        },
        options);
  }
}

/// What the network reaches and what it does not, in all four combinations.
MARROW_KERNEL mixed(DeviceCommunicator comm, WindowHandle device, WindowHandle host,
                    LocalBufferHandle local, int count, std::uint64_t bytes, std::uint32_t* wrong,
                    Status* out) {
  Gin gin(comm, 0);
  const int peer = 1 - comm.rank;
  Status status = Status::ok;
  for (int i = 1; i <= count && status == Status::ok; ++i) {
    for (std::uint64_t b = 0; b < bytes; ++b)
      local.local[b] = device.local[b] = pattern(i, comm.rank, b);
    status = worse(status, gin.put(peer, device, bytes, local, 0, bytes));       // host to device
    status = worse(status, gin.put(peer, device, 2 * bytes, device, 0, bytes));  // device to device
    status = worse(status, gin.put(peer, host, 0, device, 0, bytes, SignalAdd{0, 1}));
    status = worse(status, gin.wait_signal(0, static_cast<std::uint64_t>(i)));
    for (std::uint64_t b = 0; b < bytes; ++b) {
      const std::byte is = pattern(i, peer, b);
      if (device.local[bytes + b] != is || device.local[2 * bytes + b] != is || host.local[b] != is)
        ++*wrong;
    }
    status = worse(status, gin.flush_remote());
    status = worse(status, gin.get(peer, device, bytes, local, bytes, bytes));  // device to host
    status = worse(status, gin.get(peer, host, 0, device, 3 * bytes, bytes));   // host to device
    status = worse(status, gin.flush());
    for (std::uint64_t b = 0; b < bytes; ++b)
      if (local.local[bytes + b] != pattern(i, comm.rank, b) ||
          device.local[3 * bytes + b] != pattern(i, comm.rank, b))
        ++*wrong;
    status = worse(status, gin.signal(peer, SignalAdd{1, 1}));
    status = worse(status, gin.wait_signal(1, static_cast<std::uint64_t>(i)));
  }
  *out = status;
}

void run_mixed(const std::string& network, const char* threads = "1") {
  ProxyOptions options = staged(network);
  options.parameters.set("MARROW_PROXY_STAGE", "auto");
  options.parameters.set("MARROW_PROXY_THREADS", threads);
  for (const std::uint64_t bytes : {std::uint64_t{700}, std::uint64_t{3 * 4096 + 5}}) {
    run_proxy_ranks(
        2,
        [&](ProxyRank& rank) {
          const WindowHandle device = rank.make_window(10, 4 * bytes, true);
          EXPECT_TRUE(device.staged);
          EXPECT_FALSE(rank.window.staged);
          std::uint32_t wrong = 0;
          Status status = Status::invalid;
          rank.run(1, 1, mixed, device, rank.window, rank.local, 20, bytes, &wrong, &status);
          EXPECT_EQ(status, Status::ok);
          EXPECT_EQ(wrong, 0u);
          for (const auto& [peer, error] : rank.errors()) ADD_FAILURE() << error.what();
          rank.bootstrap().barrier();
          rank.transport().deregister(10);
        },
        options);
  }
}

TEST(ProxyStaging, OnlyWhatTheNetworkDoesNotReach) {
  Script& script = Script::begin();
  script.properties = [](marrow_network_properties& p) { p.device_memory = 0; };
  run_mixed("scripted");
  run_mixed("scripted", "2");
  run_mixed("shm?reorder=5");  // reaches no device memory in this mode
}

TEST(ProxyStaging, APromiseThatRegistrationDoesNotKeepIsNoError) {
  Script& script = Script::begin();
  script.refuses = [](const marrow_network_memory& memory) { return memory.device != 0; };
  run_mixed("scripted");
}

TEST(ProxyStaging, ForbiddenOrUnequalItIsRefusedWithASentence) {
  ProxyOptions options = staged("shm?reorder=5");
  options.parameters.set("MARROW_PROXY_STAGE", "never");
  run_proxy_ranks(
      2,
      [](ProxyRank& rank) {
        try {
          (void)rank.make_window(10, 4096, true);
          ADD_FAILURE() << "took it";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Code::unsupported);
          EXPECT_THAT(error.what(), ::testing::HasSubstr("MARROW_PROXY_STAGE=never"));
        }
      },
      options);
  run_as_threads(2, [](int r, const UniqueId& id) {
    ProxyOptions mine = staged("shm", "1024", r == 0 ? "0" : "4M");
    try {
      ProxyRank rank(id, 2, r, mine);
      ADD_FAILURE() << "took it";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::mismatch) << error.what();
      EXPECT_THAT(error.what(), ::testing::HasSubstr("MARROW_PROXY_STAGE_BYTES"));
    }
  });
}

/// Puts until something fails; then the rest of the communicator has to go on.
MARROW_KERNEL put_until_failure(DeviceCommunicator comm, WindowHandle window,
                                LocalBufferHandle local, std::atomic<int>* begun, Status* out) {
  Gin gin(comm, 0);
  Status status = Status::ok;
  for (int i = 0; i < 100000 && status == Status::ok; ++i) {
    status = worse(status, gin.put(1, window, 0, local, 0, 30000));
    status = worse(status, gin.put(1, window, 0, local, 0, 900));
    status = worse(status, gin.get(1, window, 0, local, 40000, 20000));
    begun->store(i, std::memory_order_relaxed);
    if (i % 3 == 2) status = worse(status, gin.flush(1));
  }
  status = worse(status, gin.flush(1));
  *out = status;
}
MARROW_KERNEL put_to_last(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                          Status* out) {
  Gin gin(comm, 0);
  Status status = Status::ok;
  for (int i = 0; i < 40; ++i) {
    status = worse(status, gin.put(2, window, 0, local, 0, 900));
    status = worse(status, gin.put(2, window, 0, local, 0, 30000));
  }
  *out = worse(status, gin.flush(2));
}

TEST(ProxyStaging, AFailedPeerTakesNoSlotsWithIt) {
  for (const char* network : {"shm", "shm?reorder=3"}) {
    run_proxy_ranks(
        3,
        [](ProxyRank& rank) {
          if (rank.rank() == 0) {
            std::atomic<int> begun{0};
            Status status = Status::ok;
            std::thread failer([&] {
              while (begun.load(std::memory_order_relaxed) < 5) std::this_thread::yield();
              rank.transport().fail_peer(1);
            });
            rank.run(1, 1, put_until_failure, rank.window, rank.local, &begun, &status);
            failer.join();
            EXPECT_EQ(status, Status::peer_failed);
            // On the ring that the failed peer shared: all its staging slots came back.
            rank.run(1, 1, put_to_last, rank.window, rank.local, &status);
            EXPECT_EQ(status, Status::ok);
          }
          rank.bootstrap().barrier();
        },
        staged(network));
  }
}

/// Fills the ring with values, so that puts find a staging slot and then no room: each gives its slot back.
MARROW_KERNEL put_with_deadline(DeviceCommunicator comm, WindowHandle window,
                                LocalBufferHandle local, int values, int puts, int* timeouts,
                                Status* out) {
  Gin gin(comm, 0);
  Status status = Status::ok;
  const Deadline deadline{100'000};
  for (int i = 0; i < values; ++i) (void)gin.put_value(1, window, 0, i, deadline);
  for (int i = 0; i < puts; ++i) {
    const Status put = gin.put(1, window, 0, local, 0, 900, deadline);
    if (put == Status::timeout) ++*timeouts;
    if (put != Status::ok && put != Status::timeout) status = put;
  }
  *out = status;
}
MARROW_KERNEL put_and_flush(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                            int puts, Status* out) {
  Gin gin(comm, 0);
  Status status = gin.flush();
  for (int i = 0; i < puts; ++i) status = worse(status, gin.put(1, window, 0, local, 0, 900));
  *out = worse(status, gin.flush());
}

TEST(ProxyStaging, APutThatTimesOutGivesItsSlotBack) {
  Script& script = Script::begin();
  std::atomic<bool> stuck{false};
  script.post = [&](void* endpoint, const Script::End&, const marrow_network_operation* operations,
                    std::uint32_t n) {
    return stuck.load() ? 0 : below_script().post(endpoint, operations, n);
  };
  ProxyOptions options = staged("scripted");
  options.parameters.set("MARROW_PROXY_RING", "16");
  options.wait_ns = 5'000'000'000;
  run_proxy_ranks(
      2,
      [&](ProxyRank& rank) {
        rank.bootstrap().barrier();
        if (rank.rank() == 0) {
          Status status = Status::invalid;
          int timeouts = 0;
          stuck = true;
          rank.run(1, 1, put_with_deadline, rank.window, rank.local, 40, 50, &timeouts, &status);
          EXPECT_EQ(status, Status::ok);
          EXPECT_EQ(timeouts, 50);
          stuck = false;
          rank.run(1, 1, put_and_flush, rank.window, rank.local, 40, &status);
          EXPECT_EQ(status, Status::ok);
        }
        rank.bootstrap().barrier();
      },
      options);
}

TEST(ProxyStaging, ChunksShareTheMemoryOutAmongPeers) {
  EXPECT_EQ(proxy::stage_chunk(0, 2), 4096u);
  EXPECT_EQ(proxy::stage_chunk(std::uint64_t{64} << 20, 2), proxy::kStageLargestChunk);
  EXPECT_EQ(proxy::stage_chunk(std::uint64_t{64} << 20, 64), 65536u);
  EXPECT_EQ(proxy::stage_chunk(std::uint64_t{64} << 20, 65), 32768u);
  EXPECT_EQ(proxy::stage_chunk(std::uint64_t{64} << 20, 1024), 4096u);
}

}  // namespace
}  // namespace marrow::test
