// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// The libfabric network behind its C functions, over tcp and shm: operations, refusals, peers that end, ranks that
// chose differently. Skipped where libfabric is not installed.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>

#include "marrow/error.hpp"
#include "unit/network_sides.hpp"
#include "unit/required.hpp"

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

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

bool built_in() {
  for (const marrow_network* network : proxy::registered_networks())
    if (std::string("libfabric") == network->name) return true;
  return false;
}

/// Why there is no such provider; empty: there is.
std::string missing(const std::string& provider) {
  if (!built_in()) return "this build has no libfabric";
  try {
    const proxy::Link link({&network_named("libfabric"), "prov=" + provider, nullptr}, nullptr);
    return "";
  } catch (const Error& error) {
    return error.sentence();
  }
}

#define NEEDS(provider) \
  if (const std::string why = missing(provider); !why.empty()) MARROW_SKIP_WITHOUT("libfabric", why)

class Libfabric : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { NEEDS(GetParam()); }
  std::string options() const { return std::string("prov=") + GetParam(); }
};

TEST_P(Libfabric, PutsValuesGetsAndMessages) {
  Sides sides("libfabric", options(), 3);
  ASSERT_EQ(sides.problem, "");
  for (std::uint32_t from = 0; from < 3; ++from) {
    for (std::uint32_t to = 0; to < 3; ++to) {  // itself, too
      auto bytes = sides.memory[from].bytes.data();
      for (int i = 0; i < 1000; ++i)
        bytes[i] = static_cast<std::byte>(i + static_cast<int>(from * 16 + to));
      auto put = sides.operation(MARROW_NETWORK_PUT, from, to);
      put.bytes = 999;
      put.remote_offset = 20001;
      put.has_immediate = 1;
      put.immediate = 0xabcd0000 + from;
      const std::size_t seen = sides[to].immediates.size();
      EXPECT_EQ(sides.run(from, put), MARROW_NETWORK_OK);
      ASSERT_TRUE(sides.until([&] { return sides[to].immediates.size() == seen + 1; }));
      EXPECT_EQ(sides[to].immediates.back(), std::pair(from, 0xabcd0000u + from));
      EXPECT_EQ(std::memcmp(sides.memory[to].bytes.data() + 20001, bytes, 999), 0);

      auto value = sides.operation(MARROW_NETWORK_PUT_VALUE, from, to);
      value.bytes = 24;
      value.remote_offset = 30000;
      std::memset(value.inline_data, static_cast<int>(from * 3 + to + 1), 24);
      value.has_immediate = 1;
      value.immediate = 7;
      EXPECT_EQ(sides.run(from, value), MARROW_NETWORK_OK);
      ASSERT_TRUE(sides.until([&] { return sides[to].immediates.size() == seen + 2; }));
      EXPECT_EQ(std::memcmp(sides.memory[to].bytes.data() + 30000, value.inline_data, 24), 0);

      auto get = sides.operation(MARROW_NETWORK_GET, from, to);
      get.bytes = 24;
      get.local_offset = 40000;
      get.remote_offset = 30000;
      EXPECT_EQ(sides.run(from, get), MARROW_NETWORK_OK);
      EXPECT_EQ(std::memcmp(sides.memory[from].bytes.data() + 40000, value.inline_data, 24), 0);

      for (const std::size_t length : {1, 48, 64}) {
        const std::string text(length, static_cast<char>('a' + from));
        const std::size_t had = sides[to].messages.size();
        EXPECT_EQ(sides.run(from, sides.message(from, to, text)), MARROW_NETWORK_OK);
        ASSERT_TRUE(sides.until([&] { return sides[to].messages.size() == had + 1; }));
        EXPECT_EQ(sides[to].messages.back(), std::pair(from, text));
      }
    }
  }
  for (const Side& side : sides.sides) {
    EXPECT_EQ(side.duplicates, 0);
    EXPECT_TRUE(side.down.empty());
  }
}

TEST_P(Libfabric, ManyInFlight) {
  Sides sides("libfabric", options());
  ASSERT_EQ(sides.problem, "");
  constexpr int kCount = 3000;
  int posted = 0;
  std::vector<marrow_network_operation> all;
  for (int i = 0; i < kCount; ++i) {
    auto o = i % 3 == 2
                 ? sides.message(0, 1, std::string(64, 'm'))
                 : sides.operation(i % 3 ? MARROW_NETWORK_PUT : MARROW_NETWORK_PUT_VALUE, 0, 1);
    if (i % 3 != 2)
      o.bytes = 8, o.remote_offset = static_cast<std::uint64_t>(i) * 8, o.has_immediate = 1;
    o.immediate = static_cast<std::uint32_t>(i);
    all.push_back(o);
  }
  const auto n = static_cast<std::size_t>(kCount);
  ASSERT_TRUE(sides.until([&] {
    if (posted < kCount) {
      const int taken = sides[0].network->post(sides[0].endpoint, all.data() + posted,
                                               static_cast<std::uint32_t>(kCount - posted));
      EXPECT_GE(taken, 0);
      posted += taken;
    }
    return sides[0].done.size() == n && sides[1].messages.size() == n / 3 &&
           sides[1].immediates.size() == n / 3 * 2;
  })) << posted
      << " " << sides[0].done.size() << " " << sides[1].messages.size();
  std::sort(sides[1].immediates.begin(), sides[1].immediates.end());
  EXPECT_EQ(std::adjacent_find(sides[1].immediates.begin(), sides[1].immediates.end()),
            sides[1].immediates.end());
  EXPECT_EQ(sides[0].duplicates, 0);
}

TEST_P(Libfabric, AValueForAClosedRegionHarmsNobody) {
  Sides sides("libfabric", options());
  ASSERT_EQ(sides.problem, "");
  auto value = sides.operation(MARROW_NETWORK_PUT_VALUE, 0, 1);
  value.bytes = 8;
  value.remote_offset = sides.memory[1].bytes.size() - 4;  // past the end
  value.has_immediate = 1;
  EXPECT_EQ(sides.run(0, value), MARROW_NETWORK_OK);
  EXPECT_EQ(sides[1].network->deregister_memory(sides[1].endpoint, sides.memory[1].region),
            MARROW_NETWORK_OK);
  sides.memory[1].region = nullptr;
  value.token = ++sides.token;
  value.remote_offset = 0;
  EXPECT_EQ(sides.run(0, value), MARROW_NETWORK_OK);
  // Both sequences count all the same, else what comes after them would wait for ever.
  ASSERT_TRUE(sides.until([&] { return sides[1].immediates.size() == 2; }));
  EXPECT_EQ(sides.word(1, 0), 0u);
}

TEST_P(Libfabric, AbortedPeersOperationsComplete) {
  Sides sides("libfabric", options(), 3);
  ASSERT_EQ(sides.problem, "");
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "hello")), MARROW_NETWORK_OK);
  sides[0].network->abort(sides[0].endpoint, 1);
  auto put = sides.operation(MARROW_NETWORK_PUT, 0, 1);
  put.bytes = 8;
  EXPECT_EQ(sides.run(0, put), MARROW_NETWORK_PEER_FAILED);
  EXPECT_EQ(sides.run(0, sides.message(0, 1, "hello")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_EQ(sides.run(0, sides.message(0, 2, "hello")), MARROW_NETWORK_OK);
}

// --- device memory ----------------------------------------------------------------------------------

/// A copy engine that is late, and the only one that can touch "device memory": its users' view of that has no access
/// rights, and the engine's is another mapping. What the provider does there by itself needs a GPU.
class LateCopies {
 public:
  explicit LateCopies(std::size_t bytes) : bytes_(bytes) {
    file_ = ::memfd_create("device", 0);
    EXPECT_EQ(::ftruncate(file_, static_cast<off_t>(bytes)), 0);
    guarded = map(PROT_NONE);
    real = map(PROT_READ | PROT_WRITE);
  }
  ~LateCopies() {
    ::munmap(guarded, bytes_);
    ::munmap(real, bytes_);
    ::close(file_);
  }
  LateCopies(const LateCopies&) = delete;
  LateCopies& operator=(const LateCopies&) = delete;

  void lend(marrow_network_services& services) {
    services.user = this;
    services.copy = [](void* user, void* to, const void* from, std::uint64_t n,
                       std::uint64_t* ticket) {
      auto& self = *static_cast<LateCopies*>(user);
      Copy copy{self.translate(to), self.translate(from), n, {}};
      if (n <= 64) {  // taken before the call returns
        const auto* bytes = static_cast<const std::byte*>(copy.from);
        copy.taken.assign(bytes, bytes + n);
      }
      self.copies_.push_back(std::move(copy));
      *ticket = ++self.started_;
      return static_cast<int>(MARROW_NETWORK_OK);
    };
    services.copy_test = [](void* user, std::uint64_t ticket) {
      auto& self = *static_cast<LateCopies*>(user);
      if (++self.asked_ % 20 == 0 && !self.copies_.empty()) {
        const Copy& copy = self.copies_.front();
        std::memcpy(copy.to, copy.taken.empty() ? copy.from : copy.taken.data(), copy.bytes);
        self.copies_.pop_front();
        ++self.ended_;
      }
      return ticket <= self.ended_ ? 1 : 0;
    };
  }

  std::byte* guarded = nullptr;
  std::byte* real = nullptr;

 private:
  struct Copy {
    void* to;
    const void* from;
    std::uint64_t bytes;
    std::vector<std::byte> taken;
  };
  std::byte* map(int rights) {
    void* at = ::mmap(nullptr, bytes_, rights, MAP_SHARED, file_, 0);
    EXPECT_NE(at, MAP_FAILED);
    return static_cast<std::byte*>(at);
  }
  void* translate(const void* address) {
    auto* at = static_cast<std::byte*>(const_cast<void*>(address));
    return at >= guarded && at < guarded + bytes_ ? real + (at - guarded) : at;
  }

  const std::size_t bytes_;
  int file_ = -1;
  std::deque<Copy> copies_;
  std::uint64_t started_ = 0, ended_ = 0, asked_ = 0;
};

TEST_P(Libfabric, ValuesAndOwnOperationsReachDeviceMemory) {
  constexpr std::size_t kBytes = 1 << 16;
  LateCopies copies(kBytes);
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  copies.lend(services);
  Sides sides("libfabric", options() + "&device=host", 2, kBytes, services);
  ASSERT_EQ(sides.problem, "");
  marrow_network_properties properties{};
  properties.size = sizeof(properties);
  ASSERT_EQ(sides[1].network->properties(sides[1].instance, 0, &properties), MARROW_NETWORK_OK);
  EXPECT_EQ(properties.device_memory, 1);
  marrow_network_memory what{};
  what.address = copies.guarded;
  what.bytes = kBytes;
  what.device = 1;
  what.fd = -1;
  void* region = nullptr;
  void* remote[2] = {};
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  ASSERT_EQ(sides[1].network->register_memory(sides[1].endpoint, &what, &region, key, &key_bytes),
            MARROW_NETWORK_OK)
      << sides[1].error();
  for (std::uint32_t r = 0; r < 2; ++r) {
    ASSERT_EQ(sides[r].network->import_key(sides[r].endpoint, 1, key, key_bytes, &remote[r]),
              MARROW_NETWORK_OK);
  }
  // Values from both ranks: whole, and before their immediates.
  for (std::uint32_t from = 0; from < 2; ++from) {
    for (const std::uint64_t bytes : {1, 8, 23, 24}) {
      auto value = sides.operation(MARROW_NETWORK_PUT_VALUE, from, 1);
      value.remote = remote[from];
      value.remote_offset = 64 * bytes + from;
      value.bytes = bytes;
      value.has_immediate = 1;
      value.immediate = 5;
      std::memset(value.inline_data, static_cast<int>(bytes + from + 1), bytes);
      const std::size_t seen = sides[1].immediates.size();
      EXPECT_EQ(sides.run(from, value), MARROW_NETWORK_OK);
      ASSERT_TRUE(sides.until([&] { return sides[1].immediates.size() == seen + 1; }));
      EXPECT_EQ(std::memcmp(copies.real + value.remote_offset, value.inline_data, bytes), 0)
          << "rank " << from << "'s " << bytes << " bytes";
    }
  }
  // A rank's own puts and gets, from and to either kind of memory.
  for (const bool device_source : {false, true}) {
    for (const bool device_target : {false, true}) {
      for (const std::uint32_t kind : {MARROW_NETWORK_PUT, MARROW_NETWORK_GET}) {
        for (const std::uint64_t bytes : {40, 5000}) {
          const bool put = kind == MARROW_NETWORK_PUT;
          auto o = sides.operation(kind, 1, 1);
          o.bytes = bytes;
          const bool device_local = put ? device_source : device_target;
          const bool device_remote = put ? device_target : device_source;
          if (device_local) o.local = region;
          if (device_remote) o.remote = remote[1];
          const std::uint64_t source_at = 1000, target_at = 20000;
          o.local_offset = put ? source_at : target_at;
          o.remote_offset = put ? target_at : source_at;
          std::byte* host = sides.memory[1].bytes.data();
          std::byte* source = (device_source ? copies.real : host) + source_at;
          std::byte* target = (device_target ? copies.real : host) + target_at;
          for (std::uint64_t i = 0; i < bytes; ++i)
            source[i] = static_cast<std::byte>(i * 3 + o.token);
          std::memset(target, 0, bytes);
          EXPECT_EQ(sides.run(1, o), MARROW_NETWORK_OK);
          EXPECT_EQ(std::memcmp(target, source, bytes), 0)
              << "kind " << kind << (device_source ? " device" : " host") << " to "
              << (device_target ? "device, " : "host, ") << bytes << " bytes";
        }
      }
    }
  }
  for (std::uint32_t r = 0; r < 2; ++r) sides[r].network->release_key(sides[r].endpoint, remote[r]);
  sides[1].network->deregister_memory(sides[1].endpoint, region);
}

TEST_P(Libfabric, WithoutACopyEngineDeviceMemoryIsNotPromised) {
  Sides sides("libfabric", options() + "&device=host");
  ASSERT_EQ(sides.problem, "");
  marrow_network_properties properties{};
  properties.size = sizeof(properties);
  ASSERT_EQ(sides[0].network->properties(sides[0].instance, 0, &properties), MARROW_NETWORK_OK);
  EXPECT_EQ(properties.device_memory, 0);
  marrow_network_memory what{};
  what.address = sides.memory[0].bytes.data();
  what.bytes = 64;
  what.device = 1;
  what.fd = -1;
  void* region = nullptr;
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  EXPECT_EQ(sides[0].network->register_memory(sides[0].endpoint, &what, &region, key, &key_bytes),
            MARROW_NETWORK_UNSUPPORTED);
}

INSTANTIATE_TEST_SUITE_P(Providers, Libfabric, ::testing::Values("tcp", "shm"),
                         [](const auto& each) { return std::string(each.param); });

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

// --- choices ----------------------------------------------------------------------------------

std::string init_error(const std::string& options, const char* name = nullptr,
                       const char* value = nullptr) {
  static const char* the_name;
  static const char* the_value;
  the_name = name;
  the_value = value;
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  services.parameter = [](void*, const char* wanted) -> const char* {
    return the_name && std::string(wanted) == the_name ? the_value : nullptr;
  };
  void* instance = nullptr;
  const marrow_network& network = network_named("libfabric");
  if (network.init(&services, options.c_str(), &instance) == MARROW_NETWORK_OK) {
    network.finalize(instance);
    return "";
  }
  return network.last_error();
}

TEST(LibfabricChoice, WhatIsNotThereIsNamed) {
  NEEDS("tcp");
  EXPECT_THAT(init_error("colour=red"), HasSubstr("colour"));
  EXPECT_THAT(init_error("prov=carrier-pigeon"), HasSubstr("carrier-pigeon"));
  EXPECT_THAT(init_error("prov=tcp", "MARROW_NIC", "ib7"), HasSubstr("MARROW_NIC=ib7"));
  EXPECT_THAT(init_error("prov=tcp", "MARROW_SOCKET_IFNAME", "=nosuch0"), HasSubstr("nosuch0"));
  EXPECT_EQ(init_error("prov=tcp", "MARROW_NIC", "softnic"), "");
  EXPECT_EQ(init_error("prov=tcp", "MARROW_SOCKET_IFNAME", "lo"), "");
}

TEST(LibfabricChoice, RanksThatDifferAreTold) {
  NEEDS("tcp");
  NEEDS("shm");
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  const marrow_network& network = network_named("libfabric");
  Side tcp, shm;
  ASSERT_EQ(tcp.listen(network, services, "prov=tcp", 0, 2), MARROW_NETWORK_OK);
  ASSERT_EQ(shm.listen(network, services, "prov=shm", 1, 2), MARROW_NETWORK_OK);
  marrow_network_address both[] = {tcp.address, shm.address};
  EXPECT_EQ(network.connect(tcp.endpoint, both, 0), MARROW_NETWORK_UNSUPPORTED);
  EXPECT_THAT(network.last_error(), HasSubstr("rank 1 its shm"));
  // As if rank 1 were of another version.
  both[1] = tcp.address;
  both[1].data[0] ^= 1;
  EXPECT_EQ(network.connect(tcp.endpoint, both, 0), MARROW_NETWORK_ERROR);
  EXPECT_THAT(network.last_error(), HasSubstr("rank 1's address is not one of this network"));
  tcp.close();
  shm.close();
}

}  // namespace
}  // namespace marrow::test
