// SPDX-License-Identifier: Apache-2.0
#include "cli/demo_plan.hpp"

#include <algorithm>

namespace marrow::cli {

int Layout::owner(std::uint32_t expert) const {
  const auto n = static_cast<std::uint32_t>(ranks);
  const std::uint32_t each = experts / n;
  const std::uint32_t larger = experts % n * (each + 1);  // experts of the ranks that have one more
  return static_cast<int>(expert < larger ? expert / (each + 1)
                                          : experts % n + (expert - larger) / each);
}

WavePlan plan_wave(const Routing& routing, const Layout& layout, int source, std::uint32_t wave,
                   std::uint32_t wave_tokens, std::uint32_t cap) {
  WavePlan plan;
  const std::uint64_t done = std::uint64_t{wave} * wave_tokens;
  const std::uint64_t local = layout.local_tokens(source);
  plan.first_token = layout.first_token(source) + std::min(done, local);
  plan.tokens = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(wave_tokens, local - std::min(done, local)));
  plan.rows.resize(static_cast<std::size_t>(layout.ranks));
  for (std::uint32_t t = 0; t < plan.tokens; ++t) {
    for (std::uint32_t k = 0; k < routing.top_k; ++k) {
      const std::uint64_t token = plan.first_token + t;
      const std::uint32_t expert = routing.id[token * routing.top_k + k];
      const auto destination = static_cast<std::size_t>(layout.owner(expert));
      plan.slot.push_back(static_cast<std::uint32_t>(destination) * cap +
                          static_cast<std::uint32_t>(plan.rows[destination].size()));
      plan.rows[destination].push_back({token, expert});
    }
  }
  return plan;
}

}  // namespace marrow::cli
