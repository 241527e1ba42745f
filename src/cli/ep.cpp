// SPDX-License-Identifier: Apache-2.0
// `marrow ep`: MoE dispatch and combine, per rank and apart, as the neighbours' tests print them.
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "cli/commands.hpp"
#include "cli/ep_bench.hpp"
#include "cli/ep_compare.hpp"
#include "cli/json.hpp"
#include "cli/ranks.hpp"
#include "cli/run_kernel.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"

namespace marrow::cli {
namespace {

struct RankLine {
  EpResult result;
  PathUse use;
};

/// Every rank's result at every rank.
std::vector<EpResult> gather(Communicator& comm, const EpResult& mine) {
  std::vector<double> numbers{
      static_cast<double>(mine.choices), static_cast<double>(mine.dispatch_logical),
      static_cast<double>(mine.dispatch_wire), static_cast<double>(mine.combine_logical),
      static_cast<double>(mine.combine_wire)};
  for (const auto* samples : {&mine.dispatch_us, &mine.combine_us, &mine.pair_us}) {
    numbers.push_back(static_cast<double>(samples->size()));
    numbers.insert(numbers.end(), samples->begin(), samples->end());
  }
  const auto all = comm.allgather(numbers.data(), numbers.size() * sizeof(double));
  const auto wrong = comm.allgather(mine.wrong.data(), mine.wrong.size());
  std::vector<EpResult> results(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::vector<double> theirs(all[r].size() / sizeof(double));
    std::memcpy(theirs.data(), all[r].data(), theirs.size() * sizeof(double));
    EpResult& to = results[r];
    std::size_t at = 0;
    for (std::uint64_t* number : {&to.choices, &to.dispatch_logical, &to.dispatch_wire,
                                  &to.combine_logical, &to.combine_wire})
      *number = static_cast<std::uint64_t>(theirs[at++]);
    for (auto* samples : {&to.dispatch_us, &to.combine_us, &to.pair_us}) {
      const auto n = static_cast<std::size_t>(theirs[at++]);
      samples->assign(theirs.begin() + static_cast<std::ptrdiff_t>(at),
                      theirs.begin() + static_cast<std::ptrdiff_t>(at + n));
      at += n;
    }
    to.wrong.assign(reinterpret_cast<const char*>(wrong[r].data()), wrong[r].size());
  }
  return results;
}

/// GB/s, 1e9 bytes.
double rate(std::uint64_t bytes, double us) {
  return us > 0 ? static_cast<double>(bytes) / us * 1e-3 : 0;
}

std::string launch_note(const EpOptions& o, bool gpu) {
  if (!gpu) return "host clock around each call, on the CPU device";
  return o.graph ? "CUDA events around graphs of 20, divided by 20; L2 warm"
                 : "CUDA events around each launch, L2 warm";
}

void print(const EpOptions& o, const RankTeam& team, const std::vector<RankLine>& lines,
           const PeerRun& peers) {
  const Row kind = make_row(lines[0].use, "", "us");
  std::printf("# %s, kernels on %s, path %s%s, kind: %s\n", launch_note(o, team.on_gpu()).c_str(),
              kind.devices.front().name.c_str(), kind.path.c_str(),
              kind.network.empty() ? "" : (" on " + kind.network).c_str(), name(kind.kind));
  std::printf(
      "# logical: a row for each choice, own experts too; wire: bytes that leave the rank\n");
  Table table({{"library", false},
               {"rank", true},
               {"dispatch avg[us]", true},
               {"min", true},
               {"max", true},
               {"logical[GB/s]", true},
               {"wire[GB/s]", true},
               {"combine avg[us]", true},
               {"min", true},
               {"max", true},
               {"logical[GB/s]", true},
               {"wire[GB/s]", true},
               {"pair avg[us]", true}});
  for (std::size_t r = 0; r < lines.size(); ++r) {
    const EpResult& e = lines[r].result;
    const Statistics d = statistics_of(e.dispatch_us);
    const Statistics c = statistics_of(e.combine_us);
    table.add({"marrow", std::to_string(r), us_text(d.mean), us_text(d.min), us_text(d.max),
               format("%.2f", rate(e.dispatch_logical, d.mean)),
               format("%.2f", rate(e.dispatch_wire, d.mean)), us_text(c.mean), us_text(c.min),
               us_text(c.max), format("%.2f", rate(e.combine_logical, c.mean)),
               format("%.2f", rate(e.combine_wire, c.mean)),
               us_text(statistics_of(e.pair_us).mean)});
  }
  for (const PeerLine& p : peers.lines) {
    table.add({p.library, std::to_string(p.rank), us_text(p.dispatch_us), "-", "-",
               format("%.2f", p.dispatch_gbs), "-", us_text(p.combine_us), "-", "-",
               format("%.2f", p.combine_gbs), "-", "-"});
  }
  std::printf("%s", table.text("#").c_str());
  // The libraries' clocks may differ: each line's is named.
  std::set<std::string> said;
  for (const PeerLine& p : peers.lines)
    if (!p.note.empty() && said.insert(p.library + p.note).second)
      std::printf("# %s: %s\n", p.library.c_str(), p.note.c_str());
  for (const std::string& skipped : peers.skipped) std::printf("# skipped: %s\n", skipped.c_str());
}

std::vector<Row> rows_of(const EpOptions& o, const RankLine& line, int rank, bool gpu) {
  const EpResult& e = line.result;
  std::vector<Row> rows;
  const auto add = [&](const char* what, const std::vector<double>& us, std::uint64_t logical,
                       std::uint64_t wire) {
    Row row = make_row(line.use, std::string("ep ") + what + " time", "us");
    row.samples = us;
    row.statistics = statistics_of(us);
    row.verified = e.wrong.empty();
    row.note = launch_note(o, gpu);
    row.parameters = {{"rank", std::int64_t{rank}},
                      {"tokens", o.tokens},
                      {"hidden", o.hidden},
                      {"top_k", o.top_k},
                      {"experts", o.experts},
                      {"payload", o.payload},
                      {"mode", o.mode},
                      {"sms", std::int64_t{o.sms}},
                      {"graph", o.graph},
                      {"choices", static_cast<std::int64_t>(e.choices)},
                      {"logical_bytes", static_cast<std::int64_t>(logical)},
                      {"wire_bytes", static_cast<std::int64_t>(wire)}};
    for (const auto& [kind, bytes] : {std::pair{"logical", logical}, std::pair{"wire", wire}}) {
      Row speed = make_row(line.use, std::string("ep ") + what + " " + kind, "GB/s");
      std::vector<double> samples;
      for (const double t : us) samples.push_back(rate(bytes, t));
      speed.statistics = statistics_of(samples);
      speed.parameters = row.parameters;
      speed.verified = row.verified;
      rows.push_back(std::move(speed));
    }
    rows.push_back(std::move(row));
  };
  add("dispatch", e.dispatch_us, e.dispatch_logical, e.dispatch_wire);
  add("combine", e.combine_us, e.combine_logical, e.combine_wire);
  add("pair", e.pair_us, e.dispatch_logical + e.combine_logical, e.dispatch_wire + e.combine_wire);
  return rows;
}

std::vector<Row> rows_of(const EpOptions& o, const PeerLine& p, const PathUse& use) {
  std::vector<Row> rows;
  const auto add = [&](const std::string& what, const char* unit, double value) {
    Row row = make_row(use, "ep " + what + " of " + p.library, unit);
    row.statistics = statistics_of({value});
    row.parameters = {
        {"rank", std::int64_t{p.rank}}, {"library", p.library}, {"tokens", o.tokens},
        {"hidden", o.hidden},           {"top_k", o.top_k},     {"experts", o.experts}};
    row.note = p.note;
    rows.push_back(std::move(row));
  };
  add("dispatch time", "us", p.dispatch_us);
  add("dispatch logical", "GB/s", p.dispatch_gbs);
  add("combine time", "us", p.combine_us);
  add("combine logical", "GB/s", p.combine_gbs);
  return rows;
}

}  // namespace

int run_ep(const EpOptions& given) {
  prepare_json(given.json, false);
  Routing routing;
  if (!given.routing.empty()) routing = read_routing(given.routing, 0);
  const EpOptions options = ep_defaults(given, routing, given.where.gpu);
  if (!options.compare.empty() && options.compare.rfind("deepep=", 0) != 0)
    throw UsageError("--compare: '" + options.compare + "' is not deepep=PATH.");
  RankTeam team(options.where, 2);
  prepare_json(options.json, team.speaks());
  if (routing.id.empty()) {
    routing = uniform_routing(
        options.seed, static_cast<std::uint64_t>(options.tokens) * team.size(),
        static_cast<std::uint32_t>(options.experts), static_cast<std::uint32_t>(options.top_k));
  }
  std::vector<RankLine> lines;
  team.run(path_parameters(options.path, options.network), [&](Communicator& comm) {
    if (comm.rank() == 0 && options.json != "-") {
      const ep::MemoryNeeded memory =
          ep::Group::memory_needed(comm, ep_config(options, comm.nranks()));
      std::printf(
          "# marrow ep: %d ranks%s, %lld tokens a rank, hidden %lld, top-%lld of %lld experts, %s, "
          "combine "
          "%s, routing: %s\n# memory a rank: %s\n",
          comm.nranks(), team.threads() ? "" : " (processes)",
          static_cast<long long>(options.tokens), static_cast<long long>(options.hidden),
          static_cast<long long>(options.top_k), static_cast<long long>(options.experts),
          options.payload.c_str(), options.mode.c_str(), routing.source.c_str(),
          memory.text().c_str());
      std::fflush(stdout);
    }
    const std::vector<EpResult> results = gather(comm, run_ep_rank(comm, options, routing));
    if (comm.rank() != 0) return;
    const PathUse use = path_use(comm, comm.nranks() > 1 ? 1 : 0);
    for (const EpResult& result : results) lines.push_back({result, use});
  });
  if (!team.speaks()) return 0;
  bool right = true;
  for (std::size_t r = 0; r < lines.size(); ++r) {
    if (lines[r].result.wrong.empty()) continue;
    right = false;
    std::fprintf(stderr, "marrow: rank %d: %s: the data is wrong\n", static_cast<int>(r),
                 lines[r].result.wrong.c_str());
  }
  if (!right) return 1;
  PeerRun peers;
  if (!options.compare.empty())
    peers = run_deepep(options.compare, options, team.size(), team.on_gpu());
  if (options.json != "-") print(options, team, lines, peers);
  if (!options.json.empty()) {
    Document document;
    document.command = "ep";
    document.parameters = {{"ranks", std::int64_t{team.size()}},
                           {"processes", !team.threads()},
                           {"place", std::string(team.on_gpu() ? "gpu" : "cpu")},
                           {"path", options.path},
                           {"network", options.network},
                           {"routing", routing.source},
                           {"iterations", std::int64_t{options.iterations}}};
    for (const std::string& skipped : peers.skipped)
      document.parameters.emplace_back("skipped", skipped);
    for (std::size_t r = 0; r < lines.size(); ++r)
      for (Row& row : rows_of(options, lines[r], static_cast<int>(r), team.on_gpu()))
        document.rows.push_back(std::move(row));
    for (const PeerLine& line : peers.lines)
      for (Row& row : rows_of(options, line, lines[0].use)) document.rows.push_back(std::move(row));
    write_json(options.json, document);
  }
  return 0;
}

}  // namespace marrow::cli
