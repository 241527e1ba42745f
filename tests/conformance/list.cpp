// SPDX-License-Identifier: Apache-2.0
// The list of all cases.
#include "conformance/case.hpp"

namespace marrow::conformance {

std::vector<Case> put_cases();
std::vector<Case> completion_cases();
std::vector<Case> meet_cases();
std::vector<Case> words_cases();
std::vector<Case> refuse_cases();

const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> list;
    for (const auto part : {put_cases, completion_cases, meet_cases, words_cases, refuse_cases}) {
      for (const Case& c : part()) list.push_back(c);
    }
    return list;
  }();
  return all;
}

}  // namespace marrow::conformance
