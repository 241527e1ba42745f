// SPDX-License-Identifier: Apache-2.0
// Which path each pair of ranks takes: pure arithmetic over facts that every rank has, so every rank
// computes the same plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marrow/abi/device_communicator.h"

namespace marrow::core {

/// What a rank tells the others about itself. Trivially copyable.
struct RankFacts {
  std::uint64_t host = 0;  ///< equal on ranks of one host
  std::uint8_t on_gpu = 0;
  std::int32_t device = 0;
  std::int64_t lsa_limit = 0;     ///< MARROW_LSA_SIZE; 0: no limit
  std::uint8_t gda_usable = 0;    ///< this rank opened a NIC
  std::uint8_t gda_emulated = 0;  ///< it is softnic, which reaches one host
  std::uint8_t proxy_usable = 0;
};

/// What MARROW_PATH asks for one peer.
enum class Wish : std::uint8_t { automatic, lsa, gda, proxy };

/// Parses MARROW_PATH for a job of nranks: "auto", one path, or a list with one entry a rank.
/// @throws Error(invalid_argument) naming the entry
std::vector<Wish> parse_wishes(const std::string& text, int nranks);

/// Whether both opened NICs that can talk to each other.
bool gda_reaches(const RankFacts& a, const RankFacts& b);

struct PathPlan {
  std::vector<std::vector<Path>> path;  ///< [from][to]
  Path atomic = Path::lsa;              ///< weakest that any pair takes
  std::uint8_t used = 0;                ///< bit p: some pair takes path p
  std::vector<int> lsa_first;           ///< [rank] first member of its lsa team
  std::vector<int> lsa_size;            ///< [rank]

  std::uint8_t feeds(int rank) const;  ///< bit p: somebody reaches rank by p
  std::uint8_t connected() const;      ///< bit p: path p is set up between all ranks
  bool same_team(int a, int b) const { return lsa_first[a] == lsa_first[b]; }
};

/// Lsa teams alone: consecutive ranks of one host and kind of place, at most lsa_limit each.
/// @param reach  reach[a][b]: false when a cannot load/store b's memory whatever the host says; may be empty
void plan_teams(const std::vector<RankFacts>& facts, const std::vector<std::vector<bool>>& reach,
                PathPlan& plan);

/// @param wishes  [from][to]
/// @throws Error(unsupported) when a wish cannot be met, naming the pair and why; gda_reason: why no NIC was opened
PathPlan plan_paths(const std::vector<RankFacts>& facts,
                    const std::vector<std::vector<Wish>>& wishes,
                    const std::vector<std::vector<bool>>& reach,
                    const std::string& gda_reason = {});

/// Why `from` does not reach `to` by a better path than it takes; one sentence a path.
std::vector<std::string> rejections(const PathPlan& plan, const std::vector<RankFacts>& facts,
                                    const std::vector<Wish>& wishes, int from, int to,
                                    const std::string& gda_reason);

}  // namespace marrow::core
