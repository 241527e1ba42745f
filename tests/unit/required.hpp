// SPDX-License-Identifier: Apache-2.0
// What a machine has promised to have: words of MARROW_TEST_REQUIRE. A test that cannot run for want of one fails there
// instead of being skipped.
#pragma once

#include <cstdlib>
#include <string>

namespace marrow::test {

inline bool required(const std::string& word) {
  const char* words = std::getenv("MARROW_TEST_REQUIRE");
  const std::string all = words ? words : "";
  return ("," + all + ",").find("," + word + ",") != std::string::npos;
}

}  // namespace marrow::test

/// Leaves the test, which is skipped, or failed where the machine has promised that word.
#define MARROW_SKIP_WITHOUT(word, why)                                     \
  do {                                                                     \
    if (::marrow::test::required(word))                                    \
      GTEST_FAIL() << "MARROW_TEST_REQUIRE names " word ", but " << (why); \
    GTEST_SKIP() << (why);                                                 \
  } while (false)
