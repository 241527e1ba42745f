// SPDX-License-Identifier: Apache-2.0
#include "memory/host_pages.hpp"

#include <algorithm>

namespace marrow::memory {

HostPages::Pieces::iterator HostPages::first_past(std::uintptr_t address) {
  auto at = pieces_.upper_bound(address);
  if (at != pieces_.begin() && std::prev(at)->second.end > address) --at;
  return at;
}

HostPages::Outcome HostPages::hold(std::uintptr_t first, std::uintptr_t end, const Register& enroll,
                                   const Unregister& withdraw, const Registered& is_registered) {
  std::lock_guard lock(mutex_);
  bool registered = false, refused = false;
  std::uintptr_t at = first;
  try {
    while (at < end && !refused) {
      auto piece = first_past(at);
      if (piece != pieces_.end() && piece->first <= at) {
        ++piece->second.holders;
        at = piece->second.end;
        registered = true;
        continue;
      }
      const std::uintptr_t stop = piece == pieces_.end() ? end : std::min(end, piece->first);
      if (enroll(at, stop)) {
        pieces_[at] = {stop, 1};
        at = stop;
        registered = true;
      } else {
        refused = true;
      }
    }
  } catch (...) {
    drop_locked(first, at, withdraw);
    throw;
  }
  if (!refused) return Outcome::held;
  drop_locked(first, at, withdraw);
  // A refusal says that some page is taken, not that all are.
  return registered || !is_registered(first, end) ? Outcome::mixed : Outcome::foreign;
}

void HostPages::drop(std::uintptr_t first, std::uintptr_t end, const Unregister& withdraw) {
  std::lock_guard lock(mutex_);
  drop_locked(first, end, withdraw);
}

void HostPages::drop_locked(std::uintptr_t first, std::uintptr_t end, const Unregister& withdraw) {
  if (first >= end) return;
  for (auto piece = first_past(first); piece != pieces_.end() && piece->first < end;) {
    if (--piece->second.holders == 0) {
      withdraw(piece->first);
      piece = pieces_.erase(piece);
    } else {
      ++piece;
    }
  }
}

std::size_t HostPages::pieces() const {
  std::lock_guard lock(mutex_);
  return pieces_.size();
}

}  // namespace marrow::memory
