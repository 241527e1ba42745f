// SPDX-License-Identifier: Apache-2.0
// What goes wrong around the thread that makes the verbs network's connections: its own end, too many who
// wait or say nothing, no descriptors, a peer that ends in other peers' traffic.
#include <dirent.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <new>

#include "base/log.hpp"
#include "base/sockets.hpp"
#include "networks/verbs/wire.hpp"
#include "unit/faulty_verbs.hpp"
#include "unit/network_sides.hpp"

namespace marrow::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr const char* kProvider = "provider=faulty&credits=8&depth=32";

void sleep_ms(int ms) { std::this_thread::sleep_for(milliseconds(ms)); }

/// The soft limit of descriptors, for as long as it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t most) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit now{most, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

std::size_t descriptors() {
  std::size_t n = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory)) ++n;
  ::closedir(directory);
  return n;
}

std::string socket_of(const Side& side) {
  networks::rdma::Address address;
  std::memcpy(&address, side.address.data, sizeof address);
  return address.socket_name;
}

/// Connections that say nothing. @return as many as were taken, `n` at most
std::vector<base::Fd> strangers(const std::string& socket, int n) {
  std::vector<base::Fd> all;
  for (int i = 0; i < n; ++i) {
    base::Connecting one = base::connect_unix(socket);
    if (one.error != 0) break;
    all.push_back(std::move(one.fd));
  }
  return all;
}

/// UBSan's look at an exception's type takes descriptors itself, and calls the type wrong without.
#ifdef __SANITIZE_ADDRESS__
#define NEEDS_NO_DESCRIPTORS() GTEST_SKIP() << "the sanitizer needs descriptors itself"
#else
#define NEEDS_NO_DESCRIPTORS() static_cast<void>(0)
#endif

class VerbsConnections : public ::testing::Test {
 protected:
  void SetUp() override { faulty::reset(); }
  void TearDown() override {
    base::log::set_callback({});
    faulty::reset();
    EXPECT_EQ(faulty::alive(), 0);
  }
};

/// Where memory runs out while one connection is made, that peer fails and the rest goes on.
TEST_F(VerbsConnections, WhatIsThrownForOnePeerFailsThatPeerOnly) {
  Sides net("verbs", kProvider, 3);
  ASSERT_EQ(net.problem, "");
  std::atomic<bool> armed{true};
  faulty::on_modify([&](const verbs::ibv_qp_attr&, int mask) {
    if ((mask & verbs::IBV_QP_AV) && armed.exchange(false)) throw std::bad_alloc();
  });
  EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_TRUE(net.until([&] { return net[1].down.count(0) != 0; }));
  EXPECT_THAT(net[0].down[1], HasSubstr("rank 1"));
  EXPECT_THAT(net[1].down[0], AllOf(HasSubstr("rank 0 failed"), HasSubstr("log")));
  for (const std::uint32_t r : {0u, 1u})
    EXPECT_EQ(net.run(r, net.message(r, 2, "y")), MARROW_NETWORK_OK);
}

/// The thread's own end: poll refuses more descriptors than the limit is.
TEST_F(VerbsConnections, TheThreadsEndFailsEveryPeerAndWhatIsWantedLater) {
  NEEDS_NO_DESCRIPTORS();
  Sides net("verbs", kProvider, 4);
  ASSERT_EQ(net.problem, "");
  ASSERT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
  {
    const DescriptorLimit none(2);
    EXPECT_EQ(net.run(0, net.message(0, 2, "y")), MARROW_NETWORK_PEER_FAILED);
    EXPECT_TRUE(net.until([&] { return net[0].down.size() >= 3; }, milliseconds(5000)));
  }
  // The limit is the process's, so rank 1's thread ends, too, and may be the first.
  EXPECT_THAT(net[0].down[1],
              AllOf(HasSubstr("rank 1"), AnyOf(HasSubstr("thread for connections ended"),
                                               HasSubstr("closed its endpoint"))));
  EXPECT_EQ(net.run(0, net.message(0, 3, "z")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_EQ(net.run(0, net.message(0, 0, "z")), MARROW_NETWORK_PEER_FAILED);
}

/// Rank 1 listens, and nobody accepts until connect(): what set-up left of its time has nothing to do with
/// how long a connection may take, and a full backlog is waited out.
TEST_F(VerbsConnections, ALatePeerWithAFullBacklogIsWaitedFor) {
  const marrow_network& n = network_named("verbs");
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof services;
  Side a, b;
  ASSERT_EQ(a.listen(n, services, kProvider, 0, 2), 0) << n.last_error();
  ASSERT_EQ(b.listen(n, services, kProvider, 1, 2), 0) << n.last_error();
  const marrow_network_address all[2] = {a.address, b.address};
  ASSERT_EQ(n.connect(a.endpoint, all, 1), 0) << n.last_error();
  std::vector<base::Fd> others = strangers(socket_of(b), 5000);
  EXPECT_LT(others.size(), 5000u) << "the backlog is not full";
  marrow_network_operation o{};
  o.kind = MARROW_NETWORK_MESSAGE;
  o.peer = 1;
  o.token = 1;
  o.bytes = 1;
  bool posted = false;
  const auto step = [&](milliseconds time, bool both) {
    const auto end = steady_clock::now() + time;
    while (steady_clock::now() < end && a.done.empty()) {
      if (!posted) posted = a.post(o) == 1;
      a.step();
      if (both) b.step();
      sleep_ms(1);
    }
  };
  step(milliseconds(250), false);
  EXPECT_TRUE(a.down.empty()) << a.down[1];
  others.clear();
  ASSERT_EQ(n.connect(b.endpoint, all, 1), 0) << n.last_error();
  step(milliseconds(10000), true);
  EXPECT_TRUE(a.down.empty()) << a.down[1];
  ASSERT_EQ(a.done.size(), 1u);
  EXPECT_EQ(a.status_of(1), MARROW_NETWORK_OK);
  a.close();
  b.close();
}

/// Only so many connections that say nothing are held, and only for so long.
TEST_F(VerbsConnections, SilentStrangersAreFewAndKeepNobodyOut) {
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  const std::size_t before = descriptors();
  const std::vector<base::Fd> silent = strangers(socket_of(net[1]), 100);
  ASSERT_EQ(silent.size(), 100u);
  sleep_ms(200);
  EXPECT_LE(descriptors(), before + 100 + 64);
  const auto start = steady_clock::now();
  EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);  // when the first are let go
  EXPECT_LT(steady_clock::now() - start, milliseconds(15000));
}

/// Without descriptors the listener is left alone for a while: said once, and nothing spins.
TEST_F(VerbsConnections, NoDescriptorsIsSaidOnceAndPasses) {
  NEEDS_NO_DESCRIPTORS();
  Sides net("verbs", kProvider);
  ASSERT_EQ(net.problem, "");
  std::atomic<int> said{0};
  base::log::set_callback([&](base::log::Level, base::log::Subsystem, std::string_view line) {
    if (line.find("cannot be accepted") != std::string_view::npos) ++said;
  });
  base::Fd late(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un where{};
  where.sun_family = AF_UNIX;
  const std::string name = socket_of(net[1]);
  name.copy(where.sun_path + 1, sizeof where.sun_path - 1);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  {
    base::Fd lowest(::dup(0));
    const auto most = static_cast<rlim_t>(lowest.get());
    lowest = base::Fd();
    const DescriptorLimit full(most);
    ASSERT_EQ(::connect(late.get(), reinterpret_cast<const sockaddr*>(&where), bytes), 0);
    sleep_ms(450);
  }
  EXPECT_EQ(said, 1);
  EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
  EXPECT_TRUE(net[0].down.empty());
}

/// A peer that ended is told of although every pass sees completions of others.
TEST_F(VerbsConnections, APeersEndIsToldInTheMidstOfOthersTraffic) {
  Sides net("verbs", kProvider, 3);
  ASSERT_EQ(net.problem, "");
  for (const std::uint32_t peer : {1u, 2u})
    ASSERT_EQ(net.run(0, net.message(0, peer, "x")), MARROW_NETWORK_OK);
  net.close(1);
  int passes = 0;
  for (; passes < 100 && net[0].down.count(1) == 0; ++passes) {
    ASSERT_EQ(net[0].post(net.message(0, 2, "traffic")), 1);
    sleep_ms(10);  // it is done when the pass begins
    net[0].step();
    net[2].step();
    net[0].done.clear();
  }
  EXPECT_LT(passes, 100);
  EXPECT_THAT(net[0].down[1], HasSubstr("closed its endpoint"));
}

}  // namespace
}  // namespace marrow::test
