// SPDX-License-Identifier: Apache-2.0
// Who sends which row where: plain arithmetic that every rank can do for every other, so that the check knows
// what must have arrived without asking anybody.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/routing.hpp"

namespace marrow::cli {

/// Tokens are dealt to ranks in contiguous chunks, experts in blocks; the first ranks get one more when it is uneven.
struct Layout {
  int ranks = 1;
  std::uint64_t tokens = 0;
  std::uint32_t experts = 0;

  std::uint64_t first_token(int rank) const { return first(tokens, rank); }
  std::uint64_t local_tokens(int rank) const {
    return first(tokens, rank + 1) - first(tokens, rank);
  }
  int owner(std::uint32_t expert) const;

 private:
  std::uint64_t first(std::uint64_t total, int rank) const {
    const auto n = static_cast<std::uint64_t>(ranks), r = static_cast<std::uint64_t>(rank);
    return r * (total / n) + (r < total % n ? r : total % n);
  }
};

/// One row: a token on its way to one of its experts.
struct PlannedRow {
  std::uint64_t token;  ///< of the whole file
  std::uint32_t expert;
};

/// What one rank sends in one wave.
struct WavePlan {
  std::uint64_t first_token = 0;  ///< of the whole file
  std::uint32_t tokens = 0;
  std::vector<std::vector<PlannedRow>> rows;  ///< [destination][slot]
  std::vector<std::uint32_t> slot;  ///< [token of the wave][top_k] destination * cap + slot
};

WavePlan plan_wave(const Routing& routing, const Layout& layout, int source, std::uint32_t wave,
                   std::uint32_t wave_tokens, std::uint32_t cap);

}  // namespace marrow::cli
