// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// MARROW_NETWORK=path.so: a plugin written in C is loaded, used and unloaded; one of another version is
// refused with both versions named.
#include <gmock/gmock.h>
#include <unistd.h>

#include "unit/proxy_support.hpp"

namespace marrow::test {
namespace {

using ::testing::HasSubstr;

std::string plugin(const char* name) {
  return std::string(MARROW_BINARY_DIR) + "/tests/network_" + name + ".so";
}

MARROW_KERNEL everything(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
                         Status* out) {
  Gin gin(comm, 0);
  std::uint64_t old = 0;
  Status status = gin.put(0, window, 128, local, 0, 1000, SignalAdd{0, 2});
  status = worse(status, gin.wait_signal(0, 2));
  status = worse(status, gin.put_value(0, window, 8, std::uint64_t{40}));
  status = worse(status, gin.flush_remote());
  status = worse(status, gin.fetch_add(0, window, 8, 2, &old));
  status = worse(status, gin.get(0, window, 8, local, 2000, 8));
  status = worse(status, gin.flush());
  *out = old == 40 ? status : Status::invalid;
}

TEST(NetworkPlugin, APluginInCCarriesTheProxy) {
  if (access(plugin("self").c_str(), R_OK) != 0) GTEST_SKIP() << "built without a C compiler";
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", plugin("self"));
  run_proxy_ranks(
      1,
      [](ProxyRank& rank) {
        EXPECT_EQ(rank.transport().name(), "self");
        for (int i = 0; i < 1000; ++i) rank.local_block.host[i] = static_cast<std::byte>(i);
        Status status = Status::invalid;
        rank.run(1, 1, everything, rank.window, rank.local, &status);
        EXPECT_EQ(status, Status::ok);
        EXPECT_EQ(std::memcmp(rank.window.local + 128, rank.local_block.host, 1000), 0);
        std::uint64_t word = 0;
        std::memcpy(&word, rank.local_block.host + 2000, 8);
        EXPECT_EQ(word, 42u);
      },
      options);
  // More ranks than it connects: its own sentence comes back, on every rank.
  try {
    run_proxy_ranks(
        2, [](ProxyRank&) {}, options);
    ADD_FAILURE() << "connected two ranks";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("one rank with itself"));
  }
}

TEST(NetworkPlugin, AnotherVersionIsRefused) {
  if (access(plugin("self").c_str(), R_OK) != 0) GTEST_SKIP() << "built without a C compiler";
  ProxyOptions options;
  options.parameters.set("MARROW_NETWORK", plugin("self_of_another_version"));
  try {
    run_proxy_ranks(
        1, [](ProxyRank&) {}, options);
    ADD_FAILURE() << "loaded it";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::version);
    EXPECT_THAT(error.what(), HasSubstr("version 9"));
  }
}

}  // namespace
}  // namespace marrow::test
