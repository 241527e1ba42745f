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

class Regions {
 public:
  explicit Regions(Directory& directory);
  ~Regions();

  /// Registers [base, base + length) under a new key. @return the key (lkey = rkey), 0 if full
  std::uint32_t add(std::byte* base, std::uint64_t length, std::uint64_t iova, std::uint32_t access,
                    std::uint32_t pd);
  /// Makes the key stale everywhere. After the return no engine of this process uses the memory.
  void remove(std::uint32_t key);

  /// Tells which descriptor stands behind memory (verbs::Table::expose_memory). @return 0 or errno
  int expose(std::byte* base, std::uint64_t bytes, int fd, std::uint64_t offset);
  int withdraw(std::byte* base);

  /// A region of this process; null if the key names none. Valid until the next change.
  const Region* local(std::uint32_t key) const;
  /// A region of any process of the job; null if the key is stale or cannot be mapped here.
  const Region* remote(std::uint32_t key);
  /// Unmaps regions whose owner took them back. Called now and then by the engine.
  void drop_stale();

 private:
  struct Exposure {
    std::uint64_t bytes;
    std::uint64_t offset;
    std::uint64_t device;
    std::uint64_t inode;
    base::Fd fd;
  };
  struct Entry : Region {
    base::Mapping mapping;               ///< of another process's region
    std::shared_ptr<Exposure> exposure;  ///< of an own region: keeps the descriptor open
  };
  bool current(const Entry& entry) const;
  const Region* map_remote(std::uint32_t key, RegionSlot& slot);

  Directory& directory_;
  std::vector<std::unique_ptr<Entry>> entries_;  ///< by slot
  std::map<std::byte*, std::shared_ptr<Exposure>> exposures_;
};

}  // namespace marrow::softnic
