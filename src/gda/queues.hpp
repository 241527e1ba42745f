// SPDX-License-Identifier: Apache-2.0
// The gda path's host side, part 2: the queue pairs of one device communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "marrow/abi/gda_queue.h"
#include "marrow/error.hpp"

namespace marrow::gda {

/// A queue that a kernel found in error.
struct QueueError {
  int peer = 0;
  int context = 0;
  std::uint8_t syndrome = 0;  ///< mlx5::Syndrome
  Code code = Code::network;  ///< peer_failed, or network for an operation the NIC refused
  std::string sentence;       ///< names peer, context, operation and syndrome
  std::string next_step;
};

class Queues {
 public:
  virtual ~Queues() = default;
  Queues() = default;
  Queues(const Queues&) = delete;
  Queues& operator=(const Queues&) = delete;

  /// For DeviceCommunicator::gda.
  virtual const GdaDevice* device() const = 0;

  /// Every failure recorded so far, of peers that are not masked; cheap when there is none.
  virtual std::vector<QueueError> errors() const = 0;

  /// The survivors agreed that this rank failed: its queues go to the error state, so that nothing
  /// outstanding touches memory later, and errors() leaves it out. Never throws.
  virtual void mask_peer(int rank) noexcept = 0;

  /// Releases per put, for `marrow info`: "system: a CPU thread executes the queues".
  virtual std::string release_scope() const = 0;
};

}  // namespace marrow::gda
