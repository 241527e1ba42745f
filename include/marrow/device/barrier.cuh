// SPDX-License-Identifier: Apache-2.0
// Barrier of a team, over whatever path each member takes: every member adds 1 to its own word at
// every other and waits until each member's word here has reached its epoch. One word a source: with
// one shared count a fast rank's next arrival would stand in for a slow rank's missing one.
#pragma once

#include "marrow/device/gin.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// What a barrier says about data. none: nothing. put: puts, values and adds of all members on the
/// named contexts that happened before are visible after. get: their gets are complete.
enum class Fence : std::uint8_t { none, put, get };

/// Contexts first .. first + count - 1.
struct Contexts {
  int first = 0;
  int count = 1;
  static MARROW_DEVICE Contexts all(const DeviceCommunicator& comm) { return {0, comm.contexts}; }
};

class Barrier {
 public:
  /// @param team  who takes part; ranks the survivors agreed to have failed are left out
  /// @param slot  0 .. barriers-1; one group at a time uses a slot
  MARROW_DEVICE Barrier(const DeviceCommunicator& comm, Team team, Index slot)
      : comm_(comm), team_(team), slot_(slot) {}

  /// Every member's group calls this; returns when all have arrived.
  /// @param contexts  whose operations the fence covers
  /// @return ok, timeout, peer_failed, aborted, invalid. After timeout and peer_failed the slot stays in
  ///         step as long as every member makes the same number of calls: an arrival that was not sent,
  ///         because the fence failed or the queue was full, is sent with that member's next call.
  template <class Coop>
  MARROW_DEVICE Status sync(const Coop& coop, Contexts contexts = {}, Fence fence = Fence::put,
                            Deadline deadline = {}) const {
    const Gin<> gin(comm_, contexts.first);
    Status status = gin.check_id(slot_, comm_.barriers, CheckedWhat::barrier, "Barrier");
    if (status != Status::ok) return status;
    coop.sync();  // what the group did before happens before every arrival below
    if (fence != Fence::none) status = check_contexts(contexts);
    if (fence != Fence::none && status == Status::ok) {
      for (int c = contexts.first; c < contexts.first + contexts.count; ++c) {
        const Gin<> one(comm_, c);
        // Over load/store alone the strong arrival covers the first context, at every rank. A NIC's or a
        // thread's data would be ordered at its own destination only, so there, and for the other
        // contexts and gets, it is completed here.
        if (fence == Fence::get) {
          status = worse(status, one.flush(coop, deadline));
        } else if (c != contexts.first || comm_.connected != 1u << static_cast<int>(Path::lsa)) {
          status = worse(status, one.flush_remote(coop, deadline));
        }
        if (status == Status::timeout)
          deadline.ns = 1;  // the time is used up: the rest gets one look
      }
    }
    const bool alone = comm_.sharing == Sharing::thread;
    const int step = alone ? 1 : coop.size();
    const int begin = alone ? (coop.rank() == 0 ? 0 : team_.size) : coop.rank();
    if (status != Status::ok) {
      // Nobody may take our data for visible: no arrival. The call counts all the same.
      for (int i = begin; i < team_.size; i += step) ++epoch(i);
      return coop.agree(status);
    }
    for (int i = begin; i < team_.size; i += step)
      status = worse(status, arrive(gin, i, fence, deadline));
    for (int i = begin; i < team_.size; i += step) {
      if (status == Status::timeout) deadline.ns = 1;
      status = worse(status, await(gin, i, deadline));
    }
    return coop.agree(status);
  }

  /// After a sync that returned timeout: a member (its number in the team) whose arrival has not come,
  /// or -1. For reports; any thread that synchronised with the group.
  MARROW_DEVICE int late() const {
    const Gin<> gin(comm_, 0);
    for (int i = 0; i < team_.size; ++i) {
      const int peer = team_.world_rank(i);
      if (peer == comm_.rank || load_cached(comm_.path + peer) == kPathFailed) continue;
      if (static_cast<std::int64_t>(gin.raw_signal(word(peer)) - epoch(i)) < 0) return i;
    }
    return -1;
  }

 private:
  MARROW_DEVICE Status check_contexts(const Contexts& contexts) const {
    if (contexts.count < 1) {
      return detail::violation(comm_, slot_, "Barrier", CheckedWhat::size,
                               static_cast<std::uint64_t>(contexts.count), 1);
    }
    if (contexts.first >= 0 && contexts.first <= comm_.contexts - contexts.count) return Status::ok;
    const int bad = contexts.first < 0 ? contexts.first : contexts.first + contexts.count - 1;
    return detail::violation(comm_, slot_, "Barrier", CheckedWhat::context,
                             static_cast<std::uint64_t>(bad),
                             static_cast<std::uint64_t>(comm_.contexts));
  }

  MARROW_DEVICE int word(int source) const {
    return comm_.signals + slot_.value * comm_.nranks + source;
  }
  /// How often member `index` has been waited for: the number of calls.
  MARROW_DEVICE std::uint64_t& epoch(int index) const {
    return comm_.signal_shadow[word(team_.world_rank(index))];
  }
  /// How many arrivals that member was sent. (Barrier words are never reset, so their baseline is free.)
  MARROW_DEVICE std::uint64_t& sent(int index) const {
    return comm_.signal_base[word(team_.world_rank(index))];
  }

  MARROW_DEVICE Status arrive(const Gin<>& gin, int index, Fence fence, Deadline deadline) const {
    const int peer = team_.world_rank(index);
    if (peer == comm_.rank) return Status::ok;
    const std::uint64_t due = epoch(index) + 1;  // loaded together with the path below
    const std::uint64_t owed = due - sent(index);
    int rank = 0;
    Path path = Path::lsa;
    Status status = gin.resolve(peer, team_world(comm_), "Barrier", &rank, &path);
    if (status != Status::ok) return status == Status::peer_failed ? Status::ok : status;
    const detail::Then then{&comm_.sync[static_cast<int>(path)],
                            static_cast<std::uint64_t>(word(comm_.rank)) * 8, owed,
                            fence == Fence::put};
    detail::Knobs knobs;
    knobs.deadline = deadline;
    status = gin.post_then(peer, path, then, path, knobs, Thread{},
                           [&](auto body, const detail::Then& own, const auto&) {
                             return body.add(comm_, gin.context_, peer, own, knobs);
                           });
    if (status == Status::ok) sent(index) = due;
    return status;
  }

  MARROW_DEVICE Status await(const Gin<>& gin, int index, Deadline deadline) const {
    const int peer = team_.world_rank(index);
    if (peer == comm_.rank || load_cached(comm_.path + peer) == kPathFailed) return Status::ok;
    const int mine = word(peer);
    const std::uint64_t wanted = ++epoch(index);
    return wait_until(
        comm_, deadline,
        [&] { return static_cast<std::int64_t>(gin.raw_signal(mine) - wanted) >= 0; }, peer);
  }

  const DeviceCommunicator& comm_;
  Team team_;
  Index slot_;
};

}  // namespace cpu_device / gpu_device
}  // namespace marrow
