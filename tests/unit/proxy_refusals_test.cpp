// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan
// What the proxy path's set-up refuses: networks that do not exist or promise too little, files that are no plugin,
// ranks that disagree, one device communicator too many.
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <thread>

#include "proxy/networks.hpp"
#include "unit/proxy_support.hpp"
#include "unit/scripted_network.hpp"

namespace marrow::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string open_error(int n, const std::function<base::Parameters(int)>& parameters,
                       Code expected) {
  const UniqueId id = UniqueId::create();
  std::vector<std::thread> threads;
  std::vector<std::string> sentences(n);
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        bootstrap::Bootstrap bootstrap(id, n, r);
        try {
          (void)proxy::Transport::open(bootstrap, parameters(r), Place::cpu(), {});
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), expected) << error.what();
          sentences[r] = error.what();
        }
        bootstrap.close();
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& sentence : sentences) EXPECT_FALSE(sentence.empty());
  return sentences[0];
}

base::Parameters with(const char* name, const char* value) {
  base::Parameters parameters;
  parameters.set(name, value);
  return parameters;
}

TEST(ProxyFaults, UnknownNetworkListsTheKnownOnes) {
  const std::string text = open_error(
      2, [](int) { return with("MARROW_NETWORK", "smh"); }, Code::invalid_argument);
  EXPECT_THAT(text, HasSubstr("smh"));
  EXPECT_THAT(text, HasSubstr("shm"));
}

TEST(ProxyFaults, UnknownNetworkOnOneRankFailsBoth) {
  open_error(
      2, [](int r) { return with("MARROW_NETWORK", r == 0 ? "smh" : "shm"); },
      Code::invalid_argument);
}

TEST(ProxyFaults, MissingPluginAndBadOption) {
  EXPECT_THAT(
      open_error(
          1, [](int) { return with("MARROW_NETWORK", "/nonexistent/net.so"); }, Code::unsupported),
      HasSubstr("/nonexistent/net.so"));
  EXPECT_THAT(
      open_error(
          1, [](int) { return with("MARROW_NETWORK", "shm?colour=red"); }, Code::unsupported),
      HasSubstr("colour"));
}

TEST(ProxyFaults, DifferentThreadCountsAreAMismatch) {
  EXPECT_THAT(open_error(
                  2, [](int r) { return with("MARROW_PROXY_THREADS", r == 0 ? "1" : "2"); },
                  Code::mismatch),
              HasSubstr("MARROW_PROXY_THREADS"));
}

TEST(Networks, TheTableRefusesOtherVersionsAndTakenNames) {
  const auto known = proxy::registered_networks();
  ASSERT_FALSE(known.empty());
  marrow_network copy = *known[0];
  EXPECT_EQ(marrow_network_register(&copy), MARROW_NETWORK_INVALID);
  copy.name = "another";
  copy.version = 77;
  EXPECT_EQ(marrow_network_register(&copy), MARROW_NETWORK_INVALID);
  EXPECT_EQ(proxy::registered_networks().size(), known.size());
  bool found = false;
  for (const auto& info : proxy::known_networks())
    found |= info.name == "shm" && info.reason.empty();
  EXPECT_TRUE(found);
}

TEST(ProxyRefusals, AFileThatIsNoPluginIsNamed) {
  Dl_info library{};
  ASSERT_NE(::dladdr(reinterpret_cast<void*>(&std::abort), &library), 0);
  ASSERT_NE(std::string(library.dli_fname).find('/'), std::string::npos);
  EXPECT_THAT(
      open_error(
          1, [&](int) { return with("MARROW_NETWORK", library.dli_fname); }, Code::unsupported),
      AllOf(HasSubstr(library.dli_fname), HasSubstr("is no network plugin: it has no")));
}

TEST(ProxyRefusals, RanksThatWouldTryOtherNetworksAreTold) {
  const std::string said = open_error(
      2, [](int r) { return with("MARROW_NETWORK", r == 0 ? "auto" : "shm"); }, Code::mismatch);
  EXPECT_THAT(said, AllOf(HasSubstr("rank 0 would try the networks"), HasSubstr("and rank 1 shm"),
                          HasSubstr("one value on every rank")));
}

TEST(ProxyRefusals, ANetworkThatPromisesTooLittleIsNotUsed) {
  Script& script = Script::begin();
  const auto refused = [] {
    return open_error(
        2, [](int) { return with("MARROW_NETWORK", "scripted"); }, Code::unsupported);
  };
  script.properties = [](marrow_network_properties& p) { p.max_inline = 8; };
  EXPECT_THAT(refused(), AllOf(HasSubstr("no network connects all ranks"),
                               HasSubstr("scripted promises too little: max_inline 8")));
  script.properties = [](marrow_network_properties& p) { p.max_message = 0; };
  EXPECT_THAT(refused(), HasSubstr("max_message 0"));
  script.properties = [](marrow_network_properties& p) { p.ordered = p.immediate_bytes = 0; };
  EXPECT_THAT(refused(), HasSubstr("ordered 0, immediate_bytes 0"));
  Script::begin();
}

TEST(ProxyRefusals, DeviceCommunicatorsAreBoundedAndAClosedOneMakesRoom) {
  ProxyOptions options;
  options.requirements = {.contexts = 1, .signals = 2, .counters = 1, .barriers = 1, .packets = 0};
  options.parameters.set("MARROW_PROXY_RING", "32");
  run_proxy_ranks(
      1,
      [&](ProxyRank& rank) {
        const auto arena = memory::Arena::create(Place::cpu());
        const memory::Block counters = arena->allocate(64, Memory::host);
        const auto make = [&] {
          return rank.transport().create_device(*arena, options.requirements, counters);
        };
        std::vector<std::unique_ptr<proxy::Device>> devices;
        std::string said;
        for (int i = 0; i < 1000 && said.empty(); ++i) {
          try {
            devices.push_back(make());
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::unsupported);
            said = error.what();
          }
        }
        // One is the rank's own.
        EXPECT_THAT(said, AllOf(HasSubstr(std::to_string(devices.size() + 1) +
                                          " device communicators are open on the proxy path"),
                                HasSubstr("close one before you make another")));
        ASSERT_FALSE(devices.empty());
        devices.front()->stop();
        devices.front().reset();
        devices.front() = make();
        for (auto& device : devices) device->stop();
      },
      options);
}

}  // namespace
}  // namespace marrow::test
