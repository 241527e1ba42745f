// SPDX-License-Identifier: Apache-2.0
// marrow_conformance: runs rows. The parent only starts workers, hands them rows and sleeps until they answer
// or are late: a stuck case is killed and named, never waited for, and the next row gets new workers.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "conformance/machine.hpp"
#include "conformance/workers.hpp"

namespace marrow::conformance {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

#if defined(MARROW_SANITIZED)
constexpr int kRowSeconds = 50;
#else
constexpr int kRowSeconds = 40;
#endif
// On a GPU a process takes as long to start as twenty rows do.
constexpr int kBatch = kGpu ? 1000 : 16;

constexpr const char* kUsage =
    "usage: marrow_conformance [--KEY VALUE ...]                one row\n"
    "       marrow_conformance --matrix pairwise|full [...]     many; a KEY may name a comma list\n"
    "  --list             the cases and the keys\n"
    "  --rows             print the rows of the matrix, run none\n"
    "  --shard I/N        only every N-th row, from I on (0 to N-1)\n"
    "  --each KEY         the matrix once for each value of KEY\n"
    "  --batch N          rows that one process runs, one after the other\n"
    "  --seconds N        start no row after N seconds\n"
    "  --least N          fewer rows than that which passed are a failure\n"
    "  --row-seconds N    a row that takes longer is stuck\n"
    "  --matrix-seed N    another covering of the same pairs\n"
    "  --expect-failure   succeed when at least one row fails: for planted bugs\n"
    "  --verbose          a line a row\n"
    "  --totals           a line for each path, kind of ranks and memory\n"
    "  --json FILE        those totals as rows of bench/schema.json\n";

struct Options {
  std::string matrix;
  std::vector<std::pair<std::string, std::string>> given;
  int shard = 0;
  int shards = 1;
  int seconds = 0;
  int least = 0;
  int row_seconds = kRowSeconds;
  int batch = kBatch;
  std::string each;
  std::string json;
  std::uint64_t matrix_seed = 1;
  int worker = -2;  ///< -1: all ranks as threads
  std::string folder;
  bool list = false, rows = false, expect_failure = false, verbose = false, totals = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) throw UsageError{"unexpected argument " + word};
    const std::string key = word.substr(2);
    if (key == "list" || key == "help") {
      options.list = true;
    } else if (key == "rows") {
      options.rows = true;
    } else if (key == "expect-failure") {
      options.expect_failure = true;
    } else if (key == "verbose") {
      options.verbose = true;
    } else if (key == "totals") {
      options.totals = true;
    } else if (i + 1 >= argc) {
      throw UsageError{word + " needs a value"};
    } else {
      const std::string value = argv[++i];
      if (key == "matrix") {
        if (value != "pairwise" && value != "full")
          throw UsageError{"--matrix takes pairwise or full, not " + value};
        options.matrix = value;
      } else if (key == "shard") {
        if (std::sscanf(value.c_str(), "%d/%d", &options.shard, &options.shards) != 2 ||
            options.shards < 1) {
          throw UsageError{"--shard takes I/N, not " + value};
        }
      } else if (key == "seconds") {
        options.seconds = std::atoi(value.c_str());
      } else if (key == "least") {
        options.least = std::atoi(value.c_str());
      } else if (key == "row-seconds") {
        options.row_seconds = std::atoi(value.c_str());
      } else if (key == "batch") {
        options.batch = std::max(1, std::atoi(value.c_str()));
      } else if (key == "each") {
        options.each = value;
      } else if (key == "json") {
        options.json = value;
      } else if (key == "matrix-seed") {
        options.matrix_seed = std::strtoull(value.c_str(), nullptr, 0);
      } else if (key == "worker") {
        options.worker = std::atoi(value.c_str());
      } else if (key == "folder") {
        options.folder = value;
      } else {
        options.given.emplace_back(key, value);
      }
    }
  }
  return options;
}

void print_list() {
  std::fputs(kUsage, stdout);
  std::puts("\ncases:");
  for (const Case& c : cases()) std::printf("  %-16s %s\n", c.name, c.promise);
  std::puts("\nkeys:");
  for (const Parameter& p : parameters()) {
    std::printf("  --%-12s %-10s %s\n", p.name, *p.value ? p.value : "-", p.help);
  }
}

std::vector<Row> rows_of(const Options& options) {
  if (options.matrix.empty()) {
    Row row;
    if (kGpu) {
      row.set("gpus", std::to_string(gpu_count()));
      row.set("block", "128");
    }
    for (const auto& [key, value] : options.given) row.set(key, value);
    return {row};
  }
  Columns columns;
  for (const Parameter& p : parameters()) {
    std::string list = p.matrix;
    if (std::strcmp(p.name, "case") == 0) {
      for (const Case& c : cases()) {
        if (!(c.traits & kSelfTest)) list += (list.empty() ? "" : ",") + std::string(c.name);
      }
    } else if (kGpu) {
      if (std::strcmp(p.name, "block") == 0) list = "32,128";
      if (std::strcmp(p.name, "lanes") == 0) list = "1";
      if (std::strcmp(p.name, "bytes") == 0) list += ",65552";  // enough for bulk copies
      if (std::strcmp(p.name, "memory") == 0) list = "device,host";
      if (std::strcmp(p.name, "gpus") == 0) list = std::to_string(gpu_count());
    }
    for (const auto& [key, value] : options.given) {
      if (key == p.name) list = value;
    }
    columns.emplace_back(p.name, split(list));
    for (const std::string& value : columns.back().second) Row().set(p.name, value);
  }
  for (const auto& [key, value] : options.given) {
    if (key != "case") Row().set(key, value);  // an unknown key is an error here too
  }
  const auto covering = [&](const Columns& c) {
    return options.matrix == "full" ? product(c, options.matrix_seed)
                                    : pairwise(c, options.matrix_seed);
  };
  std::vector<Row> all;
  if (options.each.empty()) {
    all = covering(columns);
  } else {
    if (std::none_of(columns.begin(), columns.end(),
                     [&](const auto& column) { return column.first == options.each; }))
      throw UsageError{"--each takes a key, not " + options.each};
    for (auto& [key, values] : columns) {
      if (key != options.each) continue;
      const std::vector<std::string> listed = values;
      for (const std::string& value : listed) {
        values = {value};
        for (Row& row : covering(columns)) all.push_back(std::move(row));
      }
    }
  }
  std::vector<Row> rows;
  for (std::size_t i = options.shard; i < all.size(); i += options.shards) {
    if (!possible(all[i])) continue;
    rows.push_back(all[i]);
    Row& row = rows.back();
    // Two processes on one GPU take turns in slices and spin through each other's.
    if (row.number("gpus") && row.number("ranks") > row.number("gpus")) row.set("as", "threads");
  }
  return rows;
}

/// Counts rows and says what failed.
class Verdicts {
 public:
  explicit Verdicts(const Options& options) : options_(options) {}

  void row(const Row& row, const std::string& problem, double seconds) {
    (problem.empty() ? passed_ : failed_)++;
    auto& [passed, failed] =
        by_path_[row.text("path") + "," + row.text("as") + "," + row.text("memory")];
    (problem.empty() ? passed : failed)++;
    if (options_.verbose)
      std::printf("%s %6.3f s  %s\n", problem.empty() ? "ok  " : "FAIL", seconds,
                  row.line().c_str());
    if (!problem.empty()) {
      std::printf("FAIL: %s\n  promise: %s\n  repeat: marrow_conformance%s %s\n%s",
                  row.text("case").c_str(), row.which().promise, kGpu ? "_gpu" : "",
                  row.line().c_str(), problem.substr(0, 12000).c_str());
    }
    std::fflush(stdout);
  }
  int failed() const { return failed_; }
  int passed() const { return passed_; }
  void print(int not_started, double seconds) const {
    if (options_.totals) {
      for (const auto& [key, counts] : by_path_)
        std::printf("  %-28s %5d passed, %d failed\n", key.c_str(), counts.first, counts.second);
    }
    std::printf("%d passed, %d failed%s in %.1f s\n", passed_, failed_,
                not_started ? (", " + std::to_string(not_started) + " not started").c_str() : "",
                seconds);
  }
  /// Rows of bench/schema.json, without what is around them.
  void write(const std::string& file, int not_started) const {
    std::ofstream out(file);
    out << "[";
    const char* comma = "";
    for (const auto& [key, counts] : by_path_) {
      const std::vector<std::string> names = split(key);
      const int all = counts.first + counts.second;
      out << comma << "\n{\"what\":\"conformance: rows passed\",\"unit\":\"count\",";
      if (names[0] != "mixed") out << "\"path\":\"" << names[0] << "\",";
      const bool nic = names[0] == "gda" || names[0] == "mixed";
      out << "\"kind\":\"" << kind_of(names[0])
          << "\",\"devices\":[{\"role\":\"kernels\",\"device\":\"" << (kGpu ? "gpu" : "cpu device")
          << "\",\"name\":\"\"}"
          << (nic ? ",{\"role\":\"NIC\",\"device\":\"softnic\",\"name\":\"\"}" : "")
          << "],\"parameters\":{\"paths\":\"" << names[0] << "\",\"ranks_as\":\"" << names[1]
          << "\",\"memory\":\"" << names[2] << "\",\"rows\":" << all
          << ",\"not_started\":" << not_started << "},\"statistics\":{\"count\":1";
      for (const char* what : {"min", "median", "mean", "p99", "max"})
        out << ",\"" << what << "\":" << counts.first;
      out << ",\"stddev\":0},\"verified\":" << (counts.second ? "false" : "true") << ",\"note\":\""
          << counts.second << " failed\"}";
      comma = ",";
    }
    out << "\n]\n";
  }

 private:
  const Options& options_;
  int passed_ = 0;
  int failed_ = 0;
  std::map<std::string, std::pair<int, int>> by_path_;
};

/// Runs the row with workers that are there, or new ones; after a failure there are none.
std::string run_row(const Row& row, const Options& options, std::unique_ptr<Workers>& workers) {
  const seconds limit(options.row_seconds);
  if (workers && (!workers->serves(row) || workers->rows() >= options.batch)) {
    const std::string problem = workers->finish(limit);
    workers.reset();
    if (!problem.empty()) return "the row before this one ended badly: " + problem;
  }
  if (!workers) workers = std::make_unique<Workers>(row);
  const int before = workers->rows();
  std::string problem = workers->run(row, limit);
  if (problem.empty()) return {};
  workers.reset();
  if (before == 0 || options.expect_failure) return problem;
  Workers alone(row);
  std::string again = alone.run(row, limit);
  if (again.empty()) again = alone.finish(limit);
  return problem + "It was row " + std::to_string(before + 1) + " of its process. Alone it " +
         (again.empty() ? "passes.\n" : "fails too.\n");
}

int run_all(const Options& options) {
  if (kGpu && !options.rows && gpu_count() == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  const std::vector<Row> rows =
      in_batches(rows_of(options), static_cast<std::size_t>(options.batch));
  const auto start = Clock::now();
  const auto since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  Verdicts verdicts(options);
  std::unique_ptr<Workers> workers;
  int skipped = 0;
  Row last;
  for (const Row& row : rows) {
    if (options.rows) {
      std::printf("%s\n", row.line().c_str());
      continue;
    }
    if (options.seconds && Clock::now() - start > seconds(options.seconds)) {
      ++skipped;
      continue;
    }
    const auto began = Clock::now();
    const std::string problem = run_row(row, options, workers);
    verdicts.row(row, problem, since(began));
    last = row;
    if (options.expect_failure && verdicts.failed()) break;
    if (verdicts.failed() >= 20) break;  // it is broken, and each row may take its full time
  }
  if (options.rows) return 0;
  if (workers) {
    const std::string problem = workers->finish(seconds(options.row_seconds));
    if (!problem.empty()) verdicts.row(last, problem, 0);
  }
  verdicts.print(skipped, since(start));
  if (!options.json.empty()) verdicts.write(options.json, skipped);
  if (options.expect_failure) return verdicts.failed() ? 0 : 1;
  if (rows.empty()) {
    std::printf("no row has these values together\n");
    return 1;
  }
  if (verdicts.passed() < options.least) {
    std::printf("at least %d rows have to pass\n", options.least);
    return 1;
  }
  return verdicts.failed() ? 1 : 0;
}

}  // namespace

int run_main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.list) {
      print_list();
      return 0;
    }
    return options.worker >= -1 ? work(options.worker, options.folder) : run_all(options);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "marrow_conformance: %s. Next: --list shows the options.\n",
                 error.what.c_str());
    return 2;
  }
}

}  // namespace marrow::conformance

int main(int argc, char** argv) { return marrow::conformance::run_main(argc, argv); }
