// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// Trouble that is real: killed and stopped processes on any NIC; on a real kernel's (MARROW_TEST_NETDEV says
// of which network interface, tests/softroce) a link that goes down, locked memory that runs out, a device
// that is taken away.
#include <gmock/gmock.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "base/log.hpp"
#include "base/text.hpp"
#include "unit/network_sides.hpp"
#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// What two processes of a test share.
struct Board {
  std::atomic<int> ready[2];
  std::atomic<int> stage;
  marrow_network_address address[2];
  std::atomic<int> keys;
  std::uint8_t key[2][MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes[2];
};

/// Rank r of two, each in a process of its own.
struct Rank {
  Rank(Board& shared, std::uint32_t r, const std::string& options) : board(shared), me(r) {
    services.version = MARROW_NETWORK_VERSION;
    services.size = sizeof services;
    const marrow_network& n = network_named("verbs");
    EXPECT_EQ(side.listen(n, services, options, r, 2), 0) << n.last_error();
    board.address[r] = side.address;
    meet();
    EXPECT_EQ(n.connect(side.endpoint, board.address, 10'000'000'000), 0) << n.last_error();
  }
  ~Rank() { side.close(); }
  void meet() {
    const int turn = ++meetings;
    board.ready[me].store(turn);
    for (int i = 0; i < 20000 && board.ready[1 - me].load() < turn; ++i)
      std::this_thread::sleep_for(milliseconds(1));
  }
  bool until(const std::function<bool()>& holds, milliseconds limit) {
    const auto end = steady_clock::now() + limit;
    while (!holds()) {
      if (steady_clock::now() > end) return false;
      side.step();
      std::this_thread::yield();
    }
    return true;
  }
  marrow_network_operation message(std::uint32_t to, const std::string& text) {
    marrow_network_operation o{};
    o.kind = MARROW_NETWORK_MESSAGE;
    o.peer = to;
    o.token = ++token;
    o.bytes = text.size();
    std::memcpy(o.inline_data, text.data(), text.size());
    return o;
  }
  /// Sends while `more` says so; counts what was posted.
  void send_while(std::uint32_t to, const std::function<bool()>& more, milliseconds limit) {
    auto o = message(to, "x");
    EXPECT_TRUE(until(
        [&] {
          if (side.post(o) == 1) {
            ++posted;
            o.token = ++token;
          }
          return !more();
        },
        limit));
  }

  marrow_network_services services{};
  Board& board;
  const std::uint32_t me;
  Side side;
  std::uint64_t token = 0;
  std::uint64_t posted = 0;
  int meetings = 0;
};

struct Processes {
  Processes() {
    board = new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0)) Board{};
  }
  ~Processes() { ::munmap(board, sizeof(Board)); }
  pid_t start(const std::function<void(Board&)>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      body(*board);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    return pid;
  }
  Board* board;
};

/// A rank that answers what it gets and sends on its own, until its peer is gone.
void echo(Board& board, const std::string& options) {
  Rank rank(board, 1, options);
  std::size_t answered = 0;
  rank.until(
      [&] {
        if (answered < rank.side.messages.size() && rank.side.post(rank.message(0, "echo")) == 1)
          ++answered;
        return !rank.side.down.empty();
      },
      milliseconds(30000));
}

TEST(VerbsTrouble, AKilledProcessIsNoticedAndNamedAtOnce) {
  Processes two;
  const pid_t child = two.start([](Board& board) { echo(board, ""); });
  Rank rank(*two.board, 0, "");
  rank.send_while(
      1, [&] { return rank.side.messages.size() < 100; }, milliseconds(20000));
  ::kill(child, SIGKILL);
  const auto killed = steady_clock::now();
  rank.send_while(
      1, [&] { return rank.side.down.empty(); }, milliseconds(10000));
  EXPECT_LT(steady_clock::now() - killed, milliseconds(2000));
  // By its socket's end or by an operation's, whichever is seen first.
  EXPECT_THAT(rank.side.down[1],
              AllOf(HasSubstr("rank 1"), AnyOf(HasSubstr("first error of that rank"),
                                               HasSubstr("look at that rank's log"))));
  EXPECT_TRUE(rank.until([&] { return rank.side.done.size() == rank.posted; }, milliseconds(5000)))
      << rank.side.done.size() << " of " << rank.posted;
  EXPECT_EQ(rank.side.duplicates, 0);
  ::waitpid(child, nullptr, 0);
}

TEST(VerbsTrouble, AProcessStoppedForFiveSecondsGoesOnAndLosesNothing) {
  Processes two;
  const pid_t child = two.start([](Board& board) { echo(board, "credits=16"); });
  Rank rank(*two.board, 0, "credits=16");
  rank.send_while(
      1, [&] { return rank.side.messages.size() < 50; }, milliseconds(20000));
  // In the guest, where time is dear, a real NIC answers for the process anyhow.
  const milliseconds pause(std::getenv("MARROW_TEST_NETDEV") ? 1500 : 5000);
  ::kill(child, SIGSTOP);
  const auto stopped = steady_clock::now();
  rank.send_while(
      1, [&] { return steady_clock::now() - stopped < pause; }, milliseconds(10000));
  EXPECT_TRUE(rank.side.down.empty()) << rank.side.down[1];
  ::kill(child, SIGCONT);
  EXPECT_TRUE(rank.until(
      [&] {
        return rank.side.messages.size() == rank.posted && rank.side.done.size() == rank.posted;
      },
      milliseconds(20000)))
      << rank.side.messages.size() << " answers to " << rank.posted;
  EXPECT_TRUE(rank.side.down.empty());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(VerbsTrouble, ANicThatStallsForThreeSecondsGoesOn) {
  if (std::getenv("MARROW_TEST_NETDEV")) GTEST_SKIP() << "softnic's own fault";
  Sides net("verbs", "nic=softnic&softnic=stall=60:3000");
  ASSERT_EQ(net.problem, "");
  const auto start = steady_clock::now();
  std::uint32_t posted = 0;
  ASSERT_TRUE(net.until([&] {
    if (posted < 100 && net[0].post(net.message(0, 1, "x")) == 1) ++posted;
    return net[1].messages.size() == 100;
  }));
  EXPECT_GT(steady_clock::now() - start, milliseconds(2500));
  EXPECT_TRUE(net[0].down.empty());
}

TEST(VerbsTrouble, AnOperationThatTheNicFailsIsNamedWithItsPeerAndCause) {
  if (std::getenv("MARROW_TEST_NETDEV")) GTEST_SKIP() << "softnic's own fault";
  for (const std::string fault : {"drop=40", "error_at=40"}) {
    Sides net("verbs", "nic=softnic&softnic=" + fault);
    ASSERT_EQ(net.problem, "");
    std::uint32_t posted = 0;
    ASSERT_TRUE(net.until([&] {
      if (posted < 1000 && net[0].post(net.message(0, 1, "hello")) == 1) ++posted;
      return net[0].down.count(1) + net[1].down.count(0) != 0;
    })) << fault;
    const std::string& sentence = net[0].down.count(1) ? net[0].down[1] : net[1].down[0];
    EXPECT_THAT(sentence, AllOf(HasSubstr("rank "), HasSubstr("softnic0"), HasSubstr("IBV_WC_")));
    EXPECT_TRUE(net.until([&] { return net[0].done.size() == posted; })) << fault;
  }
}

// --- the proxy path over it -----------------------------------------------------------------------

MARROW_KERNEL until_it_fails(DeviceCommunicator comm, WindowHandle window, int peer, Status* out) {
  Gin gin(comm, 0);
  std::uint64_t old = 0;
  Status status = Status::ok;
  while (status == Status::ok) status = gin.fetch_add(peer, window, 0, 1, &old);
  *out = status;
}
MARROW_KERNEL wait_for_ever(DeviceCommunicator comm, Status* out) {
  *out = Gin(comm, 0).wait_signal(3, 1);
}

/// Rank 1 of three is killed: whoever works with it or waits returns in time, and is told why.
TEST(VerbsTrouble, SurvivorsReturnFromOperationsOnAKilledRank) {
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", "verbs");
  options.wait_ns = 3'000'000'000;
  const UniqueId id = UniqueId::create();
  std::vector<pid_t> children;
  for (int r = 0; r < 3; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        ProxyRank rank(id, 3, r, options);
        rank.bootstrap().barrier();
        if (r == 1) {
          std::this_thread::sleep_for(milliseconds(100));
          ::kill(::getpid(), SIGKILL);
        }
        const auto start = steady_clock::now();
        Status status = Status::ok;
        rank.run(1, 1, until_it_fails, rank.window, 1, &status);
        EXPECT_EQ(status, Status::peer_failed);
        EXPECT_LT(steady_clock::now() - start, milliseconds(5000));
        auto errors = rank.errors();
        while (errors.empty() && steady_clock::now() - start < milliseconds(8000)) {
          std::this_thread::sleep_for(milliseconds(1));
          errors = rank.errors();
        }
        EXPECT_FALSE(errors.empty());
        if (!errors.empty()) {
          EXPECT_EQ(errors[0].first, 1);
          EXPECT_THAT(errors[0].second.sentence(), HasSubstr("rank 1"));
        }
        rank.run(1, 1, wait_for_ever, &status);  // bounded
        EXPECT_NE(status, Status::ok);
        rank.abandon();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(pid);
  }
  for (int r = 0; r < 3; ++r) {
    int status = 0;
    ::waitpid(children[static_cast<std::size_t>(r)], &status, 0);
    EXPECT_TRUE(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << "rank " << r;
  }
}

// --- a real kernel's device -----------------------------------------------------------------------

bool command(const std::string& line) { return std::system(line.c_str()) == 0; }

std::string& logged() {
  static std::string text;
  return text;
}

/// Keeps the log's lines.
struct Logged {
  Logged() {
    logged().clear();
    base::log::set_callback([](base::log::Level, base::log::Subsystem, std::string_view line) {
      logged() += std::string(line) + "\n";
    });
  }
  ~Logged() { base::log::set_callback({}); }
};

TEST(VerbsTrouble, ALinkWithoutCarrierForThreeSecondsIsSaidAndSurvived) {
  const char* netdev = std::getenv("MARROW_TEST_NETDEV");
  if (!netdev) GTEST_SKIP() << "MARROW_TEST_NETDEV is not set: needs a NIC of its own";
  const Logged log;
  Sides net("verbs", "");
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "before")), MARROW_NETWORK_OK);
  ASSERT_TRUE(command(base::cat("echo 0 > /sys/class/net/", netdev, "/carrier")));
  const auto down = steady_clock::now();
  std::uint32_t posted = 1;
  ASSERT_TRUE(net.until([&] {
    if (posted < 40 && net[0].post(net.message(0, 1, "during")) == 1) ++posted;
    return steady_clock::now() - down > milliseconds(3000);
  }));
  ASSERT_TRUE(command(base::cat("echo 1 > /sys/class/net/", netdev, "/carrier")));
  EXPECT_TRUE(net.until([&] { return net[1].messages.size() == posted; }));
  EXPECT_EQ(net.run(0, net.message(0, 1, "after")), MARROW_NETWORK_OK);
  EXPECT_TRUE(net.until([&] { return logged().find("port active") != std::string::npos; },
                        milliseconds(5000)));
  EXPECT_TRUE(net[0].down.empty()) << net[0].down[1];
  EXPECT_THAT(logged(), AllOf(HasSubstr("port down (IBV_EVENT_PORT_ERR)"),
                              HasSubstr("MARROW_VERBS_TIMEOUT"), HasSubstr("ip link")));
}

TEST(VerbsTrouble, AnInterfaceThatIsTakenDownFailsThePeerWithTheReason) {
  const char* netdev = std::getenv("MARROW_TEST_NETDEV");
  if (!netdev) GTEST_SKIP() << "MARROW_TEST_NETDEV is not set: needs a NIC of its own";
  const Logged log;
  {
    Sides net("verbs", "timeout=14");  // gives up after half a second
    ASSERT_EQ(net.problem, "");
    ASSERT_EQ(net.run(0, net.message(0, 1, "before")), MARROW_NETWORK_OK);
    ASSERT_TRUE(command(base::cat("ip link set ", netdev, " down")));
    std::uint32_t posted = 1;
    EXPECT_TRUE(net.until(
        [&] {
          if (posted < 1000 && net[0].post(net.message(0, 1, "x")) == 1) ++posted;
          return net[0].down.count(1) != 0 && net[0].done.size() == posted;
        },
        milliseconds(10000)));
    EXPECT_THAT(net[0].down[1], AllOf(HasSubstr("rank 1"), HasSubstr("IBV_WC_"),
                                      HasSubstr("port 1 is down"), HasSubstr("ip link")));
    std::puts(net[0].down[1].c_str());
    EXPECT_TRUE(net.until([&] { return logged().find("port down") != std::string::npos; },
                          milliseconds(5000)));
    Sides other("verbs", "");
    EXPECT_THAT(other.problem, AllOf(HasSubstr("port 1 is down"), HasSubstr("ip link")));
  }
  ASSERT_TRUE(command(base::cat("ip link set ", netdev, " up")));
  for (int i = 0; i < 50; ++i) {
    Sides again("verbs", "");
    if (!again.problem.empty()) {
      std::this_thread::sleep_for(milliseconds(100));
      continue;
    }
    EXPECT_EQ(again.run(0, again.message(0, 1, "x")), MARROW_NETWORK_OK);
    return;
  }
  ADD_FAILURE() << "the port did not come back";
}

TEST(VerbsTrouble, LockedMemoryThatRunsOutIsNamedWithItsLimit) {
  if (!std::getenv("MARROW_TEST_NETDEV"))
    GTEST_SKIP() << "softnic pins nothing; needs MARROW_TEST_NETDEV";
  const pid_t child = ::fork();
  if (child == 0) {
    // Root may lock what it likes, until it gives that right up.
    const rlimit limit{32 << 10, 32 << 10};
    ::setrlimit(RLIMIT_MEMLOCK, &limit);
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2] = {};
    ::syscall(SYS_capget, &header, data);
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    data[0].permitted &= ~(1u << CAP_IPC_LOCK);
    EXPECT_EQ(::syscall(SYS_capset, &header, data), 0);
    {
      Sides net("verbs", "", 2, std::size_t{4} << 20);
      EXPECT_THAT(net.problem, AllOf(HasSubstr("4194304 bytes"), HasSubstr("limited to 32 KiB"),
                                     HasSubstr("ulimit -l")));
    }
    {
      Sides net("verbs", "depth=8192", 2, 0);  // what belongs to a queue pair
      EXPECT_EQ(net.problem, "");
      EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_PEER_FAILED);
      EXPECT_THAT(net[0].down[1], AllOf(HasSubstr("rank 1"), HasSubstr("ulimit -l")));
    }
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace marrow::test
