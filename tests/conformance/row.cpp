// SPDX-License-Identifier: Apache-2.0
#include "conformance/row.hpp"

#include <algorithm>
#include <cstdlib>

namespace marrow::conformance {

const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> table = {
      {"case", "put_signal", "", "which case, see --list"},
      {"path", "lsa", "lsa,gda,proxy,mixed", "lsa, gda, proxy, or mixed: another one to each peer"},
      {"network", "auto", "auto", "network under the proxy path (MARROW_NETWORK)"},
      {"as", "threads", "threads,processes", "ranks as threads of one process or as processes"},
      {"ranks", "2", "1,2,3,4,7", "how many ranks, 1 to 16"},
      {"seed", "1", "1,2,3", "of patterns, pauses and the CPU device's schedule; 0: no schedule"},
      {"block", "1", "1,4", "threads a block"},
      {"lanes", "1", "1,4", "lanes a warp on the CPU device"},
      {"group", "block", "block,warp,thread", "coop group that calls the operations"},
      {"sharing", "device", "device,block,thread", "sharing mode of the contexts"},
      {"contexts", "1", "1,2,3", "contexts; the case uses the last one"},
      {"cq", "ring", "ring,collapsed", "completion queues of the gda path (MARROW_GDA_CQ)"},
      {"bytes", "256", "256,0,1,7,8,15,16,4096,1048579", "message size"},
      {"shift", "none", "none,target,source,both", "which side is misaligned, in bytes 1 to 15"},
      {"source", "window", "window,local",
       "sources of puts, targets of gets: window or local buffer"},
      {"memory", "device", "device", "memory of the windows: device or host"},
      {"far", "0", "0,1", "1: messages lie past 4 GiB of a sparse window"},
      {"index", "start", "start,wrap16,wrap32", "first queue index: near 0, 2^16 or 2^32"},
      {"depth", "0", "0,32", "queue and ring entries, 0: the default"},
      {"delay", "0", "0,20", "random pauses between steps, up to this many us"},
      {"lsa-size", "0", "0", "MARROW_LSA_SIZE"},
      {"softnic", "", "", "MARROW_SOFTNIC, e.g. atomics=hca"},
      {"iterations", "0", "0", "rounds; 0: the case's own number"},
      {"count", "2000", "2000", "operations a rank of counted cases"},
      {"grid", "0", "0", "blocks; 0: the case's own number"},
      {"gpus", "0", "0", "GPUs to spread the ranks over; 0: the CPU device"},
  };
  return table;
}

Row::Row() {
  for (const Parameter& p : parameters()) values_[p.name] = p.value;
}

void Row::set(std::string_view name, std::string_view value) {
  const auto found = values_.find(name);
  if (found == values_.end()) throw UsageError{"unknown option --" + std::string(name)};
  const bool names_a_case =
      std::any_of(cases().begin(), cases().end(), [&](const Case& c) { return value == c.name; });
  if (name == "case" && !names_a_case) throw UsageError{"no case is called " + std::string(value)};
  found->second = value;
}

const std::string& Row::text(std::string_view name) const { return values_.find(name)->second; }

std::uint64_t Row::number(std::string_view name) const {
  char* end = nullptr;
  const std::string& value = text(name);
  const std::uint64_t n = std::strtoull(value.c_str(), &end, 0);
  if (value.empty() || *end)
    throw UsageError{"--" + std::string(name) + " takes a number, not " + value};
  return n;
}

std::vector<std::string> Row::arguments() const {
  std::vector<std::string> out;
  for (const Parameter& p : parameters()) {
    if (text(p.name) == p.value && text("case") != text(p.name)) continue;
    out.push_back("--" + std::string(p.name));
    out.push_back(text(p.name));
  }
  return out;
}

std::string Row::line() const {
  std::string out;
  for (const std::string& word : arguments()) out += (out.empty() ? "" : " ") + word;
  return out;
}

const Case& Row::which() const {
  return *std::find_if(cases().begin(), cases().end(),
                       [&](const Case& c) { return is("case", c.name); });
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> out;
  while (true) {
    const std::size_t at = text.find(separator);
    out.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return out;
    text.remove_prefix(at + 1);
  }
}

namespace {

const Case* find_case(std::string_view name) {
  for (const Case& c : cases()) {
    if (name == c.name) return &c;
  }
  return nullptr;
}

bool is_default(std::string_view name, std::string_view value) {
  for (const Parameter& p : parameters()) {
    if (name == p.name) return value == p.value;
  }
  return false;
}

// One direction; the pair's order is tried both ways.
bool one_way(std::string_view name, std::string_view value, std::string_view other,
             std::string_view v) {
  if (name == "case") {
    const unsigned traits = find_case(value)->traits;
    const bool size_column =
        other == "bytes" || other == "shift" || other == "source" || other == "far";
    if (size_column && !(traits & kSized) && !is_default(other, v)) return false;
    if (other == "group" && !(traits & kGrouped) && v != "block") return false;
    if (other == "path" && (traits & kLsaOnly) && v != "lsa") return false;
    if (other == "contexts" && (traits & kTwoContexts) && v == "1") return false;
    if (other == "ranks" && (traits & kNotSelf) && v == "1") return false;
  }
  if (name == "path") {
    if (other == "cq" && value != "gda" && value != "mixed" && v != "ring") return false;
    if (other == "network" && (value == "lsa" || value == "gda") && v != "auto") return false;
    if (value == "lsa" && (other == "index" || other == "depth") && !is_default(other, v))
      return false;
    if (value == "mixed" && other == "ranks" && v == "1") return false;
  }
  if (kGpu) {
    // What each path reaches of a GPU's memory; host memory past 4 GiB would all be pinned.
    if (name == "path" && value == "mixed" && other == "memory" && v != "host") return false;
    if (name == "far" && value == "1" && other == "memory" && v == "host") return false;
    if (name == "far" && value == "1" && other == "path" && v != "lsa" && v != "proxy")
      return false;
  }
  if (name == "block" && value == "1") {
    if (other == "lanes" && v != "1") return false;
    if (other == "group" && v != "block") return false;
  }
  return true;
}

std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

/// So that a run cut short by its time limit loses a little of everything, not the last cases.
void shuffle(std::vector<Row>& rows, std::uint64_t& random) {
  for (std::size_t k = rows.size(); k > 1; --k)
    std::swap(rows[k - 1], rows[next_random(random) % k]);
}

}  // namespace

bool compatible(std::string_view name, std::string_view value, std::string_view other_name,
                std::string_view other_value) {
  return one_way(name, value, other_name, other_value) &&
         one_way(other_name, other_value, name, value);
}

bool possible(const Row& row) {
  if (!kGpu || !(row.which().traits & kWindowWords)) return true;
  // Three columns. Words of host memory are no words for several GPUs, those of GPU memory none for the
  // proxy's thread. Of two ranks, `mixed` has one pair, on one path.
  const bool lsa = row.is("path", "lsa") || (row.is("path", "mixed") && row.number("ranks") == 2 &&
                                             row.number("seed") % 3 == 2);
  return row.is("memory", "host") ? !lsa : !row.is("path", "proxy");
}

std::string_view kind_of(std::string_view path) {
  return kGpu && path != "gda" && path != "mixed" ? "measured" : "emulated";
}

namespace {

/// Chosen value of each column, -1: none yet.
using Choice = std::vector<int>;

bool fits(const Columns& columns, const Choice& choice, std::size_t column, int value) {
  for (std::size_t other = 0; other < columns.size(); ++other) {
    if (other == column || choice[other] < 0) continue;
    if (!compatible(columns[column].first, columns[column].second[value], columns[other].first,
                    columns[other].second[choice[other]])) {
      return false;
    }
  }
  return true;
}

Row row_of(const Columns& columns, const Choice& choice) {
  Row row;
  for (std::size_t c = 0; c < columns.size(); ++c)
    row.set(columns[c].first, columns[c].second[choice[c]]);
  return row;
}

}  // namespace

std::vector<Row> pairwise(const Columns& columns, std::uint64_t seed) {
  const std::size_t n = columns.size();
  // open[i][a][j][b]: the pair still waits to be covered, for i < j.
  std::vector<std::vector<std::vector<std::vector<bool>>>> open(n);
  std::vector<std::vector<int>> todo;
  for (std::size_t i = 0; i < n; ++i) {
    open[i].resize(columns[i].second.size());
    for (std::size_t a = 0; a < columns[i].second.size(); ++a) {
      open[i][a].resize(n);
      for (std::size_t j = i + 1; j < n; ++j) {
        open[i][a][j].resize(columns[j].second.size());
        for (std::size_t b = 0; b < columns[j].second.size(); ++b) {
          if (!compatible(columns[i].first, columns[i].second[a], columns[j].first,
                          columns[j].second[b]))
            continue;
          open[i][a][j][b] = true;
          todo.push_back({int(i), int(a), int(j), int(b)});
        }
      }
    }
  }
  std::uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1;
  std::vector<Row> rows;
  for (const std::vector<int>& pair : todo) {
    if (!open[pair[0]][pair[1]][pair[2]][pair[3]]) continue;
    Choice choice(n, -1);
    choice[pair[0]] = pair[1];
    choice[pair[2]] = pair[3];
    std::vector<std::size_t> order;
    for (std::size_t c = 0; c < n; ++c) {
      if (choice[c] < 0) order.push_back(c);
    }
    for (std::size_t k = order.size(); k > 1; --k)
      std::swap(order[k - 1], order[next_random(random) % k]);
    for (const std::size_t c : order) {
      int best = -1;
      int most = -1;
      const std::size_t values = columns[c].second.size();
      const std::size_t first = next_random(random) % values;
      for (std::size_t k = 0; k < values; ++k) {
        const int v = static_cast<int>((first + k) % values);
        if (!fits(columns, choice, c, v)) continue;
        int gain = 0;
        for (std::size_t other = 0; other < n; ++other) {
          if (choice[other] < 0 || other == c) continue;
          gain += c < other ? open[c][v][other][choice[other]] : open[other][choice[other]][c][v];
        }
        if (gain > most) {
          most = gain;
          best = v;
        }
      }
      if (best < 0) break;
      choice[c] = best;
    }
    if (std::find(choice.begin(), choice.end(), -1) != choice.end())
      continue;  // three columns exclude each other
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = i + 1; j < n; ++j) open[i][choice[i]][j][choice[j]] = false;
    }
    rows.push_back(row_of(columns, choice));
  }
  shuffle(rows, random);
  return rows;
}

std::vector<Row> product(const Columns& columns, std::uint64_t seed) {
  static constexpr const char* kWhole[] = {"case",  "path",  "network", "as",
                                           "ranks", "block", "lanes",   "group"};
  const auto whole = [](const std::string& name) {
    return std::find(std::begin(kWhole), std::end(kWhole), name) != std::end(kWhole);
  };
  std::uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1;
  std::vector<Choice> partial{Choice(columns.size(), -1)};
  for (std::size_t c = 0; c < columns.size(); ++c) {
    if (!whole(columns[c].first)) continue;
    std::vector<Choice> longer;
    for (const Choice& choice : partial) {
      for (int v = 0; v < static_cast<int>(columns[c].second.size()); ++v) {
        if (!fits(columns, choice, c, v)) continue;
        longer.push_back(choice);
        longer.back()[c] = v;
      }
    }
    partial.swap(longer);
  }
  std::vector<Row> rows;
  for (Choice& choice : partial) {
    bool complete = true;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      if (choice[c] >= 0) continue;
      std::vector<int> legal;
      for (int v = 0; v < static_cast<int>(columns[c].second.size()); ++v) {
        if (fits(columns, choice, c, v)) legal.push_back(v);
      }
      if (legal.empty()) {
        complete = false;
        break;
      }
      choice[c] = legal[next_random(random) % legal.size()];
    }
    if (complete) rows.push_back(row_of(columns, choice));
  }
  shuffle(rows, random);
  return rows;
}

std::string communicator_key(const Row& row) {
  std::string key = worker_key(row);
  for (const char* name : {"path", "network", "cq", "depth", "lsa-size"})
    key += "," + row.text(name);
  // softnic's engine is chosen for good by where the first windows lie: one that GPUs or a CPU cannot use well,
  // or at all, would meet the rows that follow.
  if (row.is("path", "gda") || row.is("path", "mixed")) key += "," + row.text("memory");
  if (row.is("path", "mixed")) key += "," + row.text("seed");  // says which peer is on which path
  // What a communicator once reported, it reports for ever.
  if (row.which().traits & (kCheckThrows | kReports)) key += "," + row.line();
  return key;
}

std::string worker_key(const Row& row) {
  std::string key;
  for (const char* name : {"as", "ranks", "gpus", "softnic"}) key += "," + row.text(name);
  // Variables of the environment on the CPU device.
  if (!row.number("gpus")) key += "," + row.text("lanes") + "," + row.text("seed");
  return key;
}

std::vector<Row> in_batches(const std::vector<Row>& rows, std::size_t batch) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::pair<std::string, Row>>> groups;
  for (const Row& row : rows) {
    auto& group = groups[worker_key(row)];
    if (group.empty()) order.push_back(worker_key(row));
    group.emplace_back(communicator_key(row), row);
  }
  for (auto& [key, group] : groups) {
    std::stable_sort(group.begin(), group.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  std::vector<Row> dealt;
  for (std::size_t begin = 0; dealt.size() < rows.size(); begin += batch) {
    for (const std::string& key : order) {
      const auto& group = groups[key];
      for (std::size_t i = begin; i < begin + batch && i < group.size(); ++i)
        dealt.push_back(group[i].second);
    }
  }
  return dealt;
}

}  // namespace marrow::conformance
