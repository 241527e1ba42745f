// SPDX-License-Identifier: Apache-2.0
// Decides which WQE goes wrong and how. One counter of WQEs and one of payload WRITEs a process and
// job, so "the N-th" means the same in every run with the same traffic.
#pragma once

#include <cstdint>

#include "softnic/options.hpp"
#include "softnic/queue_machine.hpp"

namespace marrow::softnic {

class Faults {
 public:
  explicit Faults(const Options& options) : options_(options), random_(options.seed) {}

  /// Asked once for each WQE when it is first looked at.
  Fate next_wqe() {
    ++wqes_;
    if (wqes_ == options_.drop) return Fate::dropped;
    if (wqes_ == options_.error_at) return Fate::failed;
    if (wqes_ == options_.stall) return Fate::stalled;
    return Fate::normal;
  }
  /// How long this WQE waits.
  Nanoseconds delay() {
    const auto most = static_cast<std::uint64_t>(options_.delay.count());
    return most == 0 ? 0 : random_.below(most + 1) * 1000;
  }
  /// Asked once for each WRITE that carries payload.
  bool corrupts_write() { return ++writes_ == options_.corrupt; }
  /// Position of a pass over `queues` queues, and whether one of them is passed over.
  std::uint32_t first_queue(std::uint32_t queues) {
    return static_cast<std::uint32_t>(random_.below(queues));
  }
  bool skips_queue() { return options_.reorder && random_.below(4) == 0; }
  std::uint64_t pick(std::uint64_t bound) { return random_.below(bound); }

 private:
  const Options& options_;
  Random random_;
  std::uint64_t wqes_ = 0;
  std::uint64_t writes_ = 0;
};

}  // namespace marrow::softnic
