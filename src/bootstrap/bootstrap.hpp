// SPDX-License-Identifier: Apache-2.0
// The ranks of one job find each other, exchange small data and file descriptors, and watch each
// other. A star of TCP or Unix connections around the lowest live rank (the root); when the root dies
// the survivors meet again at the next. One service thread per object, asleep when nothing happens.
//
// All methods may be called by any thread, collectives by one thread at a time and by all live ranks in
// the same order. Callbacks run on the service thread and must not call collectives or close().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/parameters.hpp"
#include "marrow/error.hpp"
#include "marrow/unique_id.hpp"

namespace marrow::bootstrap {

/// What this rank knows about a peer.
enum class PeerState : std::uint8_t {
  alive,
  slow,   ///< silent for a few heartbeats (stopped, link down); may come back
  failed  ///< connection closed, or silent for MARROW_PEER_TIMEOUT; final, until admit() replaces it
};
const char* name(PeerState state) noexcept;

struct Options {
  /// Bound of set-up; default MARROW_BOOTSTRAP_TIMEOUT from now.
  std::optional<base::Deadline> deadline;
  base::Parameters parameters;
  /// How long a connection may take to prove that it belongs here.
  std::chrono::milliseconds handshake_timeout{5000};
  /// For tests: called at the root each time it has told one member of an agreement.
  std::function<void()> after_decision_sent = {};
  /// Bootstrap::give_up(): join only to say this.
  std::optional<Error> gave_up = {};
  /// This process takes the place of a rank that the others agreed to have failed: the constructor
  /// pairs with their admit().
  bool replacement = false;
};

class Bootstrap {
 public:
  /// Collective of all ranks. Throws the same Error on every rank that can be told:
  ///   mismatch          rank counts differ, one rank number twice, rank out of range
  ///   timeout           a rank never came; the sentence lists the missing
  ///   authentication    this rank's id has another secret
  ///   version           ranks run different versions
  ///   peer_failed       a rank died during set-up
  ///   invalid_argument  nranks < 1, or a damaged id
  Bootstrap(const UniqueId& id, int nranks, int rank, Options options = {});

  /// For a rank that cannot even start: tells the others, as long as they are still setting up, so that
  /// none waits for it. They throw the error's code and sentence with the rank. Takes 2 s at most.
  static void give_up(const UniqueId& id, int nranks, int rank, const Error& error) noexcept;

  /// Without a close() before it, the others see this rank as failed.
  ~Bootstrap();
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  int rank() const noexcept;
  int nranks() const noexcept;

  // Collectives. Default deadline: MARROW_BOOTSTRAP_TIMEOUT from the call. They throw
  //   peer_failed  a peer died that agree_failures() has not masked yet; never a hang
  //   mismatch     ranks called different collectives at this point; every later call says so again
  //   timeout      lists the ranks that did not call
  //   aborted      revoked, or the others declared this rank failed
  // Masked ranks take no part.
  using MaybeDeadline = std::optional<base::Deadline>;

  /// Every rank's bytes (sizes may differ; at most 256 MiB in sum), by rank; empty for masked ranks.
  std::vector<std::vector<std::byte>> allgather(std::span<const std::byte> mine,
                                                MaybeDeadline deadline = {});
  void barrier(MaybeDeadline deadline = {});
  /// Bytes of `root`, whose `mine` counts; that of others is ignored.
  std::vector<std::byte> broadcast(int root, std::span<const std::byte> mine,
                                   MaybeDeadline deadline = {});
  /// Copies of every same-host peer's descriptors, in their order; empty for peers elsewhere and for
  /// masked ranks; own entry: duplicates. Descriptors are close-on-exec.
  std::vector<std::vector<base::Fd>> exchange_fds(std::span<const int> mine,
                                                  MaybeDeadline deadline = {});

  /// Collective of the survivors: all return the same mask (true: failed), also when another rank
  /// dies meanwhile. Afterwards collectives run among the unmasked. Throws timeout (listing who did
  /// not call; calling again continues) or aborted.
  std::vector<bool> agree_failures(MaybeDeadline deadline = {});

  /// Collective of the survivors and of the process that takes `rank`'s place, which meanwhile
  /// constructs its Bootstrap with Options::replacement. Afterwards `rank` is alive and unmasked
  /// everywhere, and collectives run among all of them. It is looked for by the Unix sockets of all ranks
  /// of its host, and at rank 0's address: on a host without survivors, rank 0 must live. Throws
  ///   invalid_argument  `rank` is alive, this rank, or failed but not masked by agree_failures()
  ///   mismatch          survivors name different ranks
  ///   timeout           naming the survivors that did not call, or that no replacement came;
  ///                     nothing has changed then
  ///   peer_failed       another rank died
  void admit(int rank, MaybeDeadline deadline = {});

  /// Last collective; afterwards connections are gone and no peer counts as failed for it. Tears down
  /// even when it throws. Calling it twice does nothing.
  void close(MaybeDeadline deadline = {});

  /// Leaves without the others: they see this rank as failed, with that sentence. Not collective.
  void abandon(const std::string& sentence);

  // Liveness.
  PeerState state(int peer) const;
  /// Why, in a sentence; empty for a peer that is alive.
  std::string state_sentence(int peer) const;
  /// Ranks masked by agree_failures() so far.
  std::vector<bool> mask() const;
  /// Called at each change of a peer's state, and at once for peers that are not alive now. With
  /// peer == rank(): the others declared this rank failed. An empty function ends it; no call is
  /// running once on_change returns.
  using OnChange = std::function<void(int peer, PeerState state, const std::string& sentence)>;
  void on_change(OnChange callback);

  /// Tells all ranks to give up, with the reason. Collectives but agree_failures() and close() throw
  /// aborted from then on, everywhere. The first revoke counts.
  void revoke(const std::string& sentence);
  /// The reason, once revoked.
  std::optional<std::string> revoked() const;
  /// Called once, when some rank (`by`) revoked; like on_change.
  using OnRevoke = std::function<void(int by, const std::string& sentence)>;
  void on_revoke(OnRevoke callback);

  // Where the peers are. Valid for all ranks from the end of the constructor on; admit() changes them.
  std::uint64_t host_id(int peer) const;
  std::uint64_t process_id(int peer) const;  ///< unique per process, not a pid
  std::int64_t pid(int peer) const;          ///< in the peer's own PID namespace, for messages
  std::string host_name(int peer) const;
  bool same_host(int peer) const;  ///< descriptors can be passed
  bool same_process(int peer) const;
  /// The present centre of the star.
  int root() const;

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

}  // namespace marrow::bootstrap
