// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// The shm network behind its C functions, and the proxy path between forked processes: descriptors
// are passed, data arrives before messages, a killed peer is noticed, strangers are refused.
#include <dirent.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "base/unix_fds.hpp"
#include "networks/shm/descriptors.hpp"
#include "proxy/networks.hpp"
#include "unit/proxy_support.hpp"
#include "unit/silent_strangers.hpp"

namespace marrow::test {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

const marrow_network& shm() {
  for (const marrow_network* network : proxy::registered_networks()) {
    if (std::string(network->name) == "shm") return *network;
  }
  throw std::logic_error("shm is not linked in");
}

/// Forks n ranks; each runs body and exits with 0 when no expectation failed.
void run_processes(int n, const std::function<void(ProxyRank&)>& body,
                   const std::vector<int>& killed = {}, const ProxyOptions& options = {}) {
  const UniqueId id = UniqueId::create();
  std::vector<pid_t> children;
  for (int r = 0; r < n; ++r) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      try {
        ProxyRank rank(id, n, r, options);
        body(rank);
        if (killed.empty()) {
          rank.close();
        } else {
          rank.abandon();
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(pid);
  }
  for (int r = 0; r < n; ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    const bool meant = std::find(killed.begin(), killed.end(), r) != killed.end();
    EXPECT_TRUE(meant ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << "rank " << r;
  }
}

MARROW_KERNEL exchange(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                       std::uint64_t bytes, Status* out) {
  Gin gin(comm, 0);
  Status status = Status::ok;
  const std::uint64_t each = bytes / comm.nranks;
  for (int peer = 0; peer < comm.nranks; ++peer) {
    status = worse(
        status, gin.put(peer, window, comm.rank * each, local, peer * each, each, SignalAdd{0, 1}));
  }
  status = worse(status, gin.wait_signal(0, comm.nranks));
  std::uint64_t old = 0;
  status = worse(status, gin.fetch_add(0, window, bytes, 1, &old));
  status = worse(status, gin.get(0, window, 0, local, bytes, 16));
  status = worse(status, gin.flush());
  status = worse(status, Barrier(comm, team_world(comm), 0).sync(Thread{}));
  *out = status;
}

TEST(ShmProcesses, AllToAll) {
  ProxyOptions options;
  options.window_bytes = 40008;
  run_processes(
      3,
      [](ProxyRank& rank) {
        const std::uint64_t bytes = 39999;
        for (std::uint64_t i = 0; i < bytes; ++i)
          rank.local_block.host[i] = static_cast<std::byte>(i * 7 + rank.rank());
        Status status = Status::invalid;
        // The counted word lies behind the data.
        rank.run(1, 1, exchange, rank.window, rank.local, bytes / 24 * 24, &status);
        ASSERT_EQ(status, Status::ok);
        const std::uint64_t each = bytes / 24 * 24 / 3;
        for (std::uint64_t i = 0; i < each * 3; ++i) {
          const std::uint64_t in_sender = rank.rank() * each + i % each;
          ASSERT_EQ(rank.window.local[i], static_cast<std::byte>(in_sender * 7 + i / each)) << i;
        }
        if (rank.rank() == 0) {
          std::uint64_t count = 0;
          std::memcpy(&count, rank.window.local + each * 3, 8);
          EXPECT_EQ(count, 3u);
        }
        EXPECT_TRUE(rank.errors().empty());
      },
      {}, options);
}

MARROW_KERNEL until_it_fails(DeviceCommunicator comm, WindowHandle window, Status* out) {
  Gin gin(comm, 0);
  std::uint64_t old = 0;
  Status status = Status::ok;
  while (status == Status::ok) status = gin.fetch_add(1, window, 0, 1, &old);
  *out = status;
}

TEST(ShmProcesses, MemoryWithoutADescriptorIsNoWindow) {
  run_processes(2, [](ProxyRank& rank) {
    const auto arena = memory::Arena::create(Place::cpu());
    memory::Block block = arena->allocate(4096, Memory::host);
    block.fd = -1;  // as memory of the user's own
    const std::string why = rank.transport().refuses(block, true);
    EXPECT_THAT(why, HasSubstr("needs a file descriptor to share memory with rank " +
                               std::to_string(1 - rank.rank())));
    EXPECT_EQ(rank.transport().refuses(block, false), "");
    std::string said;
    try {
      rank.transport().register_window(50, block, true);
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_THAT(said, HasSubstr("Memory::host"));
  });
}

TEST(ShmProcesses, AKilledPeerIsNoticedByTheNetworkItself) {
  run_processes(
      3,
      [](ProxyRank& rank) {
        rank.bootstrap().barrier();
        if (rank.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(50));
          kill(getpid(), SIGKILL);
        }
        const auto start = std::chrono::steady_clock::now();
        Status status = Status::ok;
        rank.run(1, 1, until_it_fails, rank.window, &status);
        EXPECT_EQ(status, Status::peer_failed);
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
        // The kernel may see the status before the thread that reported it comes to say so.
        auto errors = rank.errors();
        while (errors.empty() && std::chrono::steady_clock::now() - start < milliseconds(2000)) {
          std::this_thread::sleep_for(milliseconds(1));
          errors = rank.errors();
        }
        ASSERT_FALSE(errors.empty());
        EXPECT_EQ(errors[0].first, 1);
        EXPECT_EQ(errors[0].second.code(), Code::peer_failed);
      },
      {1});
}

/// Two endpoints of this process, driven by hand.
struct Pair {
  struct Side {
    void* instance = nullptr;
    void* endpoint = nullptr;
    marrow_network_address address{};
    std::vector<std::string> messages;
    std::vector<std::uint32_t> immediates;
  };
  explicit Pair(const char* options) {
    services.version = MARROW_NETWORK_VERSION;
    services.size = sizeof(services);
    for (std::uint32_t r = 0; r < 2; ++r) {
      Side& side = sides[r];
      EXPECT_EQ(shm().init(&services, options, &side.instance), 0) << shm().last_error();
      const marrow_network_events events = {
          &side,
          [](void* user, std::uint32_t, const void* data, std::uint32_t bytes) {
            static_cast<Side*>(user)->messages.emplace_back(static_cast<const char*>(data), bytes);
          },
          [](void* user, std::uint32_t, std::uint32_t immediate) {
            static_cast<Side*>(user)->immediates.push_back(immediate);
          },
          [](void*, std::uint32_t, const char*) {}};
      EXPECT_EQ(shm().listen(side.instance, 0, r, 2, &events, &side.endpoint, &side.address), 0);
    }
    const marrow_network_address all[2] = {sides[0].address, sides[1].address};
    for (Side& side : sides)
      EXPECT_EQ(shm().connect(side.endpoint, all, 5'000'000'000), 0) << shm().last_error();
  }
  ~Pair() {
    for (Side& side : sides) {
      shm().close(side.endpoint);
      shm().finalize(side.instance);
    }
  }
  int completions(int side) {
    marrow_network_completion done[300];
    return shm().test(sides[side].endpoint, done, 300);
  }

  marrow_network_services services{};
  Side sides[2];
};

marrow_network_operation message(const std::string& text, std::uint64_t token) {
  marrow_network_operation o{};
  o.kind = MARROW_NETWORK_MESSAGE;
  o.peer = 1;
  o.token = token;
  o.bytes = text.size();
  std::memcpy(o.inline_data, text.data(), text.size());
  return o;
}

TEST(ShmNetwork, AFullInboxTakesFewerAndLosesNothing) {
  Pair pair("");
  std::vector<marrow_network_operation> all;
  for (int i = 0; i < 1000; ++i) all.push_back(message(std::to_string(i), i + 1));
  std::uint32_t posted = 0;
  int completed = 0;
  bool refused = false;
  while (posted < all.size()) {
    const int n = shm().post(pair.sides[0].endpoint, all.data() + posted,
                             static_cast<std::uint32_t>(all.size()) - posted);
    ASSERT_GE(n, 0);
    posted += static_cast<std::uint32_t>(n);
    if (n == 0) {
      refused = true;
      ASSERT_GT(shm().progress(pair.sides[1].endpoint), 0);
    }
    completed += pair.completions(0);
  }
  while (shm().progress(pair.sides[1].endpoint) > 0) {
  }
  completed += pair.completions(0);
  EXPECT_TRUE(refused);
  EXPECT_EQ(completed, 1000);
  ASSERT_EQ(pair.sides[1].messages.size(), 1000u);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(pair.sides[1].messages[i], std::to_string(i));
}

TEST(ShmNetwork, ReorderedPutsAllLandOnceWithTheirImmediates) {
  Pair pair("reorder=5");
  std::vector<std::byte> source(4096), target(4096);
  marrow_network_memory memory{};
  memory.fd = -1;
  memory.bytes = 4096;
  void *ours = nullptr, *theirs = nullptr, *remote = nullptr;
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  memory.address = source.data();
  ASSERT_EQ(shm().register_memory(pair.sides[0].endpoint, &memory, &ours, key, &key_bytes), 0);
  memory.address = target.data();
  ASSERT_EQ(shm().register_memory(pair.sides[1].endpoint, &memory, &theirs, key, &key_bytes), 0);
  ASSERT_EQ(shm().import_key(pair.sides[0].endpoint, 1, key, key_bytes, &remote), 0);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 5 + 1);
  std::vector<marrow_network_operation> all;
  for (std::uint32_t i = 0; i < 64; ++i) {
    marrow_network_operation o{};
    o.kind = MARROW_NETWORK_PUT;
    o.peer = 1;
    o.token = i + 1;
    o.local = ours;
    o.remote = remote;
    o.local_offset = o.remote_offset = i * 64;
    o.bytes = 64;
    o.has_immediate = 1;
    o.immediate = i;
    all.push_back(o);
  }
  all.push_back(message("overtakes", 100));
  ASSERT_EQ(shm().post(pair.sides[0].endpoint, all.data(), 65), 65);
  shm().progress(pair.sides[1].endpoint);
  EXPECT_EQ(pair.sides[1].messages.size(), 1u);
  EXPECT_LT(pair.sides[1].immediates.size(), 64u);
  for (int i = 0; i < 100000 && pair.sides[1].immediates.size() < 64; ++i) {
    shm().progress(pair.sides[0].endpoint);
    shm().progress(pair.sides[1].endpoint);
  }
  auto seen = pair.sides[1].immediates;
  EXPECT_FALSE(std::is_sorted(seen.begin(), seen.end()));
  std::sort(seen.begin(), seen.end());
  ASSERT_EQ(seen.size(), 64u);
  for (std::uint32_t i = 0; i < 64; ++i) ASSERT_EQ(seen[i], i);
  EXPECT_EQ(source, target);
  EXPECT_EQ(pair.completions(0), 65);
  shm().release_key(pair.sides[0].endpoint, remote);
  shm().deregister_memory(pair.sides[0].endpoint, ours);
  shm().deregister_memory(pair.sides[1].endpoint, theirs);
}

TEST(ShmNetwork, AnAbortedPeerFailsWhatIsPostedToIt) {
  Pair pair("");
  shm().abort(pair.sides[0].endpoint, 1);
  const marrow_network_operation o = message("x", 9);
  EXPECT_EQ(shm().post(pair.sides[0].endpoint, &o, 1), 1);
  marrow_network_completion done{};
  ASSERT_EQ(shm().test(pair.sides[0].endpoint, &done, 1), 1);
  EXPECT_EQ(done.token, 9u);
  EXPECT_EQ(done.status, MARROW_NETWORK_PEER_FAILED);
}

TEST(ShmNetwork, ForeignAddressesAreRefusedWithTheReason) {
  Pair pair("");
  void* endpoint = nullptr;
  marrow_network_address mine{};
  const marrow_network_events events{};
  ASSERT_EQ(shm().listen(pair.sides[0].instance, 0, 0, 2, &events, &endpoint, &mine), 0);
  marrow_network_address all[2] = {mine, pair.sides[1].address};
  all[1].data[8] ^= 1;  // the boot id
  EXPECT_EQ(shm().connect(endpoint, all, 1'000'000'000), MARROW_NETWORK_UNSUPPORTED);
  EXPECT_THAT(shm().last_error(), HasSubstr("another host"));
  all[1] = pair.sides[1].address;
  all[1].bytes = 3;
  EXPECT_EQ(shm().connect(endpoint, all, 1'000'000'000), MARROW_NETWORK_ERROR);
  shm().close(endpoint);
}

TEST(ShmNetwork, StrangersWhoSayNothingHoldNobodyUp) {
  networks::shm::DescriptorServer server;
  server.start();
  const std::vector<base::Fd> strangers = silent_strangers(server.socket_name());
  server.offer(7, {base::memfd("shm-test", 4096), 512, 1024});
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = base::Deadline::after(milliseconds(10000));
  networks::shm::DescriptorClient client(server.socket_name(), deadline);
  EXPECT_EQ(client.ask(7, deadline).offset, 512u);
  EXPECT_EQ(client.ask(7, deadline).bytes, 1024u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(500));
}

TEST(ShmNetwork, NothingLeaks) {
  const auto count = [] {
    std::size_t n = 0;
    DIR* directory = ::opendir("/proc/self/fd");
    while (::readdir(directory)) ++n;
    ::closedir(directory);
    return n;
  };
  { Pair warm(""); }
  const std::size_t before = count();
  for (int i = 0; i < 20; ++i) Pair pair("");
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace marrow::test
