// SPDX-License-Identifier: Apache-2.0
// What a router chose, from a log: for tests and benches that want uneven loads as models have them.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace marrow::ep_test {

/// A router's log: {"topk_ids": [...]} a line. Empty if there is none.
inline std::vector<std::vector<int>> real_routing(const std::string& file, std::size_t limit) {
  std::vector<std::vector<int>> tokens;
  std::ifstream in(file);
  for (std::string line; tokens.size() < limit && std::getline(in, line);) {
    const std::size_t at = line.find("\"topk_ids\": [");
    if (at == std::string::npos) continue;
    std::vector<int> ids;
    const char* p = line.c_str() + at + 13;
    for (;;) {
      char* end = nullptr;
      ids.push_back(static_cast<int>(std::strtol(p, &end, 10)));
      p = end;
      if (*p++ != ',') break;
    }
    tokens.push_back(ids);
  }
  return tokens;
}

}  // namespace marrow::ep_test
