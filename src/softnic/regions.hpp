// SPDX-License-Identifier: Apache-2.0
// Memory that keys name. A region registered here points at this process's memory; a region of
// another process is mapped from its descriptor when a key is first used. Nothing here locks: the
// control path and the engine take turns under the job's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "softnic/directory.hpp"
#include "softnic/region.hpp"

namespace marrow::softnic {

/// Protection domain of regions that engines use among themselves; alloc_pd never gives it out.
inline constexpr std::uint32_t kNoPd = 0xffffffffu;

class Regions {
 public:
  explicit Regions(Directory& directory);
  ~Regions();

  /// Registers [base, base + length) under a new key. @return the key (lkey = rkey), 0 if full
  std::uint32_t add(std::byte* base, std::uint64_t length, std::uint64_t iova, std::uint32_t access,
                    std::uint32_t pd);
  /// Makes the key stale everywhere. After the return no engine of this process uses the memory.
  void remove(std::uint32_t key);

  /// From now on regions may be GPU memory: add() asks CUDA.
  void expect_gpu_memory() { gpu_memory_ = true; }

  /// Somebody who keeps tables of his own of what keys mean (the GPU engines).
  class Watcher {
   public:
    virtual ~Watcher() = default;
    /// A region of this process is new.
    virtual void entered(const Region& region) = 0;
    /// The key becomes stale: when this returns, the watcher's engine does not use it any more.
    virtual void revoked(std::uint32_t key) noexcept = 0;
  };
  /// Maps the file that a region of another process lies in. Invalid if it cannot be opened.
  /// @param start  set: the mapping's first byte in the file
  base::Mapping map_file(std::uint32_t process, int number, const RegionSlot& slot,
                         std::uint64_t& start) const;

  /// Tells the watcher of every region of this process that exists or comes.
  void watch(Watcher& watcher);
  void unwatch(Watcher& watcher);

  /// Descriptor of the GPU memory that a region of this process lies in; -1 if there is none.
  int descriptor(std::uint32_t key) const;

  /// Tells which descriptor stands behind memory (verbs::Table::expose_memory). A CUDA descriptor stands
  /// behind GPU memory. @return 0 or errno
  int expose(std::byte* base, std::uint64_t bytes, int fd, std::uint64_t offset);
  int withdraw(std::byte* base);

  /// A region of this process; null if the key names none. Valid until the next change.
  const Region* local(std::uint32_t key) const;
  /// A region of any process of the job; null if the key is stale or cannot be mapped here.
  const Region* remote(std::uint32_t key);
  /// True for a region of another process that has no descriptor: only its owner can touch it.
  bool only_owner_reaches(std::uint32_t key) const;
  /// Unmaps regions whose owner took them back. Called now and then by the engine.
  void drop_stale();

 private:
  struct Exposure {
    std::uint64_t bytes;
    std::uint64_t offset;
    std::uint64_t device;
    std::uint64_t inode;
    base::Fd fd;
    bool gpu_memory;
  };
  struct Entry : Region {
    base::Mapping mapping;               ///< of another process's region
    std::shared_ptr<Exposure> exposure;  ///< of an own region: keeps the descriptor open
  };
  bool current(const Entry& entry) const;
  const Region* map_remote(std::uint32_t key, RegionSlot& slot);
  static void describe_gpu_memory(RegionSlot& slot, const std::byte* base);

  Directory& directory_;
  std::vector<std::unique_ptr<Entry>> entries_;  ///< by slot
  std::map<std::byte*, std::shared_ptr<Exposure>> exposures_;
  std::vector<Watcher*> watchers_;
  bool gpu_memory_ = false;
};

}  // namespace marrow::softnic
