// SPDX-License-Identifier: Apache-2.0
// Set-up that cannot succeed says why and loses nothing; fifty create/destroy cycles leave nothing.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "marrow/device.cuh"
#include "multiprocess/ranks.hpp"
#include "thread_ranks.hpp"

namespace marrow::test {
namespace {

Config with(std::map<std::string, std::string> parameters) {
  Config config;
  config.parameters = std::move(parameters);
  return config;
}

struct Held {
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  std::size_t mappings = 0;
  std::size_t shared_files = 0;
  long resident_kib = 0;
};
std::size_t entries(const char* folder) {
  std::size_t n = 0;
  std::error_code ignored;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    ++n;
  return n;
}
Held held() {
  Held now;
  now.descriptors = entries("/proc/self/fd");
  now.threads = entries("/proc/self/task");
  now.shared_files = entries("/dev/shm");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    // The allocator's arenas and thread stacks come and go as they please; what we map is shared.
    if (line.find(" rw-s ") != std::string::npos || line.find(" r--s ") != std::string::npos)
      ++now.mappings;
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) now.resident_kib = std::stol(line.substr(6));
  }
  return now;
}

void ping(DeviceCommunicator comm, WindowHandle window, Status* out) {
  const Gin gin(comm, 0);
  for (int peer = 0; peer < comm.nranks; ++peer) {
    *out = worse(*out, gin.put(peer, window, 64 * comm.rank, window, 4096, 64, SignalAdd{0}));
  }
  *out = worse(*out, gin.wait_signal(0, comm.nranks));
  *out = worse(*out, gin.flush());
}

class Cycles : public testing::TestWithParam<const char*> {};

TEST_P(Cycles, FiftyLeaveNothing) {
  const auto cycle = [] {
    return as_threads(2, [](int rank, const UniqueId& id) -> std::string {
      Config config = with({{"MARROW_PATH", GetParam()}});
      if (std::string(GetParam()) == "gda") config.parameters["MARROW_NIC"] = "softnic";
      Communicator comm(id, 2, rank, config);
      Window window = comm.allocate(1 << 16);
      std::vector<char> memory(4096);
      LocalBuffer local = comm.register_local(memory.data(), memory.size());
      DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 2, .signals = 4});
      Status status = Status::ok;
      launch(comm.place(), 1, 1, 0, ping, device.handle(), window.handle(), &status);
      comm.barrier();
      local = {};
      if (rank == 0) {  // half of the owners close by hand, half by destructor: both must free
        return status == Status::ok ? "ok" : name(status);
      }
      return status == Status::ok ? "ok" : name(status);
    });
  };
  const std::vector<std::string> fine{"ok", "ok"};
  for (int i = 0; i < 5; ++i) ASSERT_EQ(cycle(), fine);
  const Held before = held();
  for (int i = 0; i < 50; ++i) ASSERT_EQ(cycle(), fine) << "cycle " << i;
  const Held after = held();
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.mappings, before.mappings);
  EXPECT_LE(after.shared_files, before.shared_files);
#if !defined( \
    MARROW_SANITIZED)  // AddressSanitizer keeps freed memory in quarantine; it finds leaks itself
  EXPECT_LT(after.resident_kib, before.resident_kib + 8 * 1024) << "KiB resident";
#endif
}

INSTANTIATE_TEST_SUITE_P(Paths, Cycles, testing::Values("lsa", "proxy", "gda"),
                         [](const auto& which) { return std::string(which.param); });

std::string code_of(const std::function<void()>& what, const char* mentions = "") {
  try {
    what();
    return "threw nothing";
  } catch (const Error& error) {
    if (std::string(error.what()).find(mentions) == std::string::npos) return error.what();
    return name(error.code());
  }
}

TEST(BadSetUp, WindowSizesMustAgreeAndNothingIsLost) {
  const auto results = as_threads(3, [](int rank, const UniqueId& id) -> std::string {
    Communicator comm(id, 3, rank);
    const std::uint64_t mine = rank == 1 ? 8192 : 4096;
    const std::string refused = code_of([&] { (void)comm.allocate(mine); }, "8192");
    if (refused != "mismatch") return "sizes: " + refused;
    const std::string again =
        code_of([&] { (void)comm.device_communicator({.contexts = rank + 1}); });
    if (again != "mismatch") return "requirements: " + again;
    Window window = comm.allocate(1 << 16);
    DeviceCommunicatorOwner device = comm.device_communicator();
    Status status = Status::ok;
    launch(comm.place(), 1, 1, 0, ping, device.handle(), window.handle(), &status);
    comm.barrier();
    return name(status);
  });
  EXPECT_EQ(results, (std::vector<std::string>{"ok", "ok", "ok"}));
}

TEST(BadSetUp, RankCountsMustAgree) {
  const auto results = as_threads(2, [](int rank, const UniqueId& id) {
    const Config config = with({{"MARROW_BOOTSTRAP_TIMEOUT", "3s"}});
    return code_of([&] { Communicator comm(id, rank == 0 ? 2 : 3, rank, config); });
  });
  EXPECT_TRUE(results[1] == "mismatch") << results[1];
  EXPECT_TRUE(results[0] == "mismatch" || results[0] == "timeout") << results[0];
}

TEST(BadSetUp, ARankThatNeverComesIsNamed) {
  const auto results = as_threads(2, [](int rank, const UniqueId& id) {
    const Config config = with({{"MARROW_BOOTSTRAP_TIMEOUT", "1s"}});
    return code_of([&] { Communicator comm(id, 3, rank, config); }, "2");
  });
  EXPECT_EQ(results, (std::vector<std::string>{"timeout", "timeout"}));
}

TEST(BadSetUp, NumbersOutOfRange) {
  const UniqueId id = UniqueId::create();
  EXPECT_EQ(code_of([&] { Communicator comm(id, 0, 0); }), "invalid_argument");
  EXPECT_EQ(code_of([&] { Communicator comm(id, 1 << 20, 0); }), "invalid_argument");
}

TEST(BadSetUp, BadParametersAreNamed) {
  const auto made = [](std::map<std::string, std::string> parameters, const char* mentions) {
    return code_of(
        [&] { Communicator comm(UniqueId::create(), 1, 0, with(std::move(parameters))); },
        mentions);
  };
  EXPECT_EQ(made({{"MARROW_PATH", "carrier-pigeon"}}, "carrier-pigeon"), "invalid_argument");
  EXPECT_EQ(made({{"MARROW_GDA_DEPTH", "33"}}, "MARROW_GDA_DEPTH"), "invalid_argument");
  EXPECT_EQ(made({{"MARROW_WAIT_TIMEOUT", "soon"}}, "MARROW_WAIT_TIMEOUT"), "invalid_argument");
  const std::string network =
      made({{"MARROW_PATH", "proxy"}, {"MARROW_NETWORK", "smoke-signals"}}, "smoke-signals");
  EXPECT_TRUE(network == "unsupported" || network == "invalid_argument") << network;
}

TEST(BadSetUp, RequirementsOutOfRange) {
  Communicator comm(UniqueId::create(), 1, 0);
  EXPECT_EQ(code_of([&] { (void)comm.device_communicator({.contexts = 0}); }), "invalid_argument");
  EXPECT_EQ(code_of([&] { (void)comm.device_communicator({.contexts = 65}); }), "invalid_argument");
  EXPECT_EQ(code_of([&] { (void)comm.device_communicator({.signals = -1}); }), "invalid_argument");
  EXPECT_EQ(code_of([&] { (void)comm.device_communicator({.packets = 1 << 30}); }),
            "invalid_argument");
  EXPECT_EQ(code_of([&] { (void)comm.allocate(0); }), "invalid_argument");
  EXPECT_EQ(code_of([&] { (void)comm.register_local(nullptr, 16); }), "invalid_argument");
  EXPECT_NO_THROW((void)comm.device_communicator());
}

}  // namespace
}  // namespace marrow::test
