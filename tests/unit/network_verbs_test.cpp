// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan tsan
// The verbs network behind its C functions, on whatever MARROW_NIC names: softnic in ./test, soft-RoCE
// of a real kernel in the guest of tests/softroce.
#include <dirent.h>
#include <gmock/gmock.h>

#include <numeric>

#include "unit/network_sides.hpp"

namespace marrow::test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Verbs : Sides {
  explicit Verbs(const std::string& options = "", std::uint32_t n = 2)
      : Sides("verbs", options, n) {
    EXPECT_EQ(problem, "");
  }
};

std::size_t entries(const char* folder) {
  std::size_t n = 0;
  DIR* directory = ::opendir(folder);
  while (::readdir(directory)) ++n;
  ::closedir(directory);
  return n;
}

TEST(VerbsNetwork, PutsAndGetsOfEverySize) {
  Verbs net;
  for (std::size_t i = 0; i < net.memory[0].bytes.size(); ++i)
    net.memory[0].bytes[i] = static_cast<std::byte>(i * 7 + 3);
  for (const std::uint64_t bytes : {0, 1, 7, 8, 63, 64, 65, 255, 4096, 4097, 40000}) {
    auto put = net.operation(MARROW_NETWORK_PUT, 0, 1);
    put.local_offset = 11;
    put.remote_offset = 5;
    put.bytes = bytes;
    ASSERT_EQ(net.run(0, put), MARROW_NETWORK_OK) << bytes;
    ASSERT_EQ(net.run(0, net.operation(MARROW_NETWORK_FLUSH, 0, 1)), MARROW_NETWORK_OK);
    ASSERT_EQ(std::memcmp(net.memory[1].bytes.data() + 5, net.memory[0].bytes.data() + 11, bytes),
              0)
        << bytes;
    auto get = net.operation(MARROW_NETWORK_GET, 1, 0);
    get.local_offset = 20000;
    get.remote_offset = 3;
    get.bytes = bytes;
    ASSERT_EQ(net.run(1, get), MARROW_NETWORK_OK) << bytes;
    ASSERT_EQ(
        std::memcmp(net.memory[1].bytes.data() + 20000, net.memory[0].bytes.data() + 3, bytes), 0)
        << bytes;
  }
  for (std::uint64_t bytes = 1; bytes <= 24; ++bytes) {
    auto value = net.operation(MARROW_NETWORK_PUT_VALUE, 1, 0);
    value.bytes = bytes;
    value.remote_offset = 64;
    std::memset(value.inline_data, static_cast<int>(bytes), sizeof value.inline_data);
    ASSERT_EQ(net.run(1, value), MARROW_NETWORK_OK);
    ASSERT_EQ(net.run(1, net.operation(MARROW_NETWORK_FLUSH, 1, 0)), MARROW_NETWORK_OK);
    for (std::uint64_t i = 0; i < bytes; ++i)
      ASSERT_EQ(net.memory[0].bytes[64 + i], static_cast<std::byte>(bytes));
  }
}

TEST(VerbsNetwork, AddsFetchAddsAndCompareSwaps) {
  Verbs net;
  net.word(1, 128) = 1000;
  auto add = net.operation(MARROW_NETWORK_ADD, 0, 1);
  add.remote_offset = 128;
  add.operand = 11;
  ASSERT_EQ(net.run(0, add), MARROW_NETWORK_OK);
  auto fetch = net.operation(MARROW_NETWORK_FETCH_ADD, 0, 1);
  fetch.remote_offset = 128;
  fetch.operand = ~std::uint64_t{0};  // minus one
  ASSERT_EQ(net.run(0, fetch), MARROW_NETWORK_OK);
  EXPECT_EQ(net[0].done[fetch.token].value, 1011u);
  for (const bool matches : {false, true}) {
    auto swap = net.operation(MARROW_NETWORK_COMPARE_SWAP, 0, 1);
    swap.remote_offset = 128;
    swap.compare = matches ? 1010 : 5;
    swap.operand = 77;
    ASSERT_EQ(net.run(0, swap), MARROW_NETWORK_OK);
    EXPECT_EQ(net[0].done[swap.token].value, 1010u);
  }
  EXPECT_EQ(net.word(1, 128), 77u);
}

TEST(VerbsNetwork, AReceiverThatDoesNotLookStopsTheSenderAndLosesNothing) {
  Verbs net("credits=8&depth=32");
  std::vector<marrow_network_operation> all;
  for (int i = 0; i < 500; ++i)
    all.push_back(net.message(0, 1,
                              std::string(static_cast<std::size_t>(i % 65), 'a') +
                                  (i % 65 < 60 ? std::to_string(i) : "")));
  ASSERT_EQ(net.run(0, net.operation(MARROW_NETWORK_FLUSH, 0, 1)), MARROW_NETWORK_OK);
  std::uint32_t posted = 0;
  const auto post = [&] {
    const int n = net[0].network->post(net[0].endpoint, all.data() + posted,
                                       static_cast<std::uint32_t>(all.size()) - posted);
    ASSERT_GE(n, 0);
    posted += static_cast<std::uint32_t>(n);
  };
  for (int i = 0; i < 100; ++i) {
    post();
    net[0].step();
  }
  EXPECT_EQ(posted, 8u);  // as many as the receiver has receives
  ASSERT_TRUE(net.until([&] {
    post();
    return net[1].messages.size() == all.size();
  }));
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(net[1].messages[i].second,
              std::string(reinterpret_cast<const char*>(all[i].inline_data), all[i].bytes));
    ASSERT_EQ(net[1].messages[i].first, 0u);
  }
  EXPECT_TRUE(net.until([&] { return net[0].done.size() == all.size() + 1; }));
  EXPECT_EQ(net[0].duplicates, 0);
}

TEST(VerbsNetwork, ImmediatesArriveInOrderBehindTheirData) {
  Verbs net("credits=4&depth=16");
  std::uint32_t posted = 0;
  constexpr std::uint32_t kAll = 300;
  ASSERT_TRUE(net.until([&] {
    while (posted < kAll) {
      auto put = net.operation(posted % 2 ? MARROW_NETWORK_PUT_VALUE : MARROW_NETWORK_PUT, 0, 1);
      net.word(0, std::size_t{8} * posted) = posted + 1;
      std::memcpy(put.inline_data, &net.word(0, std::size_t{8} * posted), 8);
      put.local_offset = put.remote_offset = std::uint64_t{8} * posted;
      put.bytes = 8;
      put.has_immediate = 1;
      put.immediate = 0xabcd0000u + posted;
      if (net[0].post(put) != 1) break;
      ++posted;
    }
    for (std::size_t i = 0; i < net[1].immediates.size(); ++i) EXPECT_EQ(net.word(1, 8 * i), i + 1);
    return net[1].immediates.size() == kAll;
  }));
  for (std::uint32_t i = 0; i < kAll; ++i)
    ASSERT_EQ(net[1].immediates[i], std::make_pair(0u, 0xabcd0000u + i));
}

TEST(VerbsNetwork, AMessageComesAfterThePutsBeforeIt) {
  Verbs net("depth=16");
  for (std::uint64_t round = 1; round <= 200; ++round) {
    std::vector<marrow_network_operation> batch;
    for (std::size_t i = 0; i < 5; ++i) {
      net.word(0, 512 * i) = round;
      auto put = net.operation(MARROW_NETWORK_PUT, 0, 1);
      put.local_offset = put.remote_offset = 512 * i;
      put.bytes = 512;
      batch.push_back(put);
    }
    batch.push_back(net.message(0, 1, "now"));
    std::uint32_t posted = 0;
    ASSERT_TRUE(net.until([&] {
      if (posted < batch.size())
        posted += static_cast<std::uint32_t>(
            net[0].network->post(net[0].endpoint, batch.data() + posted,
                                 static_cast<std::uint32_t>(batch.size()) - posted));
      return net[1].messages.size() == round;
    }));
    for (std::size_t i = 0; i < 5; ++i) ASSERT_EQ(net.word(1, 512 * i), round);
    ASSERT_TRUE(net.until([&] { return net[0].done.size() == round * batch.size(); }));
  }
}

TEST(VerbsNetwork, BothMayBeginAtOnceAndAnyRankWithAny) {
  for (int round = 0; round < 8; ++round) {
    Verbs net("credits=4", 3);
    std::vector<marrow_network_operation> left;
    std::vector<std::size_t> from;
    for (std::uint32_t a = 0; a < 3; ++a) {
      for (std::uint32_t b = 0; b < 3; ++b) {
        for (int i = 0; i < 20; ++i) {
          left.push_back(net.message(a, b, std::to_string(i)));
          from.push_back(a);
        }
      }
    }
    ASSERT_TRUE(net.until([&] {
      std::vector<bool> blocked(9);  // messages of a pair keep their order
      for (std::size_t i = 0; i < left.size(); ++i) {
        if (left[i].token == 0) continue;
        const std::size_t pair = from[i] * 3 + left[i].peer;
        if (!blocked[pair] && net[from[i]].post(left[i]) == 1) {
          left[i].token = 0;
        } else {
          blocked[pair] = true;
        }
      }
      return net[0].messages.size() == 60 && net[1].messages.size() == 60 &&
             net[2].messages.size() == 60;
    }));
    for (std::size_t b = 0; b < 3; ++b) {
      std::vector<int> next(3);
      for (const auto& [a, text] : net[b].messages) ASSERT_EQ(text, std::to_string(next[a]++));
      EXPECT_TRUE(net[b].down.empty());
    }
  }
}

TEST(VerbsNetwork, WhatTheNicWouldRefuseFailsAloneAndTheConnectionStays) {
  Verbs net;
  const auto refused = [&](marrow_network_operation o) {
    EXPECT_EQ(net.run(0, o), MARROW_NETWORK_INVALID) << o.kind;
  };
  auto put = net.operation(MARROW_NETWORK_PUT, 0, 1);
  put.bytes = 100;
  put.remote_offset = (1 << 16) - 99;
  refused(put);
  put = net.operation(MARROW_NETWORK_PUT, 0, 1);
  put.bytes = 100;
  put.local_offset = ~std::uint64_t{0} - 10;
  refused(put);
  auto add = net.operation(MARROW_NETWORK_ADD, 0, 1);
  add.remote_offset = net.word(1, 0) * 0 + 4;
  refused(add);
  auto value = net.operation(MARROW_NETWORK_PUT_VALUE, 0, 1);
  value.bytes = 65;
  refused(value);
  auto message = net.message(0, 1, "x");
  message.bytes = 65;
  refused(message);
  refused(net.operation(99, 0, 1));
  EXPECT_EQ(net.run(0, net.message(0, 1, "still here")), MARROW_NETWORK_OK);
  EXPECT_TRUE(net[0].down.empty());
}

TEST(VerbsNetwork, APeerThatClosesIsSaidOnceAndWhatIsPostedToItFails) {
  Verbs net("", 3);
  ASSERT_EQ(net.run(0, net.message(0, 1, "hello")), MARROW_NETWORK_OK);
  ASSERT_EQ(net.run(1, net.message(1, 0, "last words")), MARROW_NETWORK_OK);
  net.close(1);
  ASSERT_TRUE(net.until([&] { return net[0].down.count(1) != 0; }, milliseconds(5000)));
  EXPECT_THAT(net[0].down[1], AllOf(HasSubstr("rank 1"), HasSubstr("closed its endpoint")));
  ASSERT_EQ(net[0].messages.size(), 1u);  // before that
  auto later = net.message(0, 1, "too late");
  EXPECT_EQ(net.run(0, later), MARROW_NETWORK_PEER_FAILED);
  // Rank 2 never spoke to it: the first operation finds out.
  EXPECT_EQ(net.run(2, net.message(2, 1, "anybody?")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_THAT(net[2].down[1], AllOf(HasSubstr("rank 1"), HasSubstr("first error of that rank")));
  EXPECT_EQ(net.run(0, net.message(0, 2, "we go on")), MARROW_NETWORK_OK);
}

TEST(VerbsNetwork, AbortFailsWhatIsUnderWayAndWhatComesLater) {
  Verbs net("credits=2&depth=16");
  ASSERT_EQ(net.run(0, net.message(0, 1, "hello")), MARROW_NETWORK_OK);
  std::vector<std::uint64_t> tokens;
  for (int i = 0; i < 4; ++i) {
    const auto o = net.message(0, 1, "x");
    if (net[0].post(o) == 1) tokens.push_back(o.token);
  }
  net[0].network->abort(net[0].endpoint, 1);
  EXPECT_EQ(net.run(0, net.message(0, 1, "y")), MARROW_NETWORK_PEER_FAILED);
  EXPECT_TRUE(net.until([&] {
    return std::all_of(tokens.begin(), tokens.end(),
                       [&](std::uint64_t t) { return net[0].done.count(t) != 0; });
  }));
  EXPECT_EQ(net[0].duplicates, 0);
  EXPECT_TRUE(net[0].down.empty());  // who aborts knows it
}

TEST(VerbsNetwork, AddressesOfOthersAreRefusedWithTheReason) {
  Verbs net;
  const marrow_network& n = *net[0].network;
  Side third;
  ASSERT_EQ(third.listen(n, net.services, "", 0, 2), 0) << n.last_error();
  marrow_network_address all[2] = {third.address, net[1].address};
  all[1].data[4] ^= 1;  // the protocol's version
  EXPECT_EQ(n.connect(third.endpoint, all, 1'000'000'000), MARROW_NETWORK_ERROR);
  EXPECT_THAT(n.last_error(), AllOf(HasSubstr("rank 1 speaks version"),
                                    HasSubstr("same version of Marrow on every rank")));
  all[1] = net[1].address;
  all[1].bytes = 3;
  EXPECT_EQ(n.connect(third.endpoint, all, 1'000'000'000), MARROW_NETWORK_ERROR);
  EXPECT_THAT(n.last_error(), HasSubstr("not one of the verbs network"));
  third.close();
  void* remote = nullptr;
  EXPECT_EQ(n.import_key(net[0].endpoint, 1, "short", 5, &remote), MARROW_NETWORK_ERROR);
  EXPECT_THAT(n.last_error(), AllOf(HasSubstr("rank 1's key"), HasSubstr("same version")));
}

TEST(VerbsNetwork, WrongOptionsNameTheirRange) {
  const marrow_network& n = network_named("verbs");
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof services;
  const std::pair<const char*, const char*> cases[] = {{"depth=1", "16 to 16384"},
                                                       {"credits=1", "2 to 16384"},
                                                       {"timeout=32", "0 to 31"},
                                                       {"retries=8", "0 to 7"},
                                                       {"sl=16", "0 to 15"},
                                                       {"gid=256", "-1 to 255"},
                                                       {"connect=never", "lazy|eager"},
                                                       {"colour=red", "its options are"}};
  for (const auto& [options, range] : cases) {
    void* instance = nullptr;
    EXPECT_EQ(n.init(&services, options, &instance), MARROW_NETWORK_INVALID) << options;
    EXPECT_THAT(n.last_error(), HasSubstr(range)) << options;
  }
}

TEST(VerbsNetwork, EagerConnectsAllBeforeConnectReturns) {
  const marrow_network& n = network_named("verbs");
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof services;
  std::vector<Side> sides(3);
  std::vector<marrow_network_address> all;
  for (std::uint32_t r = 0; r < 3; ++r) {
    ASSERT_EQ(sides[r].listen(n, services, "connect=eager", r, 3), 0) << n.last_error();
    all.push_back(sides[r].address);
  }
  std::vector<std::thread> threads;
  for (Side& side : sides) {
    threads.emplace_back([&] {
      EXPECT_EQ(n.connect(side.endpoint, all.data(), 20'000'000'000), 0) << n.last_error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  marrow_network_operation o{};
  o.kind = MARROW_NETWORK_FLUSH;
  o.peer = 2;
  o.token = 5;
  EXPECT_EQ(sides[0].post(o), 1);  // taken at once
  for (Side& side : sides) side.close();
}

TEST(VerbsNetwork, NothingLeaks) {
  const auto use = [] {
    Verbs net;
    EXPECT_EQ(net.run(0, net.message(0, 1, "x")), MARROW_NETWORK_OK);
    EXPECT_EQ(net.run(1, net.operation(MARROW_NETWORK_FLUSH, 1, 1)), MARROW_NETWORK_OK);
  };
  use();
  const std::size_t fds = entries("/proc/self/fd");
  const std::size_t tasks = entries("/proc/self/task");
  for (int i = 0; i < 10; ++i) use();
  EXPECT_LE(entries("/proc/self/fd"), fds);
  // A thread that was joined may still be listed for a moment.
  for (int i = 0; i < 1000 && entries("/proc/self/task") > tasks; ++i)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_LE(entries("/proc/self/task"), tasks);
}

}  // namespace
}  // namespace marrow::test
