// SPDX-License-Identifier: Apache-2.0
#include "core/path_plan.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::core {
namespace {

Wish wish_of(const std::string& word, const std::string& whole) {
  if (word == "auto") return Wish::automatic;
  if (word == "lsa") return Wish::lsa;
  if (word == "gda") return Wish::gda;
  if (word == "proxy") return Wish::proxy;
  throw Error(Code::invalid_argument,
              base::cat("MARROW_PATH=", whole, ": '", word, "' is not a path"),
              "use auto, lsa, gda or proxy, or one of them per rank, separated by commas");
}

}  // namespace

bool gda_reaches(const RankFacts& a, const RankFacts& b) {
  if (!a.gda_usable || !b.gda_usable || a.gda_emulated != b.gda_emulated) return false;
  return !a.gda_emulated || a.host == b.host;
}

std::vector<Wish> parse_wishes(const std::string& text, int nranks) {
  std::vector<std::string> words;
  std::size_t begin = 0;
  for (std::size_t comma; (comma = text.find(',', begin)) != std::string::npos; begin = comma + 1) {
    words.push_back(text.substr(begin, comma - begin));
  }
  words.push_back(text.substr(begin));
  std::vector<Wish> wishes;
  for (const std::string& word : words) wishes.push_back(wish_of(word, text));
  if (wishes.size() == 1) wishes.resize(nranks, wishes[0]);
  if (static_cast<int>(wishes.size()) != nranks) {
    throw Error(
        Code::invalid_argument,
        base::cat("MARROW_PATH=", text, " has ", wishes.size(), " entries for ", nranks, " ranks"),
        "give one path for all peers or exactly one per rank");
  }
  return wishes;
}

std::uint8_t PathPlan::feeds(int rank) const {
  std::uint8_t bits = 0;
  for (const auto& row : path) bits |= static_cast<std::uint8_t>(1u << static_cast<int>(row[rank]));
  return bits;
}

std::uint8_t PathPlan::connected() const {
  return static_cast<std::uint8_t>(used | 1u << static_cast<int>(atomic));
}

void plan_teams(const std::vector<RankFacts>& facts, const std::vector<std::vector<bool>>& reach,
                PathPlan& plan) {
  const int n = static_cast<int>(facts.size());
  plan.lsa_first.assign(n, 0);
  plan.lsa_size.assign(n, 0);
  for (int first = 0; first < n;) {
    int end = first + 1;
    const auto joins = [&](int r) {
      if (facts[r].host != facts[first].host || facts[r].on_gpu != facts[first].on_gpu)
        return false;
      if (facts[first].lsa_limit > 0 && r - first >= facts[first].lsa_limit) return false;
      for (int m = first; m < r && !reach.empty(); ++m) {
        if (!reach[m][r] || !reach[r][m]) return false;
      }
      return true;
    };
    while (end < n && joins(end)) ++end;
    for (int r = first; r < end; ++r) {
      plan.lsa_first[r] = first;
      plan.lsa_size[r] = end - first;
    }
    first = end;
  }
}

PathPlan plan_paths(const std::vector<RankFacts>& facts,
                    const std::vector<std::vector<Wish>>& wishes,
                    const std::vector<std::vector<bool>>& reach, const std::string& gda_reason) {
  const int n = static_cast<int>(facts.size());
  PathPlan plan;
  plan_teams(facts, reach, plan);
  plan.path.assign(n, std::vector<Path>(n, Path::lsa));
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      const bool lsa = plan.same_team(from, to);
      const bool gda = gda_reaches(facts[from], facts[to]);
      const bool proxy = facts[from].proxy_usable && facts[to].proxy_usable;
      const Wish wish = wishes[from][to];
      Path path = lsa ? Path::lsa : gda ? Path::gda : Path::proxy;
      bool met = lsa || gda || proxy;
      if (wish == Wish::lsa) path = Path::lsa, met = lsa;
      if (wish == Wish::gda) path = Path::gda, met = gda;
      if (wish == Wish::proxy) path = Path::proxy, met = proxy;
      if (!met) {
        throw Error(
            Code::unsupported,
            base::cat("rank ", from, " cannot reach rank ", to, " by ",
                      wish == Wish::automatic ? "any path" : name(path),
                      wish == Wish::lsa ? ": they are not in one load/store team" : "",
                      wish == Wish::gda && !gda_reason.empty() ? ": " : "",
                      wish == Wish::gda ? gda_reason : ""),
            "see `marrow info` for each pair; MARROW_PATH=auto takes the best one there is");
      }
      plan.path[from][to] = path;
      plan.used |= static_cast<std::uint8_t>(1u << static_cast<int>(path));
      plan.atomic = std::max(plan.atomic, path);
    }
  }
  return plan;
}

std::vector<std::string> rejections(const PathPlan& plan, const std::vector<RankFacts>& facts,
                                    const std::vector<Wish>& wishes, int from, int to,
                                    const std::string& gda_reason) {
  std::vector<std::string> reasons;
  const Path path = plan.path[from][to];
  const bool asked = wishes[to] != Wish::automatic;
  if (path != Path::lsa) {
    if (asked) {
      reasons.push_back("lsa: MARROW_PATH asks for another path");
    } else if (facts[from].host != facts[to].host) {
      reasons.push_back("lsa: the ranks are on different hosts");
    } else if (facts[from].lsa_limit > 0) {
      reasons.push_back(base::cat("lsa: MARROW_LSA_SIZE=", facts[from].lsa_limit,
                                  " puts them in different teams"));
    } else {
      reasons.push_back(
          "lsa: no load/store between these GPUs (peer access or shared memory is missing)");
    }
  }
  if (path == Path::proxy) {
    if (asked) {
      reasons.push_back("gda: MARROW_PATH asks for another path");
    } else if (!facts[from].gda_usable) {
      reasons.push_back(base::cat("gda: ", gda_reason.empty() ? "no NIC" : gda_reason));
    } else {
      reasons.push_back("gda: softnic reaches ranks of one host only");
    }
  }
  return reasons;
}

}  // namespace marrow::core
