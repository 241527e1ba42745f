// SPDX-License-Identifier: Apache-2.0
// Processes that take the place of killed ones: everything works again, on every path, and whatever
// goes wrong on the way is said and leaves the survivors working.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "marrow/device.cuh"
#include "multiprocess/ranks.hpp"

namespace marrow::test {
namespace {

using std::to_string;
using std::chrono::milliseconds;

constexpr int kSignals = 32;
constexpr std::uint64_t kBytes = 8192;

/// Each live rank puts `rounds` words to each live rank, in the lower half of the window, with signals,
/// barriers and packets, from a state as new.
void talk(DeviceCommunicator comm, WindowHandle window, LocalBufferHandle source,
          std::uint64_t masked, int rounds, Status* status, int* wrong) {
  const Gin gin(comm, 0);
  auto* words = reinterpret_cast<std::uint64_t*>(window.local);
  auto* mine = reinterpret_cast<std::uint64_t*>(source.local);
  const auto failed = [&](int rank) { return (masked >> rank & 1) != 0; };
  for (int r = 1; r <= rounds; ++r) {
    mine[0] = static_cast<std::uint64_t>(r * 1000 + comm.rank);
    for (int peer = 0; peer < comm.nranks; ++peer) {
      const std::uint64_t at = static_cast<std::uint64_t>(comm.rank * 2 + r % 2) * 8;
      const Status sent =
          gin.put(peer, window, at, source, 0, 8, SignalAdd{8 + comm.rank, 1}, Thread{});
      const Status want = failed(peer) ? Status::peer_failed : Status::ok;
      if (sent != want) *status = worse(*status, sent == Status::ok ? Status::invalid : sent);
    }
    *status = worse(*status, gin.flush(Thread{}));
    for (int from = 0; from < comm.nranks; ++from) {
      if (failed(from)) continue;
      *status = worse(*status, gin.wait_signal(8 + from, static_cast<std::uint64_t>(r)));
      if (words[from * 2 + r % 2] != static_cast<std::uint64_t>(r * 1000 + from)) ++*wrong;
    }
    // Exact: signals began at zero.
    *status = worse(*status, Barrier(comm, team_world(comm), 0).sync(Thread{}));
    for (int from = 0; from < comm.nranks; ++from) {
      if (!failed(from) && gin.read_signal(8 + from) != static_cast<std::uint64_t>(r)) ++*wrong;
    }
    *status = worse(*status, Barrier(comm, team_world(comm), 1).sync(Thread{}));
    if (*status != Status::ok) return;
  }
}

/// What a rank has open; made by survivors and replacements alike.
struct Things {
  Communicator comm;
  Window window;
  DeviceCommunicatorOwner device;
  Window notes;  ///< written once, by its owner
  DeviceCommunicatorOwner second;
  std::vector<std::uint64_t> memory = std::vector<std::uint64_t>(64);
  LocalBuffer source;

  Things(Communicator made, std::uint64_t bytes = kBytes) : comm(std::move(made)) {
    source = comm.register_local(memory.data(), memory.size() * 8);
    window = comm.allocate(bytes, Memory::host);
    device = comm.device_communicator(
        {.contexts = 2, .signals = kSignals, .counters = 2, .barriers = 2});
    notes = comm.allocate(4096, Memory::host);
    second = comm.device_communicator({.contexts = 1, .signals = 4, .counters = 0});
  }

  std::string talk_all(std::uint64_t masked, int rounds = 12) {
    // From the state that admit() promises; else the signals that were counted are taken off.
    Status status = Status::ok;
    int wrong = 0;
    launch(comm.place(), 1, 1, 0, talk, device.handle(), window.handle(), source.handle(), masked,
           rounds, &status, &wrong);
    if (status != Status::ok) return std::string("talk ended with ") + name(status);
    if (wrong) return to_string(wrong) + " wrong words";
    comm.check();
    return "ok";
  }
};

void wait_for_nothing(DeviceCommunicator comm, Status* out) {
  *out = Gin(comm, 0).wait_signal(0, 1, Deadline{20'000'000'000});
}

/// Waits until somebody dies, and agrees. @return the mask
std::uint64_t until_death(Things& things) {
  Status status = Status::ok;
  launch(things.comm.place(), 1, 1, 0, wait_for_nothing, things.device.handle(), &status);
  if (status != Status::peer_failed)
    throw Error(Code::internal, std::string("the wait returned ") + name(status));
  std::uint64_t mask = 0;
  const std::vector<bool> failed = things.comm.agree_failures(std::chrono::seconds(10));
  for (std::size_t r = 0; r < failed.size(); ++r)
    mask |= static_cast<std::uint64_t>(failed[r]) << r;
  return mask;
}

/// argument: path, then the ranks that die, in order: "lsa 3 0".
std::vector<int> victims(const RankContext& self, Config& config) {
  std::vector<int> list;
  std::string path = self.argument.substr(0, self.argument.find(' '));
  for (std::size_t at = path.size(); at < self.argument.size(); at += 2)
    list.push_back(self.argument[at + 1] - '0');
  RankContext other = self;
  other.argument = path;
  config = other.config();
  return list;
}

std::string check_notes(Things& things, int rank, bool fresh) {
  const auto* note = static_cast<const std::uint64_t*>(things.notes.host());
  const std::uint64_t want = fresh ? 0 : 77 + static_cast<std::uint64_t>(rank);
  return *note == want ? "ok" : "the window's own memory holds " + to_string(*note);
}

/// From the round `begin` on: somebody dies, is replaced, all talk.
std::string rounds(const RankContext& self, Things& things, const std::vector<int>& dying,
                   std::size_t begin) {
  for (std::size_t i = begin; i < dying.size(); ++i) {
    self.say("ready" + to_string(i));
    const std::uint64_t mask = until_death(things);
    if (mask != std::uint64_t{1} << dying[i]) return "agreed on mask " + to_string(mask);
    things.comm.admit(dying[i], std::chrono::seconds(20));
    std::string notes = check_notes(things, self.rank, false);
    if (notes != "ok") return notes;
    const std::string talked = things.talk_all(0);
    if (talked != "ok") return "after round " + to_string(i) + ": " + talked;
  }
  self.say("ready" + to_string(dying.size()));
  things.comm.close();
  return "ok";
}

MARROW_ROLE(admitting) {
  Config config;
  const std::vector<int> dying = victims(self, config);
  Things things(Communicator(self.id(), self.nranks, self.rank, config));
  *static_cast<std::uint64_t*>(things.notes.host()) = 77 + static_cast<std::uint64_t>(self.rank);
  const std::string talked = things.talk_all(0);
  if (talked != "ok") return talked;
  return rounds(self, things, dying, 0);
}

MARROW_ROLE(replacing) {
  Config config;
  const std::vector<int> dying = victims(self, config);
  std::size_t round = 0;
  while (dying[round] != self.rank) ++round;
  Things things(Communicator::rejoin(self.made_id(), self.nranks, self.rank, config));
  const std::string notes = check_notes(things, self.rank, true);
  if (notes != "ok") return notes;
  *static_cast<std::uint64_t*>(things.notes.host()) = 77 + static_cast<std::uint64_t>(self.rank);
  const std::string talked = things.talk_all(0);
  if (talked != "ok") return talked;
  return rounds(self, things, dying, round + 1);
}

class Admit : public testing::TestWithParam<const char*> {
 protected:
  std::string path() const { return GetParam(); }
};

TEST_P(Admit, KilledRanksAreReplacedOneAfterTheOther) {
  // A member, then the root, then the first replacement's neighbour.
  const std::vector<int> dying{3, 0, 2};
  Ranks ranks("admitting", 4, path() + " 3 0 2");
  for (std::size_t i = 0; i < dying.size(); ++i) {
    ASSERT_TRUE(ranks.all_said({0, 1, 2, 3}, "ready" + to_string(i)));
    std::this_thread::sleep_for(Milliseconds(20));
    ranks.signal(dying[i], SIGKILL);
    ranks.start("replacing", dying[i], path() + " 3 0 2");
  }
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
}

MARROW_ROLE(two_lost) {
  Things things(Communicator(self.id(), self.nranks, self.rank, self.config()));
  self.say("ready");
  std::uint64_t mask = until_death(things);
  while (mask != 0b0101) mask = until_death(things);
  // Rank 0 first; the root is rank 1 now. Rank 2 stays masked.
  things.comm.admit(0, std::chrono::seconds(20));
  std::string talked = things.talk_all(0b0100);
  if (talked != "ok") return "with one replaced: " + talked;
  things.comm.admit(2, std::chrono::seconds(20));
  talked = things.talk_all(0);
  if (talked != "ok") return "with both replaced: " + talked;
  things.comm.close();
  return "ok";
}

MARROW_ROLE(first_of_two) {
  Things things(Communicator::rejoin(self.made_id(), self.nranks, self.rank, self.config()));
  std::string talked = things.talk_all(0b0100);
  if (talked != "ok") return "with one replaced: " + talked;
  things.comm.admit(2, std::chrono::seconds(20));
  talked = things.talk_all(0);
  if (talked != "ok") return "with both replaced: " + talked;
  things.comm.close();
  return "ok";
}

MARROW_ROLE(second_of_two) {
  Things things(Communicator::rejoin(self.made_id(), self.nranks, self.rank, self.config()));
  if (!std::ranges::equal(things.comm.id().bytes(), self.made_id().bytes())) return "another id";
  const std::string talked = things.talk_all(0);
  if (talked != "ok") return talked;
  things.comm.close();
  return "ok";
}

TEST_P(Admit, TwoLostRanksAreReplacedWhileTheOtherIsStillMasked) {
  Ranks ranks("two_lost", 4, path());
  ASSERT_TRUE(ranks.all_said({0, 1, 2, 3}, "ready"));
  ranks.signal(0, SIGKILL);
  ranks.signal(2, SIGKILL);
  ranks.start("first_of_two", 0, path());
  ranks.start("second_of_two", 2, path());
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
}

/// Expects that call throws that code with those words.
template <class Call>
std::string throws(Code code, const std::string& words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == code && std::string(error.what()).find(words) != std::string::npos)
      return "ok";
    const std::string other = std::string("instead of '") + words + "': " + error.what();
    std::fprintf(stderr, "%s\n", other.c_str());  // the others may wait for this rank meanwhile
    return other;
  }
  return "no error that says '" + words + "'";
}

MARROW_ROLE(unlucky) {
  Things things(Communicator(self.id(), self.nranks, self.rank, self.config()));
  std::string result = throws(Code::invalid_argument, "has not failed",
                              [&] { things.comm.admit(2, milliseconds(100)); });
  if (result != "ok") return result;
  self.say("ready");
  if (until_death(things) != 0b100) return "agreed on the wrong mask";
  // Nobody comes: nothing has changed, the old handles work on.
  result = throws(Code::timeout, "no process came to take rank 2's place",
                  [&] { things.comm.admit(2, milliseconds(300)); });
  if (result != "ok") return result;
  std::string talked = things.talk_all(0b100);
  if (talked != "ok") return "after nobody came: " + talked;
  if (self.rank == 0) self.say("nobody");
  // One comes and dies before it has made its windows.
  result =
      throws(Code::peer_failed, "ank 2", [&] { things.comm.admit(2, std::chrono::seconds(20)); });
  if (result != "ok") return result;
  result = throws(Code::peer_failed, "an admission or a reconnect() did not finish",
                  [&] { (void)things.window.handle(); });
  if (result != "ok") return result;
  result = throws(Code::peer_failed, "", [&] { things.comm.allocate(64); });
  if (result != "ok") return result;
  (void)things.comm.agree_failures(std::chrono::seconds(10));
  talked = things.talk_all(0b100);
  if (talked != "ok") return "after one that died: " + talked;
  if (self.rank == 0) self.say("died");
  // One comes with another window size: all are told both sizes.
  result = throws(Code::mismatch,
                  "allocate(8192 bytes, Memory::host); rank 2, which is being admitted, called "
                  "allocate(4096 bytes",
                  [&] { things.comm.admit(2, std::chrono::seconds(20)); });
  if (result != "ok") return result;
  (void)things.comm.agree_failures(std::chrono::seconds(10));
  talked = things.talk_all(0b100);
  if (talked != "ok") return "after one with other sizes: " + talked;
  if (self.rank == 0) self.say("differed");
  // Ranks that name different ones cannot be: only one is masked. A good one comes at last.
  things.comm.admit(2, std::chrono::seconds(20));
  talked = things.talk_all(0);
  if (talked != "ok") return talked;
  things.comm.close();
  return "ok";
}

/// argument: path, then what is wrong with it.
MARROW_ROLE(bad_replacement) {
  RankContext plain = self;
  plain.argument = self.argument.substr(0, self.argument.find(' '));
  const std::string what = self.argument.substr(plain.argument.size() + 1);
  Config config = plain.config();
  const UniqueId id = self.made_id();
  if (what == "alive") {
    return throws(Code::mismatch, "is alive",
                  [&] { Communicator::rejoin(id, self.nranks, 1, config); });
  }
  if (what == "count") {
    return throws(Code::mismatch, "there are 3 ranks",
                  [&] { Communicator::rejoin(id, self.nranks + 1, self.rank, config); });
  }
  if (what == "stranger") {
    config.parameters["MARROW_BOOTSTRAP_TIMEOUT"] = "500ms";
    return throws(Code::timeout, "found no survivor", [&] {
      Communicator::rejoin(UniqueId::create(), self.nranks, self.rank, config);
    });
  }
  if (what == "late") {
    config.parameters["MARROW_BOOTSTRAP_TIMEOUT"] = "500ms";
    return throws(Code::timeout, "they did not all call admit(2)",
                  [&] { Communicator::rejoin(id, self.nranks, self.rank, config); });
  }
  if (what == "first") {
    return throws(Code::mismatch, "Communicator::rejoin",
                  [&] { Communicator(id, self.nranks, self.rank, config); });
  }
  Communicator comm = Communicator::rejoin(id, self.nranks, self.rank, config);
  if (what == "dying") {
    self.say("joined");
    const std::string result =
        throws(Code::invalid_argument, "is being admitted", [&] { comm.barrier(); });
    if (result != "ok") self.say("wrong", result);
    (void)kill(getpid(), SIGKILL);
  }
  return throws(Code::mismatch, "allocate(4096 bytes", [&] { Things(std::move(comm), 4096); });
}

TEST_P(Admit, WhatGoesWrongIsSaidAndSurvivorsWorkOn) {
  Ranks ranks("unlucky", 3, path());
  ASSERT_TRUE(ranks.all_said({0, 1, 2}, "ready"));
  ranks.signal(2, SIGKILL);
  if (path() == "lsa") {  // the path has no part in these
    for (const char* what : {"alive", "count", "stranger", "first"}) {
      ranks.start("bad_replacement", 2, path() + " " + what);
      EXPECT_EQ(ranks.result(2), "ok") << what;
    }
  }
  ASSERT_TRUE(ranks.all_said({0}, "nobody"));
  ranks.start("bad_replacement", 2, path() + " dying");
  ASSERT_TRUE(ranks.all_said({0}, "died"));
  EXPECT_EQ(ranks.result(2).substr(0, 8), "signal 9");
  ranks.start("bad_replacement", 2, path() + " differing");
  ASSERT_TRUE(ranks.all_said({0}, "differed"));
  EXPECT_EQ(ranks.result(2), "ok");
  ranks.start("second_of_two", 2, path());
  for (const int rank : {0, 1, 2}) EXPECT_EQ(ranks.result(rank), "ok") << "rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(Paths, Admit, testing::Values("lsa", "proxy", "gda", "mixed"),
                         [](const auto& which) { return std::string(which.param); });

}  // namespace
}  // namespace marrow::test
