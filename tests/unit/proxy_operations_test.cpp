// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// The proxy path through Gin over the shm network, ranks as threads: every operation, sizes and
// alignments, the order that signals promise, counters, packets, small rings and index wrap.
#include <numeric>

#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

std::uint8_t pattern(std::uint64_t i, int seed) {
  return static_cast<std::uint8_t>(i * 13 + i / 251 + static_cast<std::uint64_t>(seed));
}

MARROW_KERNEL put_signal(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                         std::uint64_t to, std::uint64_t from, std::uint64_t bytes, Status* out) {
  Gin gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status status = gin.put(peer, window, to, local, from, bytes, SignalAdd{3, 1});
  status = worse(status, gin.wait_signal(3, 1));
  status = worse(status, gin.flush());
  gin.reset_signal(3);
  *out = status;
}

TEST(ProxyOperations, PutsOfAllSizesAndAlignmentsArriveBeforeTheirSignal) {
  constexpr std::uint64_t kMax = (1 << 20) + 3;
  ProxyOptions options;
  options.window_bytes = kMax + 64;
  for (const int n : {1, 2, 3}) {
    run_proxy_ranks(
        n,
        [&](ProxyRank& rank) {
          for (const std::uint64_t bytes :
               {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{7}, std::uint64_t{8},
                std::uint64_t{15}, std::uint64_t{16}, std::uint64_t{4096}, kMax}) {
            for (const std::uint64_t shift : {0, 3}) {
              std::byte* source = rank.local_block.host;
              for (std::uint64_t i = 0; i < bytes; ++i)
                source[5 + i] = std::byte{pattern(i, rank.rank())};
              std::memset(rank.window.local, 0xee, bytes + 32);
              rank.bootstrap().barrier();
              Status status = Status::invalid;
              rank.run(1, 1, put_signal, rank.window, rank.local, shift, std::uint64_t{5}, bytes,
                       &status);
              ASSERT_EQ(status, Status::ok) << bytes;
              const int from = (rank.rank() + n - 1) % n;
              for (std::uint64_t i = 0; i < bytes; ++i) {
                ASSERT_EQ(rank.window.local[shift + i], std::byte{pattern(i, from)})
                    << i << " of " << bytes;
              }
              ASSERT_EQ(rank.window.local[shift + bytes], std::byte{0xee});
              rank.bootstrap().barrier();
            }
          }
          EXPECT_TRUE(rank.errors().empty());
        },
        options);
  }
}

MARROW_KERNEL values_and_gets(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                              Status* out) {
  Gin gin(comm, 1);
  const int peer = (comm.rank + 1) % comm.nranks;
  struct Triple {
    std::uint64_t a, b, c;
  };
  Status status =
      gin.put_value(peer, window, 64, Triple{1, 2, static_cast<std::uint64_t>(comm.rank)});
  status = worse(status, gin.put_value(peer, window, 89, std::uint8_t{7}));
  status = worse(status, gin.put_value(peer, window, 96, std::uint64_t{9},
                                       SignalAdd{0, ~std::uint64_t{0} - 5}));
  status = worse(status, gin.wait_signal(0, ~std::uint64_t{0} - 5));
  status = worse(status, gin.signal(peer, SignalAdd{1, 1}));
  status = worse(status, gin.wait_signal(1, 1));
  status = worse(status, gin.get(peer, window, 64, local, 3, 40, CounterInc{2}));
  status = worse(status, gin.wait_counter(2, 1));
  status = worse(status, gin.flush(peer));
  *out = status;
}

TEST(ProxyOperations, ValuesGetsAndCounters) {
  run_proxy_ranks(2, [&](ProxyRank& rank) {
    Status status = Status::invalid;
    rank.run(1, 1, values_and_gets, rank.window, rank.local, &status);
    ASSERT_EQ(status, Status::ok);
    std::uint64_t words[5];
    std::memcpy(words, rank.window.local + 64, sizeof(words));
    const auto other = static_cast<std::uint64_t>(1 - rank.rank());
    EXPECT_EQ(words[0], 1u);
    EXPECT_EQ(words[2], other);
    EXPECT_EQ(words[3], 7u << 8);
    EXPECT_EQ(words[4], 9u);
    std::memcpy(words, rank.local_block.host + 3, sizeof(words));  // what the peer got from us
    EXPECT_EQ(words[2], static_cast<std::uint64_t>(rank.rank()));
    EXPECT_EQ(words[4], 9u);
    EXPECT_TRUE(rank.errors().empty());
  });
}

MARROW_KERNEL atomics(DeviceCommunicator comm, WindowHandle window, int rounds, std::uint64_t* seen,
                      Status* out) {
  Gin gin(comm, 0);
  Status status = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    std::uint64_t old = 0;
    status = worse(status, gin.add(0, window, 8, 3));
    status = worse(status, gin.fetch_add(0, window, 16, 1, &old));
    seen[thread_index() * rounds + i] = old;
    // A lock: nobody else may hold it in between.
    do {
      status = worse(status, gin.compare_swap(0, window, 24, 0, 1, &old));
    } while (status == Status::ok && old != 0);
    status = worse(status, gin.compare_swap(0, window, 24, 1, 0, &old));
    if (old != 1) status = Status::invalid;
  }
  status = worse(status, gin.flush_remote());
  if (status != Status::ok)
    store_relaxed<Scope::device>(reinterpret_cast<std::uint32_t*>(out),
                                 static_cast<std::uint32_t>(status));
}

TEST(ProxyOperations, AtomicsAreExact) {
  constexpr int kRounds = 30, kThreads = 3, kRanks = 3;
  std::vector<std::uint64_t> all(kRanks * kRounds * kThreads);
  run_proxy_ranks(kRanks, [&](ProxyRank& rank) {
    Status status = Status::ok;
    rank.run(1, kThreads, atomics, rank.window, kRounds, &all[rank.rank() * kRounds * kThreads],
             &status);
    EXPECT_EQ(status, Status::ok);
    rank.bootstrap().barrier();
    if (rank.rank() == 0) {
      std::uint64_t sum = 0;
      std::memcpy(&sum, rank.window.local + 8, 8);
      EXPECT_EQ(sum, 3u * kRounds * kThreads * kRanks);
    }
  });
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i);
}

MARROW_KERNEL packets(DeviceCommunicator comm, int rounds, Status* out) {
  Gin gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const int from = (comm.rank + comm.nranks - 1) % comm.nranks;
  Status status = Status::ok;
  for (int i = 1; i <= rounds && status == Status::ok; ++i) {
    std::uint64_t value = 0;
    // Four slots in turn: round the ring of three, a later packet proves that an earlier one was taken.
    status = gin.send_packet(peer, comm.rank * 4 + i % 4,
                             0x123456789abcdef0u * static_cast<unsigned>(i), i);
    status = worse(status, gin.receive_packet(from * 4 + i % 4, i, &value));
    if (status == Status::ok && value != 0x123456789abcdef0u * static_cast<unsigned>(i))
      status = Status::invalid;
  }
  *out = status;
}

TEST(ProxyOperations, Packets) {
  run_proxy_ranks(3, [&](ProxyRank& rank) {
    Status status = Status::invalid;
    rank.run(1, 1, packets, 300, &status);
    EXPECT_EQ(status, Status::ok);
  });
}

/// Every thread puts a block's worth, then one strong signal for all of them; the reader checks all.
MARROW_KERNEL ordered_rounds(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                             int rounds, std::uint64_t bytes, std::uint32_t* wrong) {
  Gin gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  const int from = (comm.rank + comm.nranks - 1) % comm.nranks;
  const std::uint64_t mine = static_cast<std::uint64_t>(thread_index()) * bytes;
  const std::uint64_t half = static_cast<std::uint64_t>(block_size()) * bytes;
  Status status = Status::ok;
  for (int i = 1; i <= rounds && status == Status::ok; ++i) {
    // Two halves of the window in turn: the receiver's answer frees one.
    const std::uint64_t base = (i & 1) ? half : 0;
    if (i > 2) status = gin.wait_signal(2, i - 2, Block{});
    status = worse(status, gin.flush(Block{}));
    for (std::uint64_t b = 0; b < bytes; ++b)
      local.local[base + mine + b] = static_cast<std::byte>(i + comm.rank + thread_index());
    status = worse(status, gin.put(peer, window, base + mine, local, base + mine, bytes));
    block_sync();
    if (thread_index() == 0) status = worse(status, gin.signal(peer, SignalAdd{1, 1}));
    status = worse(status, gin.wait_signal(1, i, Block{}));
    for (std::uint64_t b = 0; b < bytes; ++b) {
      if (window.local[base + mine + b] != static_cast<std::byte>(i + from + thread_index())) {
        fetch_add_relaxed<Scope::device>(wrong, 1u);
      }
    }
    block_sync();
    if (thread_index() == 0) status = worse(status, gin.signal(from, SignalAdd{2, 1}));
  }
  if (status != Status::ok) fetch_add_relaxed<Scope::device>(wrong, 1000000u);
}

void run_rounds(ProxyOptions options, int ranks, int block, int rounds) {
  options.parameters.set("MARROW_PROXY_SPINS", "0");
  run_proxy_ranks(
      ranks,
      [&](ProxyRank& rank) {
        std::uint32_t wrong = 0;
        rank.run(1, block, ordered_rounds, rank.window, rank.local, rounds, std::uint64_t{24},
                 &wrong);
        EXPECT_EQ(wrong, 0u);
        for (const auto& [peer, error] : rank.errors())
          ADD_FAILURE() << peer << ": " << error.what();
      },
      options);
}

TEST(ProxyOperations, SmallRingWithManyProducersWraps16Bits) {
  ProxyOptions options;
  options.parameters.set("MARROW_PROXY_RING", "32");
  options.requirements.first_index = (1u << 16) - 70;
  run_rounds(options, 2, 4, 60);
}

TEST(ProxyOperations, IndicesWrap32BitsInTheMiddleOfALap) {
  ProxyOptions options;
  options.parameters.set("MARROW_PROXY_RING", "32");
  options.requirements.first_index = (std::uint64_t{1} << 32) - 37;
  run_rounds(options, 2, 4, 40);
}

TEST(ProxyOperations, WarpsOfFourLanes) {
  setenv("MARROW_CPU_LANES", "4", 1);
  ProxyOptions options;
  options.parameters.set("MARROW_PROXY_RING", "16");
  run_rounds(options, 2, 4, 30);
  unsetenv("MARROW_CPU_LANES");
}

TEST(ProxyOperations, SeveralProgressThreads) {
  ProxyOptions options;
  options.parameters.set("MARROW_PROXY_THREADS", "2");
  run_rounds(options, 3, 2, 40);
}

TEST(ProxyOperations, UnorderedNetworkKeepsTheOrderOfSignals) {
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", "shm?reorder=7");
  run_rounds(options, 2, 3, 40);
}

MARROW_KERNEL exclusive(DeviceCommunicator comm, WindowHandle window, int rounds, Status* out) {
  Gin gin(comm, 0);
  const int peer = (comm.rank + 1) % comm.nranks;
  Status status = Status::ok;
  for (int i = 0; i < rounds; ++i) {
    status = worse(status, gin.put_value(peer, window, 0, i, SignalAdd{0, 1}));
  }
  status = worse(status, gin.wait_signal(0, rounds));
  status = worse(status, gin.flush_remote());
  *out = status;
}

TEST(ProxyOperations, ExclusiveQueueNeedsNoAtomics) {
  ProxyOptions options;
  options.parameters.set("MARROW_PROXY_RING", "32");
  options.requirements.sharing = Sharing::thread;
  run_proxy_ranks(
      2,
      [&](ProxyRank& rank) {
        Status status = Status::invalid;
        rank.run(1, 1, exclusive, rank.window, 500, &status);
        EXPECT_EQ(status, Status::ok);
        int last = -1;
        std::memcpy(&last, rank.window.local, 4);
        EXPECT_EQ(last, 499);
      },
      options);
}

MARROW_KERNEL barriers(DeviceCommunicator comm, int rounds, Status* out) {
  Barrier barrier(comm, team_world(comm), 0);
  Status status = Status::ok;
  for (int i = 0; i < rounds; ++i) status = worse(status, barrier.sync(Block{}));
  if (thread_index() == 0) *out = status;
}

TEST(ProxyOperations, Barriers) {
  run_proxy_ranks(4, [&](ProxyRank& rank) {
    Status status = Status::invalid;
    rank.run(1, 1, barriers, 50, &status);
    EXPECT_EQ(status, Status::ok);
  });
}

}  // namespace
}  // namespace marrow::test
