// SPDX-License-Identifier: Apache-2.0
// The list of all cases.
#include "conformance/case.hpp"

namespace marrow::conformance {

std::vector<Case> put_cases();
std::vector<Case> completion_cases();
std::vector<Case> meet_cases();
std::vector<Case> words_cases();
std::vector<Case> refuse_cases();
std::vector<Case> bulk_cases();
#if !defined(MARROW_CONFORMANCE_GPU)
std::vector<Case> selftest_cases();
#endif

const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> list;
    for (const auto part :
         {put_cases, completion_cases, meet_cases, words_cases, refuse_cases, bulk_cases}) {
      for (const Case& c : part()) list.push_back(c);
    }
#if !defined(MARROW_CONFORMANCE_GPU)
    for (const Case& c : selftest_cases()) list.push_back(c);
#endif
    return list;
  }();
  return all;
}

}  // namespace marrow::conformance
