// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all
// A connection that breaks between two ranks that live: the sentence names the peer, nobody is masked, and reconnect() makes
// new queue pairs. softnic breaks one on request (error_at=N).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "thread_ranks.hpp"

namespace marrow {
namespace {

/// Puts until one fails, `most` at most. @return how many went well
MARROW_KERNEL put_until(DeviceCommunicator comm, WindowHandle window, int most, int* good,
                        Status* out) {
  Gin gin(comm, 0);
  const int to = 1 - comm.rank;
  Status status = Status::ok;
  for (*good = 0; *good < most; ++*good) {
    status = gin.put_value(to, window, 8, std::uint64_t{1000} + static_cast<unsigned>(*good));
    status = worse(status, gin.flush(to));
    if (status != Status::ok) break;
  }
  *out = status;
}

struct Wires {
  const char* path;
  const char* network;
};
class Reconnect : public ::testing::TestWithParam<Wires> {};

TEST_P(Reconnect, ABrokenConnectionIsMadeAgain) {
  test::run_as_threads(2, [](int rank, const UniqueId& id) {
    Config config;
    config.parameters["MARROW_PATH"] = GetParam().path;
    config.parameters["MARROW_NETWORK"] = GetParam().network;
    config.parameters["MARROW_NIC"] = "softnic";
    config.parameters["MARROW_SOFTNIC"] = "error_at=20";
    config.parameters["MARROW_WAIT_TIMEOUT"] = "10s";
    Communicator comm(id, 2, rank, config);
    Window window = comm.allocate(4096);
    auto* word = static_cast<std::uint64_t*>(window.data());
    word[0] = 77 + static_cast<unsigned>(rank);
    {
      auto device = comm.device_communicator();
      comm.barrier();
      if (rank == 0) {
        int good = 0;
        Status status = Status::ok;
        launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(), 1000, &good,
               &status);
        EXPECT_NE(status, Status::ok);
        EXPECT_GT(good, 0);
        EXPECT_LT(good, 1000);
        try {
          comm.check();
          ADD_FAILURE() << "check() threw nothing";
        } catch (const Error& error) {
          EXPECT_NE(error.sentence().find("rank 1"), std::string::npos) << error.what();
        }
      }
      comm.barrier();
      EXPECT_EQ(comm.agree_failures(), (std::vector<bool>{false, false})) << "both live";
      comm.reconnect();
      comm.check();
      // Both ways, with handles taken anew.
      int good = 0;
      Status status = Status::invalid;
      launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(), 5, &good, &status);
      EXPECT_EQ(status, Status::ok);
      comm.barrier();
      EXPECT_EQ(word[1], 1004u);
      EXPECT_EQ(word[0], 77u + static_cast<unsigned>(rank)) << "the window keeps its content";
      comm.check();
    }
    // As often as it is asked for, also where nothing is broken and nothing is open.
    window.close();
    comm.reconnect();
    comm.reconnect();
    comm.close();
  });
}

INSTANTIATE_TEST_SUITE_P(On, Reconnect,
                         ::testing::Values(Wires{"proxy", "verbs"}, Wires{"gda", "auto"}),
                         [](const auto& each) { return each.param.path; });

bool active(const std::string& nic) {
  std::ifstream file("/sys/class/infiniband/" + nic + "/ports/1/state");
  std::string line;
  return std::getline(file, line) && line.find("ACTIVE") != std::string::npos;
}

/// The same on a real kernel's device whose interface goes down for longer than the retries last.
TEST(Reconnect, ALinkThatWasDownForTooLong) {
  const char* netdev = std::getenv("MARROW_TEST_NETDEV");
  const char* nic = std::getenv("MARROW_NIC");
  if (!netdev || !nic) GTEST_SKIP() << "MARROW_TEST_NETDEV is not set: needs a NIC of its own";
  test::run_as_threads(2, [&](int rank, const UniqueId& id) {
    const auto link = [&](const char* state) {
      const std::string line = std::string("ip link set ") + netdev + " " + state;
      ASSERT_EQ(std::system(line.c_str()), 0);
    };
    Config config;
    config.parameters["MARROW_PATH"] = "proxy";
    config.parameters["MARROW_NETWORK"] = "verbs";
    config.parameters["MARROW_VERBS_TIMEOUT"] = "14";  // gives up after half a second
    config.parameters["MARROW_WAIT_TIMEOUT"] = "20s";
    Communicator comm(id, 2, rank, config);
    Window window = comm.allocate(4096);
    auto device = comm.device_communicator();
    auto* word = static_cast<std::uint64_t*>(window.data());
    int good = 0;
    Status status = Status::ok;
    comm.barrier();
    if (rank == 0) {
      launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(), 3, &good, &status);
      EXPECT_EQ(status, Status::ok);
      link("down");
      launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(), 1000, &good,
             &status);
      EXPECT_EQ(status, Status::peer_failed);
      link("up");
      for (int i = 0; i < 100 && !active(nic); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    comm.barrier();
    EXPECT_EQ(comm.agree_failures(), (std::vector<bool>{false, false})) << "both live";
    comm.reconnect();
    launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(), 5, &good, &status);
    EXPECT_EQ(status, Status::ok);
    comm.barrier();
    EXPECT_EQ(word[1], 1004u);
    comm.close();
  });
}

/// One comes too late: the sentence names it and says how to go on.
TEST(Reconnect, OneThatComesTooLateIsNamed) {
  std::atomic<bool> late{false};
  test::run_as_threads(2, [&](int rank, const UniqueId& id) {
    Config config;
    config.parameters["MARROW_BOOTSTRAP_TIMEOUT"] = "1s";
    Communicator comm(id, 2, rank, config);
    Window window = comm.allocate(4096);
    comm.barrier();
    try {
      while (rank == 1 && !late) std::this_thread::yield();
      comm.reconnect();
      ADD_FAILURE() << "nobody waited for the other";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::timeout) << error.what();
      if (rank == 0) {
        EXPECT_NE(std::string(error.what()).find("reconnect()"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("agree_failures"), std::string::npos)
            << error.what();
      }
    }
    late = true;
    EXPECT_EQ(comm.agree_failures(), (std::vector<bool>{false, false}));
    comm.reconnect();
    comm.check();
    comm.barrier();
    comm.close();
  });
}

TEST(Reconnect, OneThatDoesSomethingElseIsToldSo) {
  test::run_as_threads(2, [](int rank, const UniqueId& id) {
    Communicator comm(id, 2, rank);
    Window window = comm.allocate(4096);
    EXPECT_THROW(
        {
          if (rank == 0) {
            comm.reconnect();
          } else {
            (void)comm.allocate(8192);
          }
        },
        Error);
    comm.check();
  });
}

}  // namespace
}  // namespace marrow
