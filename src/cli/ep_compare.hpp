// SPDX-License-Identifier: Apache-2.0
// `marrow ep --compare deepep=PATH`: runs the low-latency test of an installed DeepEP and reads its figures.
#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"

namespace marrow::cli {

/// One rank's figures as the project prints them.
struct PeerLine {
  std::string library;  ///< "DeepEP V1", "DeepEP V2"
  int rank = 0;
  double dispatch_us = 0, dispatch_gbs = 0;
  double combine_us = 0, combine_gbs = 0;
  std::string note;
};

struct PeerRun {
  std::vector<PeerLine> lines;
  std::vector<std::string> skipped;  ///< one sentence each: what was not run, and why
};

/// @param what  "deepep=PATH". @throws UsageError for another word
PeerRun run_deepep(const std::string& what, const EpOptions& options, int ranks, bool gpu);

/// What a DeepEP test printed. Of several lines of one rank and kind the first counts (V2 goes through modes).
std::vector<PeerLine> read_deepep(const std::string& output);

}  // namespace marrow::cli
