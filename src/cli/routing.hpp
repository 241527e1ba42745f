// SPDX-License-Identifier: Apache-2.0
// Which experts each token goes to: a router log in vLLM's JSON-lines form, or a seeded generator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace marrow::cli {

struct Routing {
  std::uint32_t experts = 0;
  std::uint32_t top_k = 0;
  std::vector<std::uint32_t> id;  ///< [tokens][top_k], distinct in a token
  std::vector<float> weight;      ///< [tokens][top_k]
  std::string source;             ///< one line for the heading

  std::uint64_t tokens() const { return top_k ? id.size() / top_k : 0; }
};

/// Reads {"type": "meta", "num_experts", "top_k"} and then {"type": "route", "topk_ids", "topk_weights"} lines; other
/// types are passed over.
/// @param limit  tokens to keep; 0: all
/// @throws Error(invalid_argument) with file, line number and what is wrong; Error(unsupported) in a
///         build without nlohmann-json
Routing read_routing(const std::string& path, std::uint64_t limit);

/// Skewed as real routers are: expert popularity falls like 1/rank^0.8, and the first 1/16 of the tokens are one
/// token repeated (warm-up), the worst case.
Routing generate_routing(std::uint64_t seed, std::uint64_t tokens, std::uint32_t experts,
                         std::uint32_t top_k);

}  // namespace marrow::cli
