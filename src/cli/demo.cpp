// SPDX-License-Identifier: Apache-2.0
// `marrow demo`: the main job on real or generated routing, over each path, with the check that counts.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cli/commands.hpp"
#include "cli/demo_rank.hpp"
#include "cli/json.hpp"
#include "cli/latency.hpp"
#include "cli/progress.hpp"
#include "cli/ranks.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

constexpr int kPings = 200;

/// One path's outcome, whole on rank 0.
struct PathResult {
  std::string path;
  bool available = true;
  std::string reason;  ///< when not available
  PathUse use;
  std::vector<double> put_us, signal_us;
  double exchange_us = 0;
  RankReport sum;
};

/// Numbers and text of a rank's report, for allgather.
std::string pack(const RankReport& r) {
  return format("%llu %llu %llu %.3f\n", static_cast<unsigned long long>(r.wrong),
                static_cast<unsigned long long>(r.checked), static_cast<unsigned long long>(r.rows),
                r.exchange_us) +
         r.first_wrong;
}

/// Sums the ranks; the exchange took as long as its slowest rank.
void add(PathResult& result, const std::vector<std::byte>& bytes) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  unsigned long long wrong = 0, checked = 0, rows = 0;
  double us = 0;
  std::sscanf(text.c_str(), "%llu %llu %llu %lf", &wrong, &checked, &rows, &us);
  result.sum.wrong += wrong;
  result.sum.checked += checked;
  result.sum.rows += rows;
  result.exchange_us = std::max(result.exchange_us, us);
  if (result.sum.first_wrong.empty()) result.sum.first_wrong = text.substr(text.find('\n') + 1);
}

PathResult run_path(RankTeam& team, const DemoOptions& options, const DemoJob& job,
                    const std::string& path, Progress& progress) {
  PathResult result;
  result.path = path;
  try {
    team.run(path_parameters(path, options.network), [&](Communicator& comm) {
      const bool reports = comm.rank() == 0;
      PathResult mine;
      const RankReport report = exchange(comm, job, [&](std::uint32_t wave) {
        if (reports) progress.at(format("%s: wave %u of %u", path.c_str(), wave + 1, waves(job)));
      });
      if (comm.nranks() > 1) {
        const std::size_t next =
            (static_cast<std::size_t>(comm.rank()) + 1) % static_cast<std::size_t>(comm.nranks());
        Bench bench(comm, 64, 0, default_memory(comm.place(), comm.peers()[next].path));
        mine.put_us = bench.ping_pong(Ping::put, 8, kPings, kPings / 10, 1);
        mine.signal_us = bench.ping_pong(Ping::signal, 0, kPings, kPings / 10, 1);
      }
      const std::string text = pack(report);
      for (const auto& bytes : comm.allgather(text.data(), text.size())) add(mine, bytes);
      // Under a launcher every process needs the verdict, for its exit code; among threads rank 0 keeps it.
      if (!reports && team.threads()) return;
      mine.path = path;
      mine.use = path_use(comm, comm.nranks() > 1 ? (comm.rank() + 1) % comm.nranks() : 0);
      result = std::move(mine);
    });
  } catch (const Error& error) {
    if (error.code() != Code::unsupported || options.path != "all") throw;
    result.available = false;
    result.reason = error.sentence();
  }
  return result;
}

void add_rows(Document& document, const PathResult& r, const DemoJob& job) {
  const auto row = [&](const char* what, std::vector<double> samples, const char* note) {
    Row out = make_row(r.use, what, "us");
    out.statistics = statistics_of(samples);
    out.samples = std::move(samples);
    out.note = note;
    return out;
  };
  Row put = row("put latency", r.put_us,
                "8 bytes + strong signal, half of a round trip, timed on the device");
  put.parameters = {{"bytes", std::int64_t{8}}};
  if (!r.put_us.empty()) document.rows.push_back(std::move(put));
  if (!r.signal_us.empty()) {
    document.rows.push_back(row("signal latency", r.signal_us,
                                "strong signal, half of a round trip, timed on the device"));
  }
  Row exchange =
      row("exchange time", {r.exchange_us},
          "dispatch, expert and combine of all waves, timed on the device; slowest rank");
  exchange.verified = r.sum.wrong == 0;
  exchange.parameters = {{"tokens", static_cast<std::int64_t>(job.layout.tokens)},
                         {"rows", static_cast<std::int64_t>(r.sum.rows)},
                         {"elements_checked", static_cast<std::int64_t>(r.sum.checked)},
                         {"elements_wrong", static_cast<std::int64_t>(r.sum.wrong)}};
  document.rows.push_back(std::move(exchange));
}

std::string median(const std::vector<double>& us) {
  return us.empty() ? "-" : us_text(statistics_of(us).median) + " us";
}

void print(const std::vector<PathResult>& results) {
  Table table({{"path"},
               {"network"},
               {"verified"},
               {"put latency", true},
               {"signal latency", true},
               {"exchange time", true},
               {"kind"}});
  for (const PathResult& r : results) {
    if (!r.available) {
      table.add({r.path, "-", "not here", "-", "-", "-", "-"});
      continue;
    }
    table.add({r.path, r.use.network.empty() ? "-" : r.use.network, r.sum.wrong == 0 ? "yes" : "NO",
               median(r.put_us), median(r.signal_us), format("%.2f ms", r.exchange_us * 1e-3),
               name(kind_of(r.use.devices))});
  }
  std::printf("%s", table.text().c_str());
  for (const PathResult& r : results) {
    if (!r.available)
      std::printf("%s is not available here: %s\n", r.path.c_str(), r.reason.c_str());
  }
}

Routing routing_of(const DemoOptions& options) {
  if (!options.routing.empty())
    return read_routing(options.routing, static_cast<std::uint64_t>(options.tokens));
  return generate_routing(
      options.seed, options.tokens ? static_cast<std::uint64_t>(options.tokens) : 2048, 64, 8);
}

}  // namespace

int run_demo(const DemoOptions& options) {
  prepare_json(options.json, false);
  if (options.hidden % 4 != 0)
    throw UsageError(format("--hidden is %lld: it must be a multiple of 4.",
                            static_cast<long long>(options.hidden)));
  const Routing routing = routing_of(options);
  RankTeam team(options.where, 4);
  prepare_json(options.json, team.speaks());
  if (routing.experts < static_cast<std::uint32_t>(team.size())) {
    throw UsageError(
        format("%u experts cannot be spread over %d ranks.", routing.experts, team.size()));
  }
  const DemoJob job{routing,
                    {team.size(), routing.tokens(), routing.experts},
                    static_cast<std::uint32_t>(options.hidden),
                    options.seed,
                    options.corrupt};
  const bool text = team.speaks() && options.json != "-";
  if (text) {
    const std::string notice = reduced_notice();
    if (!notice.empty()) std::printf("%s\n\n", notice.c_str());
    std::printf("%d ranks on %s exchange %llu tokens of %lld floats, top-%u of %u experts, %s\n\n",
                team.size(), team.on_gpu() ? "GPUs" : "the CPU device",
                static_cast<unsigned long long>(routing.tokens()),
                static_cast<long long>(options.hidden), routing.top_k, routing.experts,
                routing.source.c_str());
    std::fflush(stdout);
  }
  const std::vector<std::string> paths = options.path == "all"
                                             ? std::vector<std::string>{"lsa", "gda", "proxy"}
                                             : std::vector<std::string>{options.path};
  std::vector<PathResult> results;
  Document document;
  document.command = "demo";
  document.parameters = {{"ranks", std::int64_t{team.size()}},
                         {"processes", !team.threads()},
                         {"place", std::string(team.on_gpu() ? "gpu" : "cpu")},
                         {"hidden", options.hidden},
                         {"top_k", std::int64_t{routing.top_k}},
                         {"experts", std::int64_t{routing.experts}},
                         {"seed", static_cast<std::int64_t>(options.seed)},
                         {"routing", routing.source},
                         {"corrupt", options.corrupt}};
  Progress progress;
  std::uint64_t wrong = 0, ran = 0;
  for (const std::string& path : paths) {
    results.push_back(run_path(team, options, job, path, progress));
    const PathResult& r = results.back();
    if (!r.available) continue;
    ++ran;
    wrong += r.sum.wrong;
    if (team.speaks()) add_rows(document, r, job);
  }
  progress.clear();
  if (team.speaks()) {
    if (text) print(results);
    for (const PathResult& r : results) {
      if (r.available && r.sum.wrong) {
        std::fprintf(stderr, "marrow: %s: %llu of %llu elements are wrong. First: %s\n",
                     r.path.c_str(), static_cast<unsigned long long>(r.sum.wrong),
                     static_cast<unsigned long long>(r.sum.checked), r.sum.first_wrong.c_str());
      } else if (text && r.available) {
        std::printf("%s: %llu rows sent, %llu elements compared bit by bit, all equal\n",
                    r.path.c_str(), static_cast<unsigned long long>(r.sum.rows),
                    static_cast<unsigned long long>(r.sum.checked));
      }
    }
    if (!options.json.empty()) write_json(options.json, document);
  }
  if (ran == 0)
    throw Error(Code::unsupported, "no path works on this machine", "see `marrow info`");
  return wrong ? 1 : 0;
}

}  // namespace marrow::cli
