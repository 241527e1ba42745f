// SPDX-License-Identifier: Apache-2.0
#include "cli/routing.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "cli/text.hpp"

namespace marrow::cli {

Routing generate_routing(std::uint64_t seed, std::uint64_t tokens, std::uint32_t experts,
                         std::uint32_t top_k) {
  Routing routing;
  routing.experts = experts;
  routing.top_k = top_k;
  routing.id.reserve(tokens * top_k);
  routing.weight.reserve(tokens * top_k);
  routing.source = format("generated, seed %llu", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<std::uint32_t> by_popularity(experts);
  for (std::uint32_t e = 0; e < experts; ++e) by_popularity[e] = e;
  for (std::uint32_t e = experts; e > 1; --e)
    std::swap(by_popularity[e - 1], by_popularity[random() % e]);
  std::vector<double> cumulative;
  double sum = 0;
  for (std::uint32_t e = 0; e < experts; ++e) cumulative.push_back(sum += std::pow(e + 1.0, -0.8));

  const std::uint64_t warm_up = tokens / 16;
  std::vector<std::uint32_t> chosen;
  for (std::uint64_t t = 0; t < tokens; ++t) {
    chosen.clear();
    while (chosen.size() < top_k) {
      std::uint32_t expert =
          static_cast<std::uint32_t>(chosen.size());  // warm-up: experts 0 .. top_k-1
      if (t >= warm_up) {
        const double at = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
        const auto found =
            std::lower_bound(cumulative.begin(), cumulative.end(), at) - cumulative.begin();
        expert = by_popularity[std::min<std::size_t>(static_cast<std::size_t>(found), experts - 1)];
        if (std::find(chosen.begin(), chosen.end(), expert) != chosen.end()) continue;
      }
      chosen.push_back(expert);
    }
    // Weights fall from the first to the last choice and sum to about 1.
    float left = 1.0f;
    for (std::uint32_t k = 0; k < top_k; ++k) {
      const float weight =
          k + 1 == top_k ? left
                         : left * (t < warm_up ? 1.0f / static_cast<float>(top_k - k) : 0.35f);
      routing.id.push_back(chosen[k]);
      routing.weight.push_back(weight);
      left -= weight;
    }
  }
  return routing;
}

}  // namespace marrow::cli
