// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Progress threads as the operating system sees them: where they run, what they cost when there is nothing to do, and
// that they wake up; and the engine against a network that completes in any order.
#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "../../bench/proxy/null_network.hpp"
#include "memory/arena.hpp"
#include "proxy/engine.hpp"
#include "proxy/pinning.hpp"
#include "unit/proxy_support.hpp"

namespace marrow::proxy {
namespace {

TEST(Pinning, ListsOfCpus) {
  EXPECT_EQ(parse_cpus("3"), std::vector<int>{3});
  EXPECT_EQ(parse_cpus("2-5,8"), (std::vector<int>{2, 3, 4, 5, 8}));
  EXPECT_EQ(cpus_text({2, 3, 4, 5, 8}), "2-5,8");
  EXPECT_EQ(cpus_text({}), "");
  for (const char* text :
       {"", "a", "1-", "3-1", "1,", ",1", "1;2", "99999", "-1", "1-99999999999999999999"})
    EXPECT_THROW(parse_cpus(text), Error) << text;
  EXPECT_THROW(Pinning("quick", 0), Error);
  EXPECT_TRUE(Pinning("none", 0).cpus().empty());
  EXPECT_TRUE(Pinning("auto", -1).cpus().empty());
}

TEST(Pinning, AutoTakesTheCpusOfTheNode) {
  const Pinning pinning("auto", 0);
  std::ifstream list("/sys/devices/system/node/node0/cpulist");
  std::string text;
  if (!std::getline(list, text)) GTEST_SKIP() << "no NUMA nodes in sysfs";
  const std::vector<int> all = parse_cpus(text);
  ASSERT_FALSE(pinning.cpus().empty()) << pinning.where();
  for (const int cpu : pinning.cpus())
    EXPECT_NE(std::find(all.begin(), all.end(), cpu), all.end()) << pinning.where();
}

TEST(Pinning, AThreadRunsWhereTheListSays) {
  cpu_set_t ours;
  CPU_ZERO(&ours);
  ASSERT_EQ(sched_getaffinity(0, sizeof(ours), &ours), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &ours)) cpus.push_back(cpu);
  }
  const Pinning pinning(cpus_text(cpus), -1);
  for (int t = 0; t < 3; ++t) {
    std::thread([&] {
      pinning.pin(t);
      cpu_set_t now;
      CPU_ZERO(&now);
      ASSERT_EQ(sched_getaffinity(0, sizeof(now), &now), 0);
      EXPECT_EQ(CPU_COUNT(&now), 1);
      EXPECT_TRUE(CPU_ISSET(cpus[static_cast<std::size_t>(t) % cpus.size()], &now));
    }).join();
  }
}

/// CPU ns of this process's progress threads.
std::uint64_t proxy_cpu_ns() {
  std::uint64_t sum = 0;
  DIR* tasks = ::opendir("/proc/self/task");
  if (!tasks) return 0;
  while (const dirent* entry = ::readdir(tasks)) {
    const std::string folder = std::string("/proc/self/task/") + entry->d_name;
    std::ifstream named(folder + "/comm"), used(folder + "/schedstat");
    std::string comm;
    std::uint64_t ns = 0;
    if (std::getline(named, comm) && comm == "marrow-proxy" && used >> ns) sum += ns;
  }
  ::closedir(tasks);
  return sum;
}

/// The figures that count come from bench/proxy; this says that idle threads sleep at all, with room for a
/// machine where a wake-up costs a multiple.
TEST(IdleProxy, SleepsAndWakes) {
  struct Case {
    const char* sleep_us;
    double share;  ///< of a core and thread
  };
  for (const Case& c : {Case{"100", 0.15}, Case{"1000", 0.04}}) {
    test::ProxyOptions options;
    options.parameters.set("MARROW_PROXY_SLEEP_US", c.sleep_us);
    options.parameters.set("MARROW_NETWORK", "shm");
    test::run_proxy_ranks(
        1,
        [&](test::ProxyRank&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          if (proxy_cpu_ns() == 0) GTEST_SKIP() << "no schedstat here";
          double least = 1;
          for (int attempt = 0; attempt < 4 && least > c.share; ++attempt) {
            const std::uint64_t before = proxy_cpu_ns();
            const auto from = std::chrono::steady_clock::now();
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            const std::chrono::duration<double, std::nano> passed =
                std::chrono::steady_clock::now() - from;
            least = std::min(least, static_cast<double>(proxy_cpu_ns() - before) / passed.count());
          }
          EXPECT_LE(least, c.share) << "of a core at " << c.sleep_us << " us";
        },
        options);
  }
}

/// What the kernel may add to each sleep of a progress thread of this process; 0: it does not say.
std::uint64_t proxy_slack_ns() {
  std::uint64_t most = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream named(entry.path() / "comm");
    std::string comm;
    if (!std::getline(named, comm) || comm != "marrow-proxy") continue;
    std::ifstream file(std::filesystem::path("/proc") / entry.path().filename() / "timerslack_ns");
    std::uint64_t ns = 0;
    if (file >> ns) most = std::max(most, ns);
  }
  return most;
}

TEST(IdleProxy, ItsLongestSleepMayLastHalfAsLongAgain) {
  test::ProxyOptions options;
  options.parameters.set("MARROW_PROXY_SLEEP_US", "400");
  options.parameters.set("MARROW_NETWORK", "shm");
  test::run_proxy_ranks(
      1,
      [&](test::ProxyRank&) {
        std::uint64_t slack = 0;
        for (int i = 0; i < 100 && slack != 200'000; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          slack = proxy_slack_ns();
        }
        if (slack == 0) GTEST_SKIP() << "this kernel does not show timerslack_ns";
        EXPECT_EQ(slack, 200'000u);
      },
      options);
}

// --- the engine alone ------------------------------------------------------------------------------

/// The null network, completing what it has in any order, some of it later, some of it failed.
struct Shuffled {
  std::mt19937_64 random{5};
  std::vector<marrow_network_completion> waiting;
  std::uint64_t posted = 0;
  int stale = 0;
  bool fail = false;
  static Shuffled* now;

  static marrow_network table() {
    marrow_network t = null_network::table();
    t.name = "shuffled";
    t.post = [](void*, const marrow_network_operation* operations, std::uint32_t n) {
      if (now->random() % 4 == 0) n = static_cast<std::uint32_t>(now->random() % (n + 1));
      for (std::uint32_t i = 0; i < n; ++i) {
        const marrow_network_operation& o = operations[i];
        now->waiting.push_back({o.token, 0, MARROW_NETWORK_OK, o.peer});
        // Nothing of an operation that had this place before.
        now->stale += (o.kind == MARROW_NETWORK_PUT) != (o.local != nullptr);
        now->stale += o.kind != MARROW_NETWORK_PUT && o.local_offset != 0;
        now->stale += o.operand || o.compare || o.immediate || o.has_immediate || !o.remote;
      }
      now->posted += n;
      return static_cast<int>(n);
    };
    t.progress = [](void*) { return 0; };
    t.test = [](void*, marrow_network_completion* completions, std::uint32_t n) {
      std::uint32_t done = 0;
      while (done < n && !now->waiting.empty() && now->random() % 64 != 0) {
        std::swap(now->waiting[now->random() % now->waiting.size()], now->waiting.back());
        completions[done] = now->waiting.back();
        if (now->fail && now->random() % 100 == 0)
          completions[done].status = MARROW_NETWORK_PEER_FAILED;
        now->waiting.pop_back();
        ++done;
      }
      return static_cast<int>(done);
    };
    return t;
  }
};
Shuffled* Shuffled::now = nullptr;

struct Alone {
  static constexpr std::uint32_t kLogSize = 6;
  static constexpr int kPeers = 3;

  explicit Alone(std::uint64_t first = 0)
      : arena(memory::Arena::create(Place::cpu())), board(kPeers, 1), index(first) {
    Shuffled::now = &network;
    Requirements r;
    r.counters = 4;
    r.first_index = first;
    counters = arena->allocate(4096, Memory::host);
    rings = std::make_shared<DeviceRings>(*arena, r, counters, kPeers, 1, kLogSize, 0);
    hooks.on_error = [this](int, const Error&) { ++errors; };
    link = std::make_unique<Link>(Candidate{&table, "", nullptr}, nullptr);
    engine = std::make_unique<Engine>(0, 1, 0, kPeers, board, hooks);
    engine->use(*link);
    link->listen(0, kPeers, engine->events());
    for (std::uint32_t id = 1; id <= 2; ++id) {
      auto region = std::make_shared<Region>();
      region->id = id;
      region->window = id == 1;
      region->block = arena->allocate(8192, Memory::host);
      region->local.assign(1, region->block.host);
      region->remote.assign(kPeers, region->block.host);
      board.change([&](View& view) { view.regions[id] = region; });
    }
    board.change([&](View& view) { view.devices.push_back(rings); });
    engine->step();
  }
  bool full() const {
    const std::uint64_t taken =
        std::atomic_ref(*rings->consumed(0, 0)).load(std::memory_order_acquire);
    return index - taken >= std::uint64_t{1} << kLogSize;
  }
  void post(const ProxyOperation& op) {
    const ProxyDescriptor d = proxy_encode(op);
    const std::uint64_t lap = proxy_lap(index, kLogSize);
    ProxyDescriptor& slot = rings->slots(0, 0)[index & ((1u << kLogSize) - 1)];
    for (int k = 0; k < 4; ++k)
      store_cell(&slot.chunk[k], Cell16{d.chunk[k].low, d.chunk[k].high | lap});
    ++index;
  }
  std::uint64_t completed(int peer) {
    return std::atomic_ref(rings->completion(0, peer).completed).load(std::memory_order_acquire);
  }

  Shuffled network;
  marrow_network table = Shuffled::table();
  std::unique_ptr<memory::Arena> arena;
  Board board;
  Hooks hooks;
  int errors = 0;
  memory::Block counters;
  std::shared_ptr<DeviceRings> rings;
  std::unique_ptr<Link> link;
  std::unique_ptr<Engine> engine;
  std::uint64_t index;
};

/// Runs of small puts, larger ones, counted ones, refused ones and other peers', mixed at random: all complete, in
/// order as kernels see it, whatever order the network has; counters count exactly; laps and indices wrap.
TEST(EngineAlone, CompletesOutOfOrderAndPublishesInOrder) {
  for (const std::uint64_t first :
       {std::uint64_t{0}, std::uint64_t{64 + 17}, (std::uint64_t{1} << 32) - 500}) {
    Alone alone(first);
    std::mt19937_64 random(first + 3);
    std::uint64_t last[Alone::kPeers] = {first, first, first};
    std::uint64_t seen[Alone::kPeers] = {first, first, first};
    std::uint64_t counted = 0, network = 0, refused = 0;
    ProxyOperation op;
    for (int i = 0; i < 20000;) {
      if (random() % 8 == 0 || i == 0) {
        op = {};
        op.opcode = random() % 2 ? ProxyOpcode::put_value : ProxyOpcode::put;
        op.peer = static_cast<std::uint16_t>(random() % Alone::kPeers);
        op.window = 1;
        op.region = op.opcode == ProxyOpcode::put ? 2 : 0;
        if (random() % 8 == 0) op.counter = 2;
        if (random() % 50 == 0) op.window = 2;  // not a window
      }
      op.bytes = 1 + random() % (op.opcode == ProxyOpcode::put ? 6000 : 24);
      op.offset = random() % (8192 - op.bytes + 1);
      op.source_offset = random() % (8192 - op.bytes + 1);
      if (random() % 200 == 0) op.offset = 8192 - op.bytes + 1;  // one byte too far
      if (alone.full()) {
        alone.engine->step();
      } else {
        const bool good = op.window == 1 && op.offset + op.bytes <= 8192;
        alone.post(op);
        last[op.peer] = alone.index;
        network += good;
        refused += !good;
        counted += good && op.counter == 2;
        ++i;
        if (random() % 16 == 0) alone.engine->step();
      }
      for (int peer = 0; peer < Alone::kPeers; ++peer) {
        const std::uint64_t now = alone.completed(peer) & ~kProxyFailed;
        ASSERT_GE(now, seen[peer]);
        ASSERT_LE(now, alone.index);
        seen[peer] = now;
      }
    }
    for (int i = 0; i < 100000; ++i) {
      alone.engine->step();
      bool all = true;
      for (int peer = 0; peer < Alone::kPeers; ++peer)
        all &= (alone.completed(peer) & ~kProxyFailed) == last[peer];
      if (all) break;
    }
    for (int peer = 0; peer < Alone::kPeers; ++peer)
      ASSERT_EQ(alone.completed(peer) & ~kProxyFailed, last[peer]) << peer;
    EXPECT_EQ(alone.network.posted, network);
    EXPECT_EQ(alone.network.stale, 0);
    EXPECT_EQ(*alone.rings->counter(2), counted);
    EXPECT_EQ(static_cast<std::uint64_t>(alone.errors), refused);
  }
}

/// A failure among many is told to the kernel with the completion, and stays.
TEST(EngineAlone, FailuresAreToldWithTheCompletion) {
  Alone alone;
  alone.network.fail = true;
  ProxyOperation op;
  op.opcode = ProxyOpcode::put_value;
  op.peer = 1;
  op.window = 1;
  op.bytes = 8;
  for (int i = 0; i < 2000;) {
    if (alone.full()) {
      alone.engine->step();
    } else {
      alone.post(op);
      ++i;
    }
  }
  for (int i = 0; i < 10000 && (alone.completed(1) & ~kProxyFailed) != alone.index; ++i)
    alone.engine->step();
  EXPECT_EQ(alone.completed(1), alone.index | kProxyFailed);
  EXPECT_EQ(alone.rings->completion(0, 1).status, static_cast<std::uint64_t>(Status::peer_failed));
  EXPECT_GT(alone.errors, 0);
}

/// A device communicator that closes while the network has its operations: it is acknowledged when they have ended,
/// and what comes for it after that is nobody's.
TEST(EngineAlone, ClosingWaitsForTheNetwork) {
  Alone alone;
  ProxyOperation op;
  op.opcode = ProxyOpcode::put;
  op.peer = 2;
  op.window = 1;
  op.region = 2;
  op.bytes = 8;
  for (int i = 0; i < 40; ++i) alone.post(op);
  alone.engine->step();
  const std::uint64_t version =
      alone.board.change([&](View& view) { std::erase(view.devices, alone.rings); });
  for (int i = 0; i < 1000; ++i) {
    alone.engine->step();
    if (alone.board.wait_acknowledged(version, base::Deadline::after(std::chrono::milliseconds(0))))
      break;
    ASSERT_LT(i, 999);
  }
  EXPECT_TRUE(alone.network.waiting.empty());
}

}  // namespace
}  // namespace marrow::proxy
