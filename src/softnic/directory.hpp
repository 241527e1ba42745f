// SPDX-License-Identifier: Apache-2.0
// A process's membership in a job's shared directory. The directory is a file in /dev/shm, mode 0600;
// each member holds a shared flock on it, which the kernel drops when the process dies in any way, so
// "nobody holds a lock" means "left over": the last one out removes the file, and every join first
// removes left-over files of this user.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "softnic/queues.hpp"
#include "softnic/shared_layout.hpp"

namespace marrow::softnic {

class Directory {
 public:
  /// Joins or makes the directory of `job` (1..64 of [A-Za-z0-9_-]).
  /// @throws Error  invalid_argument (job name), authentication (file of another user or mode),
  ///                version, out_of_memory (all process slots taken), timeout, system
  explicit Directory(const std::string& job);
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  SharedDirectory& shared() const { return *shared_; }
  /// This process's slot number.
  std::uint32_t self() const { return self_; }

  /// Takes a free QP slot and gives it its number; the slot's name is still kClaimed.
  /// @return null when all are taken
  QpSlot* claim_qp(std::uint32_t& qpn);
  RegionSlot* claim_region(std::uint32_t& key);
  /// The slot a number points to, whatever its name is now.
  QpSlot& qp_slot(std::uint32_t qpn) const {
    return shared_->queue_pairs[qpn & (kMaxQueuePairs - 1)];
  }
  /// Null if the key cannot be one.
  RegionSlot* region_slot(std::uint32_t key) const {
    const std::uint32_t slot = key >> 8;
    return slot < kFirstRegion || slot >= kMaxRegions ? nullptr : &shared_->regions[slot];
  }

  /// False once the process in `slot` has left or died; asked at most every 10 ms of the kernel.
  bool alive(std::uint32_t slot);
  /// A new descriptor of file `fd` of the process in `slot`, or an invalid one.
  base::Fd open_descriptor_of(std::uint32_t slot, int fd) const;

 private:
  bool try_join(const std::string& name, bool last_try);
  void take_process_slot();
  void clear_after(std::uint32_t slot);

  std::string name_;
  base::Fd file_;
  base::Mapping mapping_;
  SharedDirectory* shared_ = nullptr;
  std::uint32_t self_ = 0;
  struct Liveness {
    std::chrono::steady_clock::time_point asked{};
    std::uint64_t start_time = 0;
    bool alive = false;
  };
  std::vector<Liveness> liveness_;
};

/// What the directory says of the queue pair that `qp` is connected to.
PeerFacts peer_facts(Directory& directory, const QueuePair& qp);

/// Holds a robust process-shared mutex; a dead owner's lock is taken over.
class SharedLock {
 public:
  explicit SharedLock(pthread_mutex_t& mutex);
  ~SharedLock() { ::pthread_mutex_unlock(&mutex_); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

}  // namespace marrow::softnic
