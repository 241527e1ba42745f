// SPDX-License-Identifier: Apache-2.0
#include "softnic/far_memory.hpp"

#include <algorithm>
#include <mutex>

namespace marrow::softnic {

bool FarMemory::note(const void* base, std::size_t bytes) {
  if (!is_far(base)) return false;
  const std::unique_lock lock(mutex_);
  Range& range = ranges_[reinterpret_cast<std::uintptr_t>(base)];
  range.bytes = std::max(range.bytes, bytes);
  ++range.notes;
  return true;
}

void FarMemory::forget(const void* base) {
  const std::unique_lock lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(base));
  if (found != ranges_.end() && --found->second.notes == 0) ranges_.erase(found);
}

bool FarMemory::covers(const void* at) const {
  const std::shared_lock lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  // Ranges may overlap: a ring inside a window. The nearest few starts before it decide.
  for (auto after = ranges_.upper_bound(address); after != ranges_.begin();) {
    --after;
    if (address - after->first < after->second.bytes) return true;
  }
  return false;
}

}  // namespace marrow::softnic
