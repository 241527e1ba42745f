// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: a test starts this binary again in a role, once a rank, and talks to the ranks
// through small files in a folder of their own. Nothing outlives the test: children die with it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "marrow/marrow.hpp"

namespace marrow::test {

using Milliseconds = std::chrono::milliseconds;

/// What a role gets. Its return value becomes the rank's result ("ok" or a sentence).
struct RankContext {
  int rank = 0;
  int nranks = 0;
  std::string folder;
  std::string argument;  ///< what the test passed, e.g. the path

  /// The id of communicator `name`: made by rank 0, read by the others.
  UniqueId id(const std::string& name = "id") const;
  /// The same, read by every rank.
  UniqueId made_id(const std::string& name = "id") const;
  /// Tells the test, or another rank, that something has happened.
  void say(const std::string& what, const std::string& text = "") const;
  /// Waits until `who` has said it; returns the text. @throws Error(timeout)
  std::string hear(int who, const std::string& what,
                   Milliseconds deadline = Milliseconds(20000)) const;
  /// A configuration with that path to all peers; "mixed": lsa within teams of two, gda between them.
  Config config() const;
};
using Role = std::string (*)(const RankContext&);

/// The processes of one test.
class Ranks {
 public:
  /// @param role  a name registered with MARROW_ROLE
  Ranks(const std::string& role, int nranks, const std::string& argument = "",
        const std::map<std::string, std::string>& environment = {});
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void signal(int rank, int number);
  /// Starts a process as `rank`, in place of the one before, which must have ended (or is killed).
  void start(const std::string& role, int rank, const std::string& argument);
  /// Waits until every listed rank has said it.
  bool all_said(const std::vector<int>& ranks, const std::string& what,
                Milliseconds deadline = Milliseconds(20000));
  /// The rank's result, or what happened to it.
  std::string result(int rank, Milliseconds deadline = Milliseconds(30000));
  const RankContext& context() const { return context_; }

 private:
  RankContext context_;
  std::vector<pid_t> children_;
  std::map<std::string, std::string> environment_;
};

struct RoleEntry {
  RoleEntry(const char* name, Role role);
};
/// Defines a role: MARROW_ROLE(name) { ... return "ok"; } with `self` as its RankContext.
#define MARROW_ROLE(name)                                                \
  std::string role_##name(const ::marrow::test::RankContext&);           \
  const ::marrow::test::RoleEntry role_entry_##name(#name, role_##name); \
  std::string role_##name([[maybe_unused]] const ::marrow::test::RankContext& self)

/// CLOCK_MONOTONIC, the same in all processes of a host.
std::int64_t monotonic_ns();

}  // namespace marrow::test
