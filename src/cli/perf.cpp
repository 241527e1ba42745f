// SPDX-License-Identifier: Apache-2.0
// `marrow perf`: one experiment, its table, its JSON.
#include <cstdio>

#include "cli/commands.hpp"
#include "cli/experiments.hpp"
#include "cli/json.hpp"
#include "cli/ranks.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

void print(const Experiment& experiment, const PerfOptions& options, int ranks,
           const std::vector<PerfLine>& lines) {
  if (lines.empty()) return;
  const Row& first = lines.front().time;
  std::printf("# marrow perf %s: %s\n", experiment.name.c_str(), experiment.help.c_str());
  std::printf("# %d ranks%s, path %s%s, kernels on %s, kind: %s\n", ranks,
              options.where.processes ? " (processes)" : "",
              first.path.empty() ? "-" : first.path.c_str(),
              first.network.empty() ? "" : (" on " + first.network).c_str(),
              first.devices.front().name.c_str(), name(first.kind));
  if (!first.note.empty()) std::printf("# time: %s\n", first.note.c_str());
  for (const PerfLine& line : lines) {
    if (!line.bandwidth || line.bandwidth->note.empty()) continue;
    std::printf("# BW, rate: %s\n", line.bandwidth->note.c_str());
    break;
  }
  Table table({{"bytes", true},
               {"iterations", true},
               {"t_min[us]", true},
               {"t_median[us]", true},
               {"t_avg[us]", true},
               {"t_p99[us]", true},
               {"t_max[us]", true},
               {"BW[GB/s]", true},
               {"rate[Mops/s]", true}});
  for (const PerfLine& line : lines) {
    const Statistics& s = line.time.statistics;
    table.add({std::to_string(line.bytes), std::to_string(line.iterations), us_text(s.min),
               us_text(s.median), us_text(s.mean), us_text(s.p99), us_text(s.max),
               line.bandwidth ? format("%.3f", line.bandwidth->statistics.mean) : "-",
               line.rate ? format("%.4f", line.rate->statistics.mean) : "-"});
  }
  std::printf("%s", table.text("#").c_str());
}

bool all_verified(const std::vector<PerfLine>& lines) {
  for (const PerfLine& line : lines) {
    if ((line.time.verified && !*line.time.verified) ||
        (line.bandwidth && line.bandwidth->verified && !*line.bandwidth->verified)) {
      std::fprintf(stderr, "marrow: %llu bytes: %s\n", static_cast<unsigned long long>(line.bytes),
                   line.time.note.empty() ? "the data is wrong"
                                          : (line.time.note + ": the data is wrong").c_str());
      return false;
    }
  }
  return true;
}

}  // namespace

int run_perf(const PerfOptions& options) {
  prepare_json(options.json, false);
  const Experiment& chosen = experiment(options.operation);
  if (options.memory == "device" && !options.where.gpu) {
    throw UsageError(
        "--memory device: the CPU device has host memory only. Use --place gpu, or leave --memory "
        "out.");
  }
  constexpr int kCpuThreads = 4096;  // what launch() takes
  if (!options.where.gpu && options.blocks * options.threads > kCpuThreads) {
    throw UsageError(format(
        "--blocks %d --threads %d: the CPU device runs at most %d OS threads a kernel. Take fewer, "
        "or use --place gpu.",
        options.blocks, options.threads, kCpuThreads));
  }
  RankTeam team(options.where, 2);
  prepare_json(options.json, team.speaks());
  if (team.size() < chosen.least_ranks) {
    throw UsageError(format("perf %s needs %d ranks.", chosen.name.c_str(), chosen.least_ranks));
  }
  std::vector<PerfLine> lines;
  team.run(path_parameters(options.path, options.network), [&](Communicator& comm) {
    Progress progress;
    ExperimentContext context{comm, options, progress, {}};
    chosen.run(context);
    if (comm.rank() == 0) lines = std::move(context.lines);
  });
  if (!team.speaks()) return 0;
  if (options.json != "-") print(chosen, options, team.size(), lines);
  if (!options.json.empty()) {
    Document document;
    document.command = "perf " + chosen.name;
    document.parameters = {{"ranks", std::int64_t{team.size()}},
                           {"processes", !team.threads()},
                           {"place", std::string(team.on_gpu() ? "gpu" : "cpu")},
                           {"path", options.path},
                           {"network", options.network},
                           {"memory", options.memory},
                           {"blocks", std::int64_t{options.blocks}},
                           {"threads", std::int64_t{options.threads}}};
    for (PerfLine& line : lines) {
      document.rows.push_back(std::move(line.time));
      if (line.bandwidth) document.rows.push_back(std::move(*line.bandwidth));
      if (line.rate) document.rows.push_back(std::move(*line.rate));
    }
    write_json(options.json, document);
  }
  return all_verified(lines) ? 0 : 1;
}

}  // namespace marrow::cli
