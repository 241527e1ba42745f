// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// The libfabric network behind its C functions, over tcp and shm: operations, and ranks that chose differently.
// Skipped where libfabric is not installed.
#include <gmock/gmock.h>

#include <algorithm>

#include "unit/libfabric_support.hpp"

namespace marrow::test {
namespace {

using ::testing::HasSubstr;

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

INSTANTIATE_TEST_SUITE_P(Providers, Libfabric, ::testing::Values("tcp", "shm"),
                         [](const auto& each) { return std::string(each.param); });

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
