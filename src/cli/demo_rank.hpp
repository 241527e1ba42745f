// SPDX-License-Identifier: Apache-2.0
// One rank of the demo over one path: memory, waves, and the check of every element.
#pragma once

#include <functional>
#include <string>

#include "cli/demo_plan.hpp"
#include "cli/run_kernel.hpp"

namespace marrow::cli {

struct DemoJob {
  const Routing& routing;
  Layout layout;
  std::uint32_t hidden = 128;
  std::uint64_t seed = 1;
  bool corrupt = false;
};

/// What one rank found and measured.
struct RankReport {
  std::uint64_t wrong = 0;    ///< elements
  std::string first_wrong;    ///< names the first wrong element; empty: all right
  std::uint64_t checked = 0;  ///< elements compared
  std::uint64_t rows = 0;     ///< rows sent
  double exchange_us = 0;     ///< dispatch + expert + combine, all waves, on this rank's device
};

/// Tokens a rank sends in a wave, so that its window stays near 16 MiB.
std::uint32_t wave_tokens(const DemoJob& job);
std::uint32_t waves(const DemoJob& job);

/// Collective. @param progress  called once a wave
RankReport exchange(Communicator& comm, const DemoJob& job,
                    const std::function<void(std::uint32_t wave)>& progress);

}  // namespace marrow::cli
