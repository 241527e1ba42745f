// SPDX-License-Identifier: Apache-2.0
// What the files of cases share.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "ep/site.hpp"

namespace marrow::ep_test {

class EpCases : public testing::TestWithParam<std::string> {
 protected:
  const std::string& path() const { return GetParam(); }
  void run(int ranks, const Scenario& s) { run_scenario(path(), ranks, s); }
};

inline Scenario small(int ranks) {
  Scenario s;
  s.config.experts.assign(static_cast<std::size_t>(ranks), 3);
  s.config.max_tokens = 6;
  s.config.hidden = 144;  // the second group of channels is partial
  s.config.top_k = 3;
  s.config.deadline = std::chrono::seconds(30);
  s.config.max_sms = sms_of_a_rank();
  s.tokens = {6, 3, 5, 1};
  s.batches = 2;
  return s;
}

inline Scenario bf16(int ranks) {
  Scenario s = small(ranks);
  s.config.payload = ep::Payload::bf16;
  return s;
}

}  // namespace marrow::ep_test
