// SPDX-License-Identifier: Apache-2.0
// One rank's work of `marrow ep`: inputs, checks against plain arithmetic, and times.
#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"
#include "cli/routing.hpp"
#include "marrow/ep.hpp"

namespace marrow::cli {

/// What one rank found. Bytes are of one batch.
struct EpResult {
  std::vector<double> dispatch_us, combine_us, pair_us;  ///< a sample an iteration
  std::uint64_t choices = 0;                             ///< of this rank's tokens
  std::uint64_t dispatch_logical = 0, dispatch_wire = 0;
  std::uint64_t combine_logical = 0, combine_wire = 0;
  std::string wrong;  ///< empty: the outputs were right
};

/// Experts, top-k, tokens, hidden with the place's defaults filled in.
/// @throws UsageError when they contradict each other or the routing
EpOptions ep_defaults(EpOptions options, const Routing& routing, bool gpu);

/// Who chose what in a run without a router log: uniform, distinct.
Routing uniform_routing(std::uint64_t seed, std::uint64_t tokens, std::uint32_t experts,
                        std::uint32_t top_k);

ep::Config ep_config(const EpOptions& options, int ranks);

/// Collective. A check, then times, then checks: of the last timed batch and of other data.
EpResult run_ep_rank(Communicator& comm, const EpOptions& options, const Routing& routing);

}  // namespace marrow::cli
