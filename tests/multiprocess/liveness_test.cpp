// SPDX-License-Identifier: Apache-2.0
// Ranks that die, fall silent, or give up: what the others see, how soon, and that they can go on.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "marrow/device.cuh"
#include "marrow/parameters.hpp"
#include "multiprocess/ranks.hpp"

namespace marrow::test {
namespace {

using std::to_string;

void wait_for_nothing(DeviceCommunicator comm, Status* out) {
  const Gin gin(comm, 0);
  *out = gin.wait_signal(0, 1, Deadline{20'000'000'000});
}

/// Each live rank sends a word and a signal to each live rank, `rounds` times, and checks what it gets.
/// Signals: 8 + source.
void talk(DeviceCommunicator comm, WindowHandle window, int failed, int rounds,
          std::uint64_t pause_ns, Status* status, int* wrong) {
  const Gin gin(comm, 0);
  auto* words = reinterpret_cast<std::uint64_t*>(window.local);
  for (int r = 1; r <= rounds; ++r) {
    for (int peer = 0; peer < comm.nranks; ++peer) {
      const Status sent =
          gin.put_value(peer, window, static_cast<std::uint64_t>(comm.rank * 2 + r % 2) * 8,
                        static_cast<std::uint64_t>(r * 1000 + comm.rank), SignalAdd{8 + comm.rank});
      const Status want = peer == failed ? Status::peer_failed : Status::ok;
      if (sent != want) *status = worse(*status, sent == Status::ok ? Status::invalid : sent);
    }
    if (pause_ns) (void)wait_until(comm, Deadline{pause_ns}, [] { return false; });
    for (int source = 0; source < comm.nranks; ++source) {
      if (source == failed) continue;
      *status = worse(*status, gin.wait_signal(8 + source, r));
      if (words[source * 2 + r % 2] != static_cast<std::uint64_t>(r * 1000 + source)) ++*wrong;
    }
    // Nobody may be two rounds ahead: the words alternate.
    if (r % 2 == 0) *status = worse(*status, Barrier(comm, team_world(comm), 0).sync(Thread{}));
    if (*status != Status::ok) return;
  }
  if (failed >= 0) {
    // Whatever names the failed rank says so at once.
    const std::uint64_t start = now_ns();
    if (gin.flush(failed) != Status::peer_failed) ++*wrong;
    if (gin.signal(failed, SignalAdd{0}) != Status::peer_failed) ++*wrong;
    if (now_ns() - start > 1'000'000'000) ++*wrong;
  }
}

std::string talk_all(Communicator& comm, const DeviceCommunicatorOwner& device,
                     const Window& window, int failed, int rounds, std::uint64_t pause_ns = 0) {
  Status status = Status::ok;
  int wrong = 0;
  launch(comm.place(), 1, 1, 0, talk, device.handle(), window.handle(), failed, rounds, pause_ns,
         &status, &wrong);
  if (status != Status::ok) return std::string("talk ended with ") + name(status);
  if (wrong) return to_string(wrong) + " wrong words";
  return "ok";
}

MARROW_ROLE(survivor) {
  Communicator comm(self.id(), self.nranks, self.rank, self.config());
  Window window = comm.allocate(4096);
  DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1, .signals = 32});
  comm.barrier();
  self.say("ready");
  Status status = Status::ok;
  launch(comm.place(), 1, 1, 0, wait_for_nothing, device.handle(), &status);
  self.say("woken", to_string(monotonic_ns()));
  if (status != Status::peer_failed) return std::string("the wait returned ") + name(status);
  const std::string dead = to_string(self.nranks - 1);
  try {
    comm.check();
    return "check() threw nothing";
  } catch (const Error& error) {
    if (error.code() != Code::peer_failed) return error.what();
    if (error.sentence().find("ank " + dead) == std::string::npos)
      return std::string("no rank named: ") + error.what();
  }
  const std::vector<bool> failed = comm.agree_failures(std::chrono::seconds(10));
  for (int rank = 0; rank < self.nranks; ++rank) {
    if (failed[rank] != (rank == self.nranks - 1))
      return "agreed on the wrong mask, rank " + to_string(rank);
  }
  comm.check();  // agreed failures are handled
  const std::string talked = talk_all(comm, device, window, self.nranks - 1, 20);
  if (talked != "ok") return talked;
  // New windows are made by the survivors alone.
  Window later = comm.allocate(8192);
  if (later.bytes() != 8192) return "a window after the failure has the wrong size";
  device.close();
  comm.close();
  return "ok";
}

class Liveness : public testing::TestWithParam<const char*> {};

TEST_P(Liveness, KilledRankIsPeerFailedWithin2SecondsAndSurvivorsWorkOn) {
  Ranks ranks("survivor", 4, GetParam());
  ASSERT_TRUE(ranks.all_said({0, 1, 2, 3}, "ready"));
  std::this_thread::sleep_for(Milliseconds(100));  // into the wait
  const std::int64_t killed = monotonic_ns();
  ranks.signal(3, SIGKILL);
  ASSERT_TRUE(ranks.all_said({0, 1, 2}, "woken", Milliseconds(10000)));
  for (const int rank : {0, 1, 2}) {
    const std::int64_t woken = std::stoll(ranks.context().hear(rank, "woken"));
    EXPECT_LT(woken - killed, 2'000'000'000) << "rank " << rank;
    EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
  }
}

MARROW_ROLE(talker) {
  Communicator comm(self.id(), self.nranks, self.rank, self.config());
  Window window = comm.allocate(4096);
  DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1, .signals = 32});
  comm.barrier();
  self.say("ready");
  const std::string talked = talk_all(comm, device, window, -1, 300, 2'000'000);
  if (talked != "ok") return talked;
  comm.check();
  comm.barrier();
  self.say("dropped", to_string(dropped_log_lines()));
  return "ok";
}

TEST_P(Liveness, StoppedRankResumesAndNothingIsLost) {
  Ranks ranks("talker", 3, GetParam());
  ASSERT_TRUE(ranks.all_said({0, 1, 2}, "ready"));
  std::this_thread::sleep_for(Milliseconds(200));
  ranks.signal(1, SIGSTOP);
  std::this_thread::sleep_for(Milliseconds(5000));
  ranks.signal(1, SIGCONT);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
}

/// What a process holds: open files and threads.
std::string held() {
  std::string text;
  for (const char* what : {"fd", "task"}) {
    const std::filesystem::directory_iterator list(std::string("/proc/self/") + what);
    text += to_string(std::distance(begin(list), end(list))) + " " + what + " ";
  }
  return text;
}

/// Talks until some peer is lost; for tests of several hosts (tests/multihost), which cut the wire. Then goes on
/// with those that are left, and closes. Says "lost" with what check() said, "masked" with whom it works without.
MARROW_ROLE(parted) {
  { Communicator warm(self.id("warm"), self.nranks, self.rank, self.config()); }
  const std::string before = held();
  {
    Communicator comm(self.id(), self.nranks, self.rank, self.config());
    Window window = comm.allocate(4096);
    DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1, .signals = 32});
    comm.barrier();
    self.say("ready");
    const std::string talked = talk_all(comm, device, window, -1, 100000, 2'000'000);
    if (talked != "talk ended with peer_failed" && talked != "talk ended with aborted")
      return talked;
    try {
      comm.check();
      return "check() threw nothing";
    } catch (const Error& error) {
      self.say("lost", error.what());
    }
    try {
      const std::vector<bool> failed = comm.agree_failures(std::chrono::seconds(10));
      std::string masked;
      int last = -1;
      for (int rank = 0; rank < self.nranks; ++rank) {
        if (failed[rank]) masked += to_string(last = rank) + " ";
      }
      self.say("masked", masked);
      if (std::count(failed.begin(), failed.end(), true) == 1) {
        DeviceCommunicatorOwner fresh = comm.device_communicator({.contexts = 1, .signals = 32});
        const std::string again = talk_all(comm, fresh, window, last, 20);
        if (again != "ok") return "afterwards " + again;
        fresh.close();
      }
      device.close();
      comm.close();
    } catch (const Error& error) {
      self.say("masked", error.what());
    }
  }
  const std::string after = held();
  return after == before ? "ok" : "held " + before + "before and " + after + "afterwards";
}

MARROW_ROLE(revoked) {
  Communicator comm(self.id(), self.nranks, self.rank, self.config());
  DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1, .signals = 8});
  comm.barrier();
  if (self.rank == 0) {
    std::this_thread::sleep_for(Milliseconds(200));
    comm.revoke("the test wants it");
  }
  Status status = Status::ok;
  launch(comm.place(), 1, 1, 0, wait_for_nothing, device.handle(), &status);
  if (status != Status::aborted) return std::string("the wait returned ") + name(status);
  try {
    comm.check();
  } catch (const Error& error) {
    if (error.code() != Code::aborted) return error.what();
    if (self.rank != 0 && error.sentence().find("the test wants it") == std::string::npos)
      return error.what();
    return "ok";
  }
  return "check() threw nothing";
}

TEST_P(Liveness, RevokeEndsEveryWait) {
  const std::int64_t start = monotonic_ns();
  Ranks ranks("revoked", 3, GetParam());
  for (const int rank : {0, 1, 2}) EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
  EXPECT_LT(monotonic_ns() - start, 15'000'000'000);
}

INSTANTIATE_TEST_SUITE_P(Paths, Liveness, testing::Values("lsa", "proxy", "gda"),
                         [](const auto& which) { return std::string(which.param); });

}  // namespace
}  // namespace marrow::test
