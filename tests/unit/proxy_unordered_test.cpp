// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// Networks that do not order: no signal is lost, early or counted twice, whatever the network does with what it
// carries. The network is tests/networks/unordered.cpp over shm.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "bootstrap/environment.hpp"
#include "proxy/message.hpp"
#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

std::string unordered(const std::string& options) {
  return std::string(MARROW_BINARY_DIR) + "/tests/unordered.so?" + options;
}

// --- what a receiver does with arrivals -------------------------------------------------------------

/// Puts and messages of one stream, delivered in a random order and some twice.
void shuffle_and_check(std::uint32_t first, std::uint32_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  struct Item {
    bool message;
    proxy::Message content;
    std::uint32_t sequence;
  };
  std::vector<Item> items;
  std::uint32_t since = first;  // of the puts that no message covers yet
  for (std::uint32_t s = first; s != first + count; ++s) {
    Item item{random() % 3 == 0, {}, s};
    if (item.message) {
      item.content.kind = proxy::MessageKind::add;
      item.content.flags = proxy::kSequenced;
      if (random() % 2) item.content.flags |= proxy::kStrong;
      item.content.sequence = s;
      item.content.covers = since;
      since = s + 1;
    }
    items.push_back(item);
  }
  // Nearly in order, or in any.
  const std::uint32_t reach = seed % 2 ? count : 16;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t to = std::min(count - 1, i + static_cast<std::uint32_t>(random() % reach));
    std::swap(items[i], items[to]);
  }
  proxy::Receiving receiving(first);
  std::vector<char> landed(count), acted(count);
  const auto act = [&](const proxy::Message& m) {
    const std::uint32_t at = m.sequence - first;
    ASSERT_FALSE(acted[at]) << "twice";
    acted[at] = 1;
    const std::uint32_t from = m.flags & proxy::kStrong ? 0 : m.covers - first;
    for (std::uint32_t i = from; i < at; ++i)
      ASSERT_TRUE(landed[i] || acted[i]) << "acted upon " << at << " before " << i;
  };
  const auto deliver = [&](const Item& item) {
    if (item.message) {
      receiving.message(item.content, act);
    } else {
      landed[item.sequence - first] = 1;
      receiving.immediate(proxy::make_immediate(3, item.sequence), act);
    }
  };
  std::size_t messages = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    messages += items[i].message;
    deliver(items[i]);
    if (random() % 4 == 0) deliver(items[i - std::min<std::uint32_t>(i, random() % 8)]);
  }
  EXPECT_EQ(receiving.waiting(), 0u);
  EXPECT_EQ(receiving.arrivals().next(), first + count);
  EXPECT_EQ(static_cast<std::size_t>(std::count(acted.begin(), acted.end(), 1)), messages);
}

TEST(Receiving, ActsOnceAndNeverEarly) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    for (const std::uint32_t first : {0u, 0xffffff00u, 0x003fff80u}) {
      shuffle_and_check(first, 2000, seed);
      if (HasFatalFailure()) return;
    }
  }
}

// --- the whole path ---------------------------------------------------------------------------------

/// Every rank puts `count` numbered words into every other rank, each with a strong signal, and looks at all that
/// a signal covers when it sees it.
MARROW_KERNEL flood(DeviceCommunicator comm, WindowHandle window, int count, std::uint64_t* wrong) {
  Gin gin(comm, 0);
  const int me = comm.rank;
  const int n = comm.nranks;
  const auto word = [&](int source, int i) {
    return (static_cast<std::uint64_t>(source) * count + i) * 8;
  };
  const int peer = thread_index() / 2;
  if (peer == me) return;
  if (thread_index() % 2 == 0) {
    Status status = Status::ok;
    for (int i = 0; i < count && status == Status::ok; ++i)
      status =
          gin.put_value(peer, window, word(me, i), std::uint64_t{1} << 40 | i, SignalAdd{me, 1});
    status = worse(status, gin.flush(peer));
    if (status != Status::ok) std::atomic_ref(wrong[0]).fetch_add(1);
    return;
  }
  for (int checked = 0; checked < count;) {
    if (gin.wait_signal(peer, checked + 1) != Status::ok) {
      std::atomic_ref(wrong[1]).fetch_add(1);
      return;
    }
    const int seen = static_cast<int>(gin.read_signal(peer));
    if (seen > count) std::atomic_ref(wrong[2]).fetch_add(1);
    for (; checked < seen && checked < count; ++checked) {
      std::uint64_t value = 0;
      std::memcpy(&value, window.local + word(peer, checked), 8);
      if (value != (std::uint64_t{1} << 40 | checked)) std::atomic_ref(wrong[3]).fetch_add(1);
    }
  }
  (void)n;
}

ProxyOptions flood_options(int ranks, int count, const std::string& network,
                           std::uint64_t first_index = 0, const char* threads = "1") {
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", network);
  options.parameters.set("MARROW_PROXY_THREADS", threads);
  options.window_bytes = static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(count) * 8;
  options.requirements.first_index = first_index;
  options.wait_ns = 50'000'000'000;
  return options;
}

/// So many for each pair of ranks.
int each_of(std::uint64_t puts, int ranks) {
  return static_cast<int>(puts / static_cast<std::uint64_t>(ranks * (ranks - 1)));
}

void flood_from(ProxyRank& rank, int count) {
  const int ranks = rank.nranks();
  std::uint64_t wrong[4] = {};
  rank.run(1, 2 * ranks, flood, rank.window, count, wrong);
  rank.bootstrap().barrier();
  EXPECT_EQ(wrong[0], 0u) << "puts that failed";
  EXPECT_EQ(wrong[1], 0u) << "signals that were lost";
  EXPECT_EQ(wrong[2], 0u) << "signals that were counted twice";
  EXPECT_EQ(wrong[3], 0u) << "signals that were early";
  Gin gin(rank.comm, 0);
  for (int source = 0; source < ranks; ++source)
    EXPECT_EQ(gin.read_signal(source), source == rank.rank() ? 0u : static_cast<unsigned>(count));
  EXPECT_TRUE(rank.errors().empty());
}

void print_flood(std::uint64_t count, int ranks, std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%llu puts with signals, %d ranks, %.2f s\n",
              static_cast<unsigned long long>(count) * ranks * (ranks - 1), ranks, took.count());
}

void flood_ranks(int ranks, std::uint64_t puts, const std::string& network,
                 std::uint64_t first_index = 0, const char* threads = "1") {
  const int count = each_of(puts, ranks);
  const auto start = std::chrono::steady_clock::now();
  run_proxy_ranks(
      ranks, [&](ProxyRank& rank) { flood_from(rank, count); },
      flood_options(ranks, count, network, first_index, threads));
  print_flood(count, ranks, start);
}

#if defined(MARROW_SANITIZED)
constexpr std::uint64_t kPuts = 20'000;
#else
constexpr std::uint64_t kPuts = 1'000'000;
#endif

TEST(Unordered, NoSignalIsLostEarlyOrCountedTwice) {
  std::uint64_t puts = kPuts;
  if (const char* more = std::getenv("MARROW_UNORDERED_PUTS"))
    puts = std::strtoull(more, nullptr, 10);
  flood_ranks(3, puts, unordered("seed=11&delay=200&drop=200&duplicate=50"));
}

TEST(Unordered, SequencesWrap) {
  // 2^22: what an immediate tells apart. 2^32: what a sequence is counted in.
  for (const std::uint64_t wrap : {std::uint64_t{1} << 22, std::uint64_t{1} << 32}) {
    flood_ranks(2, 6000, unordered("seed=3&delay=100&drop=50&duplicate=10"), wrap - 2000);
  }
}

TEST(Unordered, SeveralProgressThreads) {
  flood_ranks(3, 6000, unordered("seed=5&delay=100&drop=50&duplicate=10"), 0, "2");
}

/// One rank of a job that a launcher started on several hosts; tests/multihost runs it, of so many puts.
TEST(UnorderedHosts, DISABLED_OneRank) {
  const char* puts = std::getenv("MARROW_TEST_FLOOD");
  ASSERT_TRUE(puts);
  const bootstrap::LaunchInfo launch = bootstrap::launch_info();
  const int count = each_of(std::strtoull(puts, nullptr, 10), launch.nranks);
  const auto start = std::chrono::steady_clock::now();
  ProxyRank rank(
      bootstrap::rendezvous(launch), launch.nranks, launch.rank,
      flood_options(launch.nranks, count,
                    unordered("over=libfabric&seed=21&delay=200&drop=200&duplicate=50")));
  flood_from(rank, count);
  rank.close();
  if (launch.rank == 0) print_flood(count, launch.nranks, start);
}

}  // namespace
}  // namespace marrow::test
