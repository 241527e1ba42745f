// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan-all tsan-all
// What the host does around kernels: stream forms, windows of memory that somebody else allocated, two
// communicators at once, lsa teams, allgather, statistics.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "thread_ranks.hpp"

namespace marrow {
namespace {

std::vector<std::string> fine(int nranks) { return std::vector<std::string>(nranks, "ok"); }

Config config_for(const std::string& path) {
  Config config;
  config.parameters["MARROW_PATH"] = path;
  if (path == "gda") config.parameters["MARROW_NIC"] = "softnic";
  return config;
}

class HostApi : public testing::TestWithParam<const char*> {};

TEST_P(HostApi, StreamForms) {
  const auto results = test::as_threads(3, [](int rank, const UniqueId& id) -> std::string {
    Communicator comm(id, 3, rank, config_for(GetParam()));
    Window window = comm.allocate(1 << 16);
    std::vector<unsigned char> data(4096);
    LocalBuffer source = comm.register_local(data.data(), data.size());
    DeviceCommunicatorOwner device = comm.device_communicator({.signals = 4});
    for (int round = 1; round <= 5; ++round) {
      std::memset(data.data(), 16 * round + rank, data.size());
      const int next = (rank + 1) % 3;
      const int before = (rank + 2) % 3;
      comm.put_on_stream(device, next, window, static_cast<std::uint64_t>(rank) * 4096, source, 0,
                         4096);
      comm.signal_on_stream(device, next, 1, 2);
      comm.wait_on_stream(device, 1, static_cast<std::uint64_t>(round) * 2);
      comm.synchronize();
      comm.check();
      const auto* got = static_cast<const unsigned char*>(window.host()) + before * 4096;
      for (int i = 0; i < 4096; ++i) {
        if (got[i] != 16 * round + before)
          return "wrong byte " + std::to_string(i) + " in round " + std::to_string(round);
      }
      comm.barrier();
    }
    return "ok";
  });
  EXPECT_EQ(results, fine(3));
}

void send_all(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle local,
              std::uint64_t bytes, Status* out) {
  const Gin gin(comm, 0);
  for (int peer = 0; peer < comm.nranks; ++peer) {
    *out = worse(*out,
                 gin.put(peer, window, comm.rank * bytes, local, 0, bytes, SignalAdd{comm.rank}));
  }
  for (int source = 0; source < comm.nranks; ++source)
    *out = worse(*out, gin.wait_signal(source, 1));
  *out = worse(*out, gin.flush());
}

TEST_P(HostApi, WindowOfMemoryThatWasThereBefore) {
  const auto results = test::as_threads(2, [](int rank, const UniqueId& id) -> std::string {
    Communicator comm(id, 2, rank, config_for(GetParam()));
    const int fd = memfd_create("mine", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 1 << 16) != 0) return "no memfd";
    void* memory = mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return "no mapping";
    std::string result = "ok";
    {
      // Not at the start of the mapping: a tensor inside a pool.
      auto* mine = static_cast<unsigned char*>(memory) + 4096 + 64;
      Window window = comm.register_window(mine, 8192);
      std::vector<unsigned char> data(4096, static_cast<unsigned char>(rank + 5));
      LocalBuffer local = comm.register_local(data.data(), data.size());
      DeviceCommunicatorOwner device = comm.device_communicator({.signals = 2});
      Status status = Status::ok;
      launch(comm.place(), 1, 1, 0, send_all, device.handle(), window.handle(), local.handle(),
             std::uint64_t{4096}, &status);
      if (status != Status::ok) result = name(status);
      for (int i = 0; i < 8192; ++i) {
        if (mine[i] != i / 4096 + 5) result = "wrong byte " + std::to_string(i);
      }
      if (mine[-1] != 0 || mine[8192] != 0) result = "a neighbour was written";
      comm.barrier();
      local = {};
      window.close();
    }
    comm.close();
    munmap(memory, 1 << 16);
    return result;
  });
  EXPECT_EQ(results, fine(2));
}

TEST_P(HostApi, TwoCommunicatorsAtOnce) {
  const UniqueId second = UniqueId::create();
  const auto results = test::as_threads(2, [&](int rank, const UniqueId& id) -> std::string {
    Communicator one(id, 2, rank, config_for(GetParam()));
    Communicator two(second, 2, 1 - rank, config_for("lsa"));  // other ranks, another path
    Window a = one.allocate(4096);
    Window b = two.allocate(4096);
    DeviceCommunicatorOwner da = one.device_communicator({.signals = 2});
    DeviceCommunicatorOwner db = two.device_communicator({.signals = 2});
    alignas(64) unsigned char data[64];
    std::memset(data, rank + 1, sizeof data);
    LocalBuffer la = one.register_local(data, sizeof data);
    LocalBuffer lb = two.register_local(data, sizeof data);
    Status status = Status::ok;
    launch(one.place(), 1, 1, 0, send_all, da.handle(), a.handle(), la.handle(), std::uint64_t{64},
           &status);
    launch(two.place(), 1, 1, 0, send_all, db.handle(), b.handle(), lb.handle(), std::uint64_t{64},
           &status);
    std::string result = name(status);
    for (int i = 0; i < 128; ++i) {
      if (static_cast<unsigned char*>(a.host())[i] != i / 64 + 1) result = "one: wrong byte";
      if (static_cast<unsigned char*>(b.host())[i] != 2 - i / 64) result = "two: wrong byte";
    }
    one.barrier();
    two.barrier();
    return result;
  });
  EXPECT_EQ(results, fine(2));
}

INSTANTIATE_TEST_SUITE_P(Paths, HostApi, testing::Values("lsa", "gda", "proxy"),
                         [](const auto& which) { return std::string(which.param); });

TEST(HostApiTeams, LsaSizeSplitsTheHost) {
  const auto results = test::as_threads(4, [](int rank, const UniqueId& id) -> std::string {
    Config config;
    config.parameters["MARROW_LSA_SIZE"] = "2";
    config.parameters["MARROW_NIC"] = "none";
    Communicator comm(id, 4, rank, config);
    const DeviceCommunicatorOwner device = comm.device_communicator();
    const DeviceCommunicator handle = device.handle();
    if (handle.lsa_size != 2 || handle.lsa_first != rank / 2 * 2 || handle.lsa_rank != rank % 2)
      return "wrong team";
    for (const PeerInfo& peer : comm.peers()) {
      const bool near = peer.rank / 2 == rank / 2;
      if ((peer.path == Path::lsa) != near)
        return "rank " + std::to_string(peer.rank) + " is reached by " + name(peer.path);
      if (!near && peer.rejected.empty()) return "no reason why lsa was not taken";
    }
    return "ok";
  });
  EXPECT_EQ(results, fine(4));
}

TEST(HostApiTeams, AllgatherBringsEveryRanksBytes) {
  const auto results = test::as_threads(3, [](int rank, const UniqueId& id) -> std::string {
    Communicator comm(id, 3, rank, config_for("lsa"));
    const std::string mine = "rank " + std::to_string(rank);
    const auto all = comm.allgather(mine.data(), mine.size());
    for (int r = 0; r < 3; ++r) {
      if (std::string(reinterpret_cast<const char*>(all[r].data()), all[r].size()) !=
          "rank " + std::to_string(r)) {
        return "wrong bytes of rank " + std::to_string(r);
      }
      if (comm.statistics(r).failed) return "a healthy rank counts as failed";
    }
    return "ok";
  });
  EXPECT_EQ(results, fine(3));
}

}  // namespace
}  // namespace marrow
