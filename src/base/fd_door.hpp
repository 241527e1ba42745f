// SPDX-License-Identifier: Apache-2.0
// A listening socket at which processes of this host pass descriptors (unix_fds.hpp). Whoever has not said
// all of its first message is waited for together with all others: somebody who connects and stays silent,
// or stops half way, holds nobody up.
#pragma once

#include <cstddef>
#include <list>
#include <optional>
#include <utility>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/unix_fds.hpp"

namespace marrow::base {

class FdDoor {
 public:
  /// Who came, and the first message, whole.
  struct Arrival {
    Fd socket;
    FdMessage message;
  };

  /// @param listener  of unix_listen
  /// @param most      how many may be silent at a time; the one that came first makes room for a new one
  FdDoor(Fd listener, std::size_t most) : listener_(std::move(listener)), most_(most) {}

  /// The next to have said its first message; nothing at the deadline. Who closes first or sends anything
  /// else is dropped and logged (INFO). Throws Error(out_of_memory, system).
  std::optional<Arrival> next(Deadline deadline);

 private:
  struct Silent {
    Fd socket;
    FdReceiver receiver;
  };

  Fd listener_;
  std::size_t most_;
  std::list<Silent> silent_;  ///< the oldest first
};

}  // namespace marrow::base
