// SPDX-License-Identifier: Apache-2.0
// What `marrow perf` can time: a list of named experiments. To add one (a floor kernel, say), write a
// function and give it a line in experiments.cpp; options, ranks, table and JSON come with it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/result.hpp"
#include "marrow/marrow.hpp"

namespace marrow::cli {

/// One line of the table.
struct PerfLine {
  std::uint64_t bytes = 0;
  std::uint64_t iterations = 0;
  Row time;                      ///< us
  std::optional<Row> bandwidth;  ///< GB/s (1e9)
  std::optional<Row> rate;       ///< Mops/s
};

/// What an experiment works with, on each rank. Results count on rank 0 only.
struct ExperimentContext {
  Communicator& comm;
  const PerfOptions& options;
  Progress& progress;
  std::vector<PerfLine> lines;
};

struct Experiment {
  std::string name;
  std::string help;
  std::string default_sizes;  ///< as --sizes; empty: the experiment has no size
  int least_ranks = 2;
  void (*run)(ExperimentContext&) = nullptr;
};

const std::vector<Experiment>& experiments();
const Experiment& experiment(const std::string& name);

/// --sizes or the experiment's default.
std::vector<std::uint64_t> sizes_of(const ExperimentContext& context, const char* defaults);

void run_put(ExperimentContext&);
void run_put_value(ExperimentContext&);
void run_get(ExperimentContext&);
void run_signal(ExperimentContext&);
void run_packet(ExperimentContext&);
void run_floor(ExperimentContext&);
void run_barrier(ExperimentContext&);
void run_all_to_all(ExperimentContext&);

}  // namespace marrow::cli
