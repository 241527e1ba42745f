// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan asan
// The host core end to end over lsa, ranks as threads: windows, device communicator, errors.
#include <gtest/gtest.h>

#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "core/path_plan.hpp"
#include "core/window.hpp"
#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "thread_ranks.hpp"

namespace marrow {
namespace {

/// Runs body(communicator) on n thread ranks; rethrows the lowest rank's failure.
void run_ranks(int n, const std::function<void(Communicator&)>& body, const Config& config = {}) {
  test::run_as_threads(n, [&](int rank, const UniqueId& id) {
    Communicator comm(id, n, rank, config);
    body(comm);
    comm.close();
  });
}

MARROW_KERNEL ring_put(DeviceCommunicator comm, WindowHandle window, std::uint64_t bytes,
                       Status* out) {
  Gin gin(comm, 0);
  const int to = (comm.rank + 1) % comm.nranks;
  Status status = gin.put(to, window, bytes, window, 0, bytes, SignalAdd{0, 1}, Block{});
  status = worse(status, gin.wait_signal(0, 1, Block{}));
  if (thread_index() == 0) *out = status;
}

TEST(Core, RingOfPutsArrives) {
  constexpr std::uint64_t kBytes = 5000;
  for (int n : {1, 2, 4}) {
    run_ranks(n, [&](Communicator& comm) {
      Window window = comm.allocate(2 * kBytes);
      auto device = comm.device_communicator();
      auto* data = static_cast<unsigned char*>(window.data());
      for (std::uint64_t i = 0; i < kBytes; ++i)
        data[i] = static_cast<unsigned char>(i * 7 + comm.rank());
      Status status = Status::invalid;
      launch(comm.place(), 1, 4, 0, ring_put, device.handle(), window.handle(), kBytes, &status);
      EXPECT_EQ(status, Status::ok);
      const int from = (comm.rank() + comm.nranks() - 1) % comm.nranks();
      for (std::uint64_t i = 0; i < kBytes; ++i) {
        ASSERT_EQ(data[kBytes + i], static_cast<unsigned char>(i * 7 + from)) << "byte " << i;
      }
      comm.check();
    });
  }
}

MARROW_KERNEL all_barriers(DeviceCommunicator comm, int rounds, Status* out) {
  Barrier barrier(comm, team_world(comm), 0);
  Status status = Status::ok;
  for (int i = 0; i < rounds; ++i) status = worse(status, barrier.sync(Block{}));
  if (thread_index() == 0) *out = status;
}

TEST(Core, BarrierRounds) {
  run_ranks(3, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::invalid;
    launch(comm.place(), 1, 2, 0, all_barriers, device.handle(), 200, &status);
    EXPECT_EQ(status, Status::ok);
  });
}

MARROW_KERNEL wait_for_nobody(DeviceCommunicator comm, Deadline deadline, Status* out) {
  Gin gin(comm, 0);
  *out = gin.wait_signal(3, 1, deadline);
}

TEST(Core, WaitPastItsDeadlineReturnsTimeout) {
  run_ranks(1, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::ok;
    launch(comm.place(), 1, 1, 0, wait_for_nobody, device.handle(), Deadline{20'000'000}, &status);
    EXPECT_EQ(status, Status::timeout);
  });
}

TEST(Core, ForeignAbiIsInvalidAndNamed) {
  run_ranks(1, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    DeviceCommunicator handle = device.handle();
    handle.abi = kAbiVersion + 1;
    Status status = Status::ok;
    launch(comm.place(), 1, 1, 0, wait_for_nobody, handle, Deadline{1000}, &status);
    EXPECT_EQ(status, Status::invalid);
    try {
      comm.check();
      FAIL() << "check() did not throw";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::version);
    }
  });
}

TEST(Core, DifferentWindowSizesAreNamed) {
  std::atomic<int> mismatches{0};
  run_ranks(2, [&](Communicator& comm) {
    try {
      comm.allocate(comm.rank() == 0 ? 4096 : 8192);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_NE(std::string(error.what()).find("4096"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("8192"), std::string::npos);
      ++mismatches;
    }
    comm.barrier();
  });
  EXPECT_EQ(mismatches, 2);
}

TEST(Core, RevokeEndsWaits) {
  run_ranks(2, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.revoke("test");
    } else {
      Status status = Status::ok;
      launch(comm.place(), 1, 1, 0, wait_for_nobody, device.handle(), Deadline{}, &status);
      EXPECT_EQ(status, Status::aborted);
      EXPECT_THROW(comm.check(), Error);
    }
  });
}

MARROW_KERNEL put_until(DeviceCommunicator comm, WindowHandle window, std::uint64_t ns) {
  const Gin gin(comm, 0);
  for (const std::uint64_t start = now_ns(); now_ns() - start < ns;)
    (void)gin.put(0, window, 0, window, 64, 64);
}

TEST(Core, MemoryOutlivesThePutsOfARevokedPeer) {
  run_ranks(2, [&](Communicator& comm) {
    Window window = comm.allocate(4096);
    auto device = comm.device_communicator();
    if (comm.rank() == 0) {
      comm.revoke("test");  // and closes at once
    } else {
      launch(comm.place(), 1, 1, 0, put_until, device.handle(), window.handle(),
             std::uint64_t{200'000'000});
    }
  });
}

TEST(Core, StreamFormsMoveDataOnEveryPath) {
  for (const char* path : {"lsa", "gda", "proxy"}) {
    Config config;
    config.parameters["MARROW_PATH"] = path;
    run_ranks(
        2,
        [&](Communicator& comm) {
          Window window = comm.allocate(4096);
          Window source = comm.allocate(4096);
          auto device = comm.device_communicator();
          auto* bytes = static_cast<unsigned char*>(source.data());
          for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<unsigned char>(i + comm.rank());
          const int peer = 1 - comm.rank();
          const LocalBuffer buffer = comm.register_local(bytes, 4096);
          comm.put_on_stream(device, peer, window, 0, buffer, 0, 4096);
          comm.signal_on_stream(device, peer, 5, 3);
          comm.wait_on_stream(device, 5, 3);
          const auto* got = static_cast<const unsigned char*>(window.data());
          for (int i = 0; i < 4096; ++i)
            ASSERT_EQ(got[i], static_cast<unsigned char>(i + peer)) << path << " byte " << i;
          EXPECT_THROW(comm.signal_on_stream(device, 2, 0), Error);
          comm.barrier();
        },
        config);
  }
}

MARROW_KERNEL count_actions(DeviceCommunicator comm, WindowHandle window, Status* out) {
  const Gin gin(comm, 0);
  for (int peer = 0; peer < comm.nranks; ++peer) {
    out[0] = worse(out[0], gin.signal(peer, SignalAdd{0, 1}, CounterInc{0}));
    out[1] = worse(out[1], gin.signal(peer, SignalAt{window, 0, 1}, CounterInc{1}));
    out[2] = worse(out[2], gin.add(peer, window, 8, 1, CounterInc{2}));
    out[3] = worse(out[3], gin.put(peer, window, 64 + 8 * static_cast<std::uint64_t>(comm.rank),
                                   window, 128, 8, SignalAt{window, 16, 1}, CounterInc{3}));
  }
  for (int c = 0; c < 4; ++c) {
    out[4] = worse(out[4], gin.wait_counter(c, static_cast<std::uint64_t>(comm.nranks),
                                            Deadline{10'000'000'000}));
    if (gin.read_counter(c) != static_cast<std::uint64_t>(comm.nranks))
      out[4] = worse(out[4], Status::invalid);
  }
  out[5] = gin.add(0, window, 8, 1, CounterInc{comm.counters}) == Status::invalid ? Status::ok
                                                                                  : Status::invalid;
}

TEST(Core, CountersCountActionsOnEveryPath) {
  // The last: each pair by another path, so that SignalAt and adds leave the peer's own path.
  for (const char* path : {"lsa", "gda", "proxy", "lsa,proxy"}) {
    Config config;
    config.parameters["MARROW_PATH"] = path;
    run_ranks(
        2,
        [&](Communicator& comm) {
          Window window = comm.allocate(4096);
          auto device = comm.device_communicator();
          std::vector<Status> status(6, Status::ok);
          launch(comm.place(), 1, 1, 0, count_actions, device.handle(), window.handle(),
                 status.data());
          EXPECT_EQ(status, std::vector<Status>(6, Status::ok)) << path;
          comm.barrier();
        },
        config);
  }
}

MARROW_KERNEL one_barrier(DeviceCommunicator comm, Contexts contexts, Deadline deadline,
                          Status* out) {
  const Status status =
      Barrier(comm, team_world(comm), 0).sync(Block{}, contexts, Fence::put, deadline);
  if (thread_index() == 0) *out = status;
}

TEST(Core, ABarrierThatFailedOnOneRankStaysInStep) {
  run_ranks(2, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::ok;
    // Rank 1's fence fails, so it sends no arrival.
    const bool bad = comm.rank() == 1;
    launch(comm.place(), 1, 2, 0, one_barrier, device.handle(), Contexts{0, bad ? 9 : 1},
           Deadline{20'000'000}, &status);
    EXPECT_EQ(status, bad ? Status::invalid : Status::timeout);
    comm.barrier();
    for (int i = 0; i < 3; ++i) {
      launch(comm.place(), 1, 2, 0, one_barrier, device.handle(), Contexts{},
             Deadline{10'000'000'000}, &status);
      EXPECT_EQ(status, Status::ok) << "call " << i;
    }
    comm.barrier();
  });
}

MARROW_KERNEL lonely_barrier(DeviceCommunicator comm, std::uint64_t* took, Status* out) {
  const std::uint64_t start = now_ns();
  *out = Barrier(comm, team_world(comm), 1).sync(Thread{}, {}, Fence::put, Deadline{500'000'000});
  *took = now_ns() - start;
}

TEST(Core, ABarriersDeadlineIsNotOnePerMember) {
  run_ranks(7, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    if (comm.rank() == 0) {
      Status status = Status::ok;
      std::uint64_t took = 0;
      launch(comm.place(), 1, 1, 0, lonely_barrier, device.handle(), &took, &status);
      EXPECT_EQ(status, Status::timeout);
      EXPECT_LT(took, 2'900'000'000u) << "six others: 3 s, were each waited for that long";
    }
    comm.barrier();
  });
}

MARROW_KERNEL put_to_the_dead(DeviceCommunicator comm, WindowHandle window, Status* out) {
  const Gin gin(comm, 0);
  out[0] = gin.put(1, window, 0, window, 64, 8, SignalAdd{0, 1});
  out[1] = gin.signal(1, SignalAdd{0, 1});
  out[2] = Barrier(comm, team_world(comm), 0).sync(Thread{});
}

TEST(Core, WhatIsMadeAfterAnAgreementLeavesTheDeadOut) {
  for (const char* path : {"lsa", "gda", "proxy"}) {
    Config config;
    config.parameters["MARROW_PATH"] = path;
    const UniqueId id = UniqueId::create();
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        Communicator comm(id, 2, 1, config);
        comm.barrier();
        _exit(0);  // dies as a killed process does: without a close
      } catch (...) {
      }
      _exit(1);
    }
    {
      Communicator comm(id, 2, 0, config);
      comm.barrier();
      EXPECT_EQ(waitpid(child, nullptr, 0), child);
      EXPECT_EQ(comm.agree_failures(), (std::vector<bool>{false, true}));
      Window window = comm.allocate(4096);
      auto device = comm.device_communicator();
      std::vector<Status> status(3, Status::invalid);
      launch(comm.place(), 1, 1, 0, put_to_the_dead, device.handle(), window.handle(),
             status.data());
      EXPECT_EQ(status, (std::vector<Status>{Status::peer_failed, Status::peer_failed, Status::ok}))
          << path;
    }
  }
}

std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

TEST(Core, RegisteredMemoryIsGivenBack) {
  run_ranks(1, [&](Communicator& comm) {
    Window window = comm.allocate(1 << 16);
    auto* bytes = static_cast<std::byte*>(window.data());
    const std::size_t before = open_files();
    for (int i = 0; i < 20; ++i) {
      const LocalBuffer buffer = comm.register_local(bytes, 1 << 12);
      Window same = comm.register_window(bytes + 24, 1 << 12);
      bytes[i] = std::byte{1};  // the memory stays
      same.close();
    }
    EXPECT_EQ(open_files(), before);
  });
}

MARROW_KERNEL signal_self(DeviceCommunicator comm, Status* out) {
  Gin gin(comm, 0);
  *out = gin.signal(comm.rank, SignalAdd{0, 1});
}

TEST(Core, ADiscardedIdLeavesNothing) {
  const std::size_t before = open_files();
  UniqueId id = UniqueId::create();
  EXPECT_GT(open_files(), before);
  id.discard();
  id.discard();
  UniqueId().discard();
  EXPECT_EQ(open_files(), before);
  EXPECT_THROW(Communicator(UniqueId::create(), 5000, 0), Error);
  EXPECT_EQ(open_files(), before);
  EXPECT_THROW(Communicator(id, 1, 0), Error);  // nobody listens for it any more
}

TEST(Core, BadSettingsOfTheCpuDeviceAreRefused) {
  run_ranks(1, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    Status status = Status::ok;
    for (const char* name : {"MARROW_CPU_LANES", "MARROW_CPU_SEED"}) {
      setenv(name, "4x", 1);
      try {
        launch(comm.place(), 1, 1, 0, signal_self, device.handle(), &status);
        ADD_FAILURE() << name << " was taken";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
      unsetenv(name);
    }
  });
}

TEST(Core, WhyAWindowHasNoAtomics) {
  memory::Block device, host;
  std::byte byte{};
  device.kind = Memory::device;
  host.kind = Memory::host;
  host.host = &byte;
  for (const bool gpu : {false, true}) {
    EXPECT_NE(core::why_no_atomics(gpu, Path::proxy, device).find("proxy path"), std::string::npos);
    EXPECT_EQ(core::why_no_atomics(gpu, Path::proxy, host), "");
    EXPECT_EQ(core::why_no_atomics(gpu, Path::lsa, device), "");
    EXPECT_EQ(core::why_no_atomics(gpu, Path::gda, device), "");
    EXPECT_EQ(core::why_no_atomics(gpu, Path::gda, host), "");
  }
  EXPECT_EQ(core::why_no_atomics(false, Path::lsa, host), "");
  EXPECT_NE(core::why_no_atomics(true, Path::lsa, host).find("lsa path"), std::string::npos);
  // With a block on each GPU as NIC, host memory is as far from being one word as with stores over NVLink.
  EXPECT_NE(core::why_no_atomics(true, Path::gda, host, true).find("gda path"), std::string::npos);
  EXPECT_EQ(core::why_no_atomics(true, Path::gda, device, true), "");
  run_ranks(1, [](Communicator& comm) { EXPECT_EQ(comm.allocate(64).why_no_atomics(), ""); });
}

MARROW_KERNEL barrier_then_late(DeviceCommunicator comm, Status* status, int* late) {
  const Barrier barrier(comm, team_world(comm), 0);
  *status = barrier.sync(Thread{}, {}, Fence::put, Deadline{20'000'000});
  *late = barrier.late();
}

TEST(Core, ABarrierNamesWhoIsLate) {
  run_ranks(3, [&](Communicator& comm) {
    auto device = comm.device_communicator();
    if (comm.rank() != 2) {
      Status status = Status::ok;
      int late = -1;
      launch(comm.place(), 1, 1, 0, barrier_then_late, device.handle(), &status, &late);
      EXPECT_EQ(status, Status::timeout);
      EXPECT_EQ(late, 2) << "rank " << comm.rank();
    }
    comm.barrier();
  });
}

TEST(Core, ClosedWindowsLeaveNothing) {
  for (const char* path : {"lsa", "gda"}) {
    Config config;
    config.parameters["MARROW_PATH"] = path;
    run_ranks(
        1,
        [&](Communicator& comm) {
          for (int i = 0; i < 10; ++i) comm.allocate(4096).close();  // what stays, stays once
          const std::size_t files = open_files();
          const std::size_t heap = mallinfo2().uordblks;
          const int cycles = std::string(path) == "lsa" ? 10'000 : 1'000;
          for (int i = 0; i < cycles; ++i) comm.allocate(4096).close();
          EXPECT_EQ(open_files(), files);
          // A table is 512 bytes at least; counted in bytes a cycle. (0 under a sanitizer.)
          const auto grown = static_cast<std::int64_t>(mallinfo2().uordblks - heap);
          EXPECT_LT(grown / cycles, 64) << path;
        },
        config);
  }
}

TEST(Core, ARankWithABadParameterIsToldToTheOthersAtOnce) {
  for (int victim : {0, 1}) {
    const auto start = std::chrono::steady_clock::now();
    const auto told = test::as_threads(2, [&](int rank, const UniqueId& id) {
      Config config;
      config.parameters["MARROW_BOOTSTRAP_TIMEOUT"] = "40s";
      if (rank == victim) config.parameters["MARROW_GDA_DEPTH"] = "33";
      const Communicator comm(id, 2, rank, config);
      return std::string("no error");
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    EXPECT_NE(told[victim].find("MARROW_GDA_DEPTH"), std::string::npos) << told[victim];
    const std::string& other = told[1 - victim];
    EXPECT_NE(other.find("Rank " + std::to_string(victim) + " of 2 could not start"),
              std::string::npos)
        << other;
    EXPECT_NE(other.find("MARROW_GDA_DEPTH"), std::string::npos) << other;
  }
}

TEST(Core, AnErrorOfTheNicIsFoundWithoutPolling) {
  for (const char* queue : {"ring", "collapsed"}) {
    Config config;
    config.parameters = {
        {"MARROW_PATH", "gda"}, {"MARROW_SOFTNIC", "error_at=1"}, {"MARROW_GDA_CQ", queue}};
    run_ranks(
        1,
        [&](Communicator& comm) {
          auto device = comm.device_communicator();
          Status status = Status::invalid;
          launch(comm.place(), 1, 1, 0, signal_self, device.handle(), &status);
          EXPECT_EQ(status, Status::ok);  // posted; no kernel looks at the completion
          std::string sentence;
          for (int i = 0; i < 2000 && sentence.empty(); ++i) {
            try {
              comm.check();
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } catch (const Error& error) {
              sentence = error.what();
            }
          }
          EXPECT_NE(sentence.find("to rank 0"), std::string::npos) << sentence;
          EXPECT_NE(sentence.find("syndrome"), std::string::npos) << sentence;
        },
        config);
  }
}

TEST(PathPlan, LsaSizeSplitsAHost) {
  using namespace core;
  std::vector<RankFacts> facts(4);
  for (auto& f : facts)
    f.host = 7, f.lsa_limit = 2, f.gda_usable = f.gda_emulated = f.proxy_usable = 1;
  const std::vector<std::vector<Wish>> wishes(4, std::vector<Wish>(4, Wish::automatic));
  const PathPlan plan = plan_paths(facts, wishes, {});
  EXPECT_EQ(plan.path[0][1], Path::lsa);
  EXPECT_EQ(plan.path[0][2], Path::gda);
  EXPECT_EQ(plan.atomic, Path::gda);
  EXPECT_EQ(plan.lsa_size[3], 2);
  EXPECT_EQ(plan.lsa_first[3], 2);
}

TEST(PathPlan, AWishThatCannotBeMetNamesThePair) {
  using namespace core;
  std::vector<RankFacts> facts(2);
  facts[0].host = 1;
  facts[1].host = 2;
  const std::vector<std::vector<Wish>> wishes(2, std::vector<Wish>(2, Wish::automatic));
  EXPECT_THROW(plan_paths(facts, wishes, {}), Error);
  EXPECT_THROW(parse_wishes("lsa,nic", 2), Error);
  EXPECT_THROW(parse_wishes("lsa,gda,gda", 2), Error);
}

}  // namespace
}  // namespace marrow
