// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// Peers of the libfabric network that are given up, end, cannot be reached or are none of the job. Skipped where
// libfabric is not installed.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "unit/libfabric_support.hpp"

namespace {
std::atomic<bool> link_is_down{false};
}
/// The provider's calls end here, too: a link that is down.
extern "C" __attribute__((visibility("default"))) int connect(int socket, const sockaddr* address,
                                                              socklen_t bytes) {
  if (link_is_down && address->sa_family != AF_UNIX) {
    errno = ENETUNREACH;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_connect, socket, address, bytes));
}

namespace marrow::test {
namespace {

using ::testing::MatchesRegex;

/// Rank 0 asks rank 1, which does not look any more (it is stopped, or its link is down), for the first half of its memory
/// in two gets, and gives it up. @return how long it took until both have failed; 0: they did not
std::chrono::milliseconds abort_gets(Sides& sides, std::size_t bytes) {
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "connect")), MARROW_NETWORK_OK);
  std::memset(sides.memory[1].bytes.data(), 0x77, bytes);
  std::vector<marrow_network_operation> gets;
  for (std::uint64_t i = 0; i < 2; ++i) {
    gets.push_back(sides.operation(MARROW_NETWORK_GET, 0, 1));
    gets.back().bytes = bytes / 4;
    gets.back().local_offset = gets.back().remote_offset = i * bytes / 4;
    EXPECT_EQ(sides[0].post(gets.back()), 1);
  }
  for (int i = 0; i < 100; ++i) sides[0].step();
  EXPECT_EQ(sides[0].done.count(gets[0].token), 0u) << "this test needs gets that wait";
  sides[0].network->abort(sides[0].endpoint, 1);
  const auto from = std::chrono::steady_clock::now();
  const auto ended = [&] {
    return std::all_of(gets.begin(), gets.end(),
                       [&](const auto& get) { return sides[0].done.count(get.token) != 0; });
  };
  while (!ended() && std::chrono::steady_clock::now() < from + std::chrono::seconds(2))
    sides[0].step();
  const auto took =
      std::chrono::ceil<std::chrono::milliseconds>(std::chrono::steady_clock::now() - from);
  if (!ended()) return {};
  for (const auto& get : gets) EXPECT_EQ(sides[0].status_of(get.token), MARROW_NETWORK_PEER_FAILED);
  return took;
}

/// Whether rank 0 has only these bytes from there on.
bool untouched(const Sides& sides, std::size_t from) {
  const auto& mine = sides.memory[0].bytes;
  return std::all_of(mine.begin() + static_cast<std::ptrdiff_t>(from), mine.end(),
                     [](std::byte b) { return b == std::byte{0x11}; });
}

TEST(LibfabricTcp, NothingIsWrittenAfterAnOperationOfAnAbortedPeerEnded) {
  NEEDS("tcp");
  constexpr std::size_t kBytes = 1 << 20;
  Sides sides("libfabric", "prov=tcp", 3, kBytes);
  ASSERT_EQ(sides.problem, "");
  ASSERT_NE(abort_gets(sides, kBytes).count(), 0);
  // The memory is its owner's again; rank 1 comes back to life.
  std::memset(sides.memory[0].bytes.data(), 0x11, kBytes);
  sides.until([] { return false; }, std::chrono::milliseconds(500));
  EXPECT_TRUE(untouched(sides, 0));
  EXPECT_EQ(sides.run(0, sides.message(0, 2, "on")), MARROW_NETWORK_OK);
  EXPECT_EQ(sides[0].duplicates, 0);
}

/// Where nothing ends what is under way (providers other than tcp; here tcp told to behave so): operations of an aborted peer
/// end after a grace, each once though the peer comes back, and the log says that their memory is not free. What it
/// then still writes is what was asked for.
TEST(LibfabricTcp, WithoutAWayToEndThemOperationsOfAnAbortedPeerEndAfterAGrace) {
  NEEDS("tcp");
  constexpr std::size_t kBytes = 1 << 20;
  std::string warnings;
  marrow_network_services lent{};
  lent.user = &warnings;
  lent.log = [](void* user, int level, const char* text) {
    if (level <= 2) *static_cast<std::string*>(user) += text;
  };
  Sides sides("libfabric", "prov=tcp&abort=keep", 3, kBytes, lent);
  ASSERT_EQ(sides.problem, "");
  std::memset(sides.memory[0].bytes.data(), 0x11, kBytes);
  EXPECT_GE(abort_gets(sides, kBytes).count(), 400);
  EXPECT_THAT(warnings,
              ::testing::HasSubstr("2 reads and writes to rank 1 are still with provider"));
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "later")), MARROW_NETWORK_PEER_FAILED);
  // Rank 1 looks again.
  sides.until([] { return false; }, std::chrono::milliseconds(200));
  EXPECT_EQ(sides[0].duplicates, 0);
  EXPECT_TRUE(untouched(sides, kBytes / 2));
  EXPECT_EQ(sides.run(0, sides.message(0, 2, "on")), MARROW_NETWORK_OK);
}

/// Over shm reads and writes are done by the side that asks and packets are taken or not: nothing is ever under way that an
/// abort would have to end.
TEST(LibfabricShm, NothingIsUnderWayToAPeerThatDoesNotLook) {
  NEEDS("shm");
  constexpr std::size_t kBytes = 1 << 20;
  Sides sides("libfabric", "prov=shm", 3, kBytes);
  ASSERT_EQ(sides.problem, "");
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "connect")), MARROW_NETWORK_OK);
  std::vector<marrow_network_operation> all;
  for (int i = 0; i < 200; ++i) {
    marrow_network_operation o = sides.message(0, 1, "nobody listens");
    if (i % 2 == 0) {
      o = sides.operation(i % 4 == 0 ? MARROW_NETWORK_GET : MARROW_NETWORK_PUT, 0, 1);
      o.bytes = kBytes / 4;
    }
    if (sides[0].post(o) != 1) break;
    all.push_back(o);
    sides[0].step();
  }
  ASSERT_GT(all.size(), 8u);
  for (const auto& o : all) ASSERT_EQ(sides[0].done.count(o.token), 1u) << "kind " << o.kind;
  sides[0].network->abort(sides[0].endpoint, 1);
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "later")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_EQ(sides.run(0, sides.message(0, 2, "on")), MARROW_NETWORK_OK);
}

/// A stranger can reach the port and knows how to speak: everything but the 16 bytes at the address's end.
TEST(LibfabricTcp, AStrangersPacketsAreDropped) {
  NEEDS("tcp");
  Sides sides("libfabric", "prov=tcp", 2);
  ASSERT_EQ(sides.problem, "");
  Side stranger;
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  const marrow_network& network = network_named("libfabric");
  ASSERT_EQ(stranger.listen(network, services, "prov=tcp", 0, 2), MARROW_NETWORK_OK);
  for (const std::uint32_t place : {240u, 255u}) {
    marrow_network_address all[] = {stranger.address, sides[1].address};
    ASSERT_EQ(all[1].bytes, 256u);
    all[1].data[place] ^= 0x10;
    ASSERT_EQ(network.connect(stranger.endpoint, all, 0), MARROW_NETWORK_OK);
    void* remote = nullptr;
    ASSERT_EQ(network.import_key(stranger.endpoint, 1, sides.memory[1].key,
                                 sides.memory[1].key_bytes, &remote),
              MARROW_NETWORK_OK);
    std::vector<marrow_network_operation> tries = {sides.message(0, 1, "add 1")};
    auto value = sides.operation(MARROW_NETWORK_PUT_VALUE, 0, 1);
    value.remote = remote;
    value.bytes = 8;
    value.has_immediate = 1;
    std::memset(value.inline_data, 0x55, 8);
    tries.push_back(value);
    for (const auto& o : tries) {
      bool posted = false;
      sides.until(
          [&] {
            if (!posted) posted = stranger.post(o) == 1;
            stranger.step();
            return false;
          },
          std::chrono::milliseconds(150));
      EXPECT_TRUE(posted);
    }
    network.release_key(stranger.endpoint, remote);
  }
  EXPECT_TRUE(sides[1].messages.empty());
  EXPECT_TRUE(sides[1].immediates.empty());
  EXPECT_EQ(sides.word(1, 0), 0u);
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "of the job")), MARROW_NETWORK_OK);
  EXPECT_TRUE(sides.until([&] { return sides[1].messages.size() == 1; }));
  stranger.close();
}

TEST(LibfabricTcp, KeysOfRegionsAreNotGuessed) {
  NEEDS("tcp");
  Sides sides("libfabric", "prov=tcp", 3);
  ASSERT_EQ(sides.problem, "");
  std::vector<std::uint64_t> keys(3);
  for (std::size_t r = 0; r < 3; ++r) std::memcpy(&keys[r], sides.memory[r].key + 8, 8);
  std::sort(keys.begin(), keys.end());
  EXPECT_GT(keys[0], 1u << 20);
  EXPECT_GT(keys[1] - keys[0], 1u << 20);
  EXPECT_GT(keys[2] - keys[1], 1u << 20);
}

/// Services of a communicator whose MARROW_PEER_TIMEOUT is 200 ms.
marrow_network_services impatient() {
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  services.parameter = [](void*, const char* name) -> const char* {
    return std::string("MARROW_PEER_TIMEOUT") == name ? "200ms" : nullptr;
  };
  return services;
}

TEST(LibfabricTcp, APeerThatEndedIsNamedWithItsAddress) {
  NEEDS("tcp");
  Sides sides("libfabric", "prov=tcp", 3, 1 << 16, impatient());
  ASSERT_EQ(sides.problem, "");
  auto put = sides.operation(MARROW_NETWORK_PUT, 0, 1);
  put.bytes = 4000;
  EXPECT_EQ(sides.run(0, put), MARROW_NETWORK_OK);
  sides.close(1);
  // The first may still go into the socket's buffer.
  int status = MARROW_NETWORK_OK;
  for (int i = 0; i < 20 && status == MARROW_NETWORK_OK; ++i) {
    put.token = ++sides.token;
    bool posted = false;
    ASSERT_TRUE(sides.until([&] {
      if (!posted) posted = sides[0].post(put) == 1;
      return sides[0].done.count(put.token) != 0;
    })) << "neither sent nor given up";
    status = sides[0].status_of(put.token);
  }
  EXPECT_EQ(status, MARROW_NETWORK_PEER_FAILED);
  EXPECT_TRUE(sides.until([&] { return !sides[0].down.empty(); }));
  ASSERT_EQ(sides[0].down.size(), 1u);
  EXPECT_THAT(sides[0].down[1], MatchesRegex(".*rank 1 at .*:[0-9]+.*: .*"));
  EXPECT_EQ(sides.run(0, sides.message(0, 2, "on")), MARROW_NETWORK_OK);
}

TEST(LibfabricTcp, APeerThatCannotBeReachedIsGivenUpInProgressAndNowhereElse) {
  NEEDS("tcp");
  for (const std::uint32_t kind :
       {MARROW_NETWORK_MESSAGE, MARROW_NETWORK_PUT_VALUE, MARROW_NETWORK_PUT, MARROW_NETWORK_GET}) {
    SCOPED_TRACE(kind);
    Sides sides("libfabric", "prov=tcp", 3, 1 << 16, impatient());
    ASSERT_EQ(sides.problem, "");
    link_is_down = true;
    auto o = sides.operation(kind, 0, 1);
    o.bytes = kind == MARROW_NETWORK_PUT || kind == MARROW_NETWORK_GET ? 9000 : 8;
    bool posted = false;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(sides.until([&] {
      if (!posted) {
        posted = sides[0].post(o) == 1;
        EXPECT_TRUE(!posted || sides[0].down.empty()) << "said inside post()";
      }
      return sides[0].done.count(o.token) != 0 && !sides[0].down.empty();
    }));
    EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200));
    link_is_down = false;
    ASSERT_EQ(sides[0].done.count(o.token), 1u);
    EXPECT_EQ(sides[0].status_of(o.token), MARROW_NETWORK_PEER_FAILED);
    ASSERT_EQ(sides[0].down.count(1), 1u);
    EXPECT_THAT(sides[0].down[1],
                MatchesRegex("rank 1 at .*:[0-9]+ could not be reached for 200 ms: .*"));
    // It stays given up, and others are reached.
    EXPECT_EQ(sides.run(0, sides.message(0, 1, "hello")), MARROW_NETWORK_PEER_FAILED);
    EXPECT_EQ(sides.run(0, sides.message(0, 2, "hello")), MARROW_NETWORK_OK);
  }
}

TEST(LibfabricTcp, ALinkThatComesBackInTimeIsNoFailure) {
  NEEDS("tcp");
  Sides sides("libfabric", "prov=tcp");
  ASSERT_EQ(sides.problem, "");
  link_is_down = true;
  const auto message = sides.message(0, 1, "hello");
  bool posted = false;
  EXPECT_FALSE(sides.until(
      [&] {
        if (!posted) posted = sides[0].post(message) == 1;
        return posted;
      },
      std::chrono::milliseconds(300)));
  link_is_down = false;
  EXPECT_EQ(sides.run(0, message), MARROW_NETWORK_OK);
  EXPECT_TRUE(sides.until([&] { return sides[1].messages.size() == 1; }));
  EXPECT_TRUE(sides[0].down.empty());
}

TEST(LibfabricTcp, ARankThatFailedBeforeHasNoAddress) {
  NEEDS("tcp");
  Sides sides("libfabric", "prov=tcp", 3, 0);
  marrow_network_services services = sides.services;
  const marrow_network& network = network_named("libfabric");
  Side zero, two;
  ASSERT_EQ(zero.listen(network, services, "prov=tcp", 0, 3), MARROW_NETWORK_OK);
  ASSERT_EQ(two.listen(network, services, "prov=tcp", 2, 3), MARROW_NETWORK_OK);
  const marrow_network_address all[] = {zero.address, {}, two.address};
  ASSERT_EQ(network.connect(zero.endpoint, all, 0), MARROW_NETWORK_OK) << network.last_error();
  ASSERT_EQ(network.connect(two.endpoint, all, 0), MARROW_NETWORK_OK);
  const auto message = sides.message(0, 2, "over the gap");
  bool posted = false;
  for (int i = 0; i < 100000 && two.messages.empty(); ++i) {
    if (!posted) posted = zero.post(message) == 1;
    zero.step();
    two.step();
  }
  ASSERT_EQ(two.messages.size(), 1u);
  EXPECT_EQ(two.messages[0].first, 0u);
  zero.close();
  two.close();
}

}  // namespace
}  // namespace marrow::test
