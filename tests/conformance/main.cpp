// SPDX-License-Identifier: Apache-2.0
// marrow_conformance: runs rows. The parent only starts workers and sleeps until they end or are late:
// a stuck case is killed and named, never waited for.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "conformance/machine.hpp"
#include "conformance/row.hpp"

#if !defined(MARROW_CONFORMANCE_GPU)
#define MARROW_CONFORMANCE_GPU 0
#endif

namespace marrow::conformance {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

#if defined(MARROW_SANITIZED)
constexpr int kRowSeconds = 50;
#else
constexpr int kRowSeconds = 40;
#endif

constexpr const char* kUsage =
    "usage: marrow_conformance [--KEY VALUE ...]                one row\n"
    "       marrow_conformance --matrix pairwise|full [...]     many; a KEY may name a comma list\n"
    "  --list             the cases and the keys\n"
    "  --rows             print the rows of the matrix, run none\n"
    "  --shard I/N        only every N-th row, from I on (0 to N-1)\n"
    "  --seconds N        start no row after N seconds\n"
    "  --row-seconds N    a row that takes longer is stuck\n"
    "  --matrix-seed N    another covering of the same pairs\n"
    "  --expect-failure   succeed when at least one row fails: for planted bugs\n"
    "  --verbose          a line a row\n";

struct Options {
  std::string matrix;
  std::vector<std::pair<std::string, std::string>> given;
  int shard = 0;
  int shards = 1;
  int seconds = 0;
  int row_seconds = kRowSeconds;
  std::uint64_t matrix_seed = 1;
  int worker = -2;  ///< -1: all ranks as threads
  std::string folder;
  bool list = false, rows = false, expect_failure = false, verbose = false;
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
      } else if (key == "row-seconds") {
        options.row_seconds = std::atoi(value.c_str());
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
    if (MARROW_CONFORMANCE_GPU) {
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
      for (const Case& c : cases()) list += (list.empty() ? "" : ",") + std::string(c.name);
    } else if (MARROW_CONFORMANCE_GPU) {
      if (std::strcmp(p.name, "block") == 0) list = "128";
      if (std::strcmp(p.name, "lanes") == 0) list = "1";
      if (std::strcmp(p.name, "far") == 0) list = "0";
      if (std::strcmp(p.name, "group") == 0) list = "block";
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
  const std::vector<Row> all = options.matrix == "full" ? product(columns, options.matrix_seed)
                                                        : pairwise(columns, options.matrix_seed);
  std::vector<Row> rows;
  for (std::size_t i = options.shard; i < all.size(); i += options.shards) {
    rows.push_back(all[i]);
    Row& row = rows.back();
    // Two processes on one GPU take turns in slices and spin through each other's.
    if (row.number("gpus") && row.number("ranks") > row.number("gpus")) row.set("as", "threads");
  }
  return rows;
}

int work(const Options& options) {
  Row row;
  for (const auto& [key, value] : options.given) row.set(key, value);
  const std::string id_file = options.folder + "/id";
  if (options.worker >= 0) {
    const std::string problem = run_rank(row, options.worker, id_file);
    if (!problem.empty()) std::fprintf(stderr, "%s\n", problem.c_str());
    return problem.empty() ? 0 : 1;
  }
  const int nranks = static_cast<int>(row.number("ranks"));
  std::vector<std::string> problems(nranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < nranks; ++rank) {
    threads.emplace_back([&, rank] { problems[rank] = run_rank(row, rank, id_file); });
  }
  for (std::thread& thread : threads) thread.join();
  int failed = 0;
  for (const std::string& problem : problems) {
    if (problem.empty()) continue;
    failed = 1;
    std::fprintf(stderr, "%s\n", problem.c_str());
  }
  return failed;
}

pid_t start_worker(const Row& row, int worker, const std::string& folder) {
  std::vector<std::string> words = row.arguments();
  words.insert(words.begin(),
               {"marrow_conformance", "--worker", std::to_string(worker), "--folder", folder});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string log = folder + "/log" + std::to_string(worker);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  const rlimit no_core{0, 0};  // windows are sparse, a core of one takes minutes
  (void)setrlimit(RLIMIT_CORE, &no_core);
  const int fd = open(log.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0) _exit(1);
  setenv("MARROW_CPU_LANES", row.text("lanes").c_str(), 1);
  setenv("MARROW_CPU_SEED", row.text("seed").c_str(), 1);
  if (!row.text("softnic").empty()) setenv("MARROW_SOFTNIC", row.text("softnic").c_str(), 1);
  execv("/proc/self/exe", argv.data());
  _exit(127);
}

/// What went wrong, or nothing.
std::string run_row(const Row& row, int row_seconds) {
  std::string folder =
      (std::filesystem::temp_directory_path() / "marrow-conformance-XXXXXX").string();
  if (!mkdtemp(folder.data())) return "no temporary folder at " + folder;
  const bool threads = row.is("as", "threads");
  const int workers = threads ? 1 : static_cast<int>(row.number("ranks"));
  std::vector<pid_t> children;
  for (int w = 0; w < workers; ++w) children.push_back(start_worker(row, threads ? -1 : w, folder));
  std::string problem;
  const auto deadline = Clock::now() + seconds(row_seconds);
  auto nap = std::chrono::microseconds(500);
  int left = workers;
  bool killed = false;
  while (left > 0) {
    for (int w = 0; w < workers; ++w) {
      int status = 0;
      if (children[w] <= 0 || waitpid(children[w], &status, WNOHANG) != children[w]) continue;
      children[w] = -1;
      --left;
      if (status == 0 || killed) continue;
      problem += "worker " + std::to_string(w) +
                 (WIFSIGNALED(status) ? " died of signal " + std::to_string(WTERMSIG(status))
                                      : " ended with " + std::to_string(WEXITSTATUS(status))) +
                 "\n";
    }
    if (left > 0 && !killed && Clock::now() > deadline) {
      killed = true;
      problem += "stuck for " + std::to_string(row_seconds) + " s, killed\n";
      for (const pid_t child : children) {
        if (child > 0) kill(child, SIGKILL);
      }
    }
    if (left > 0) std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::microseconds(5000));
  }
  if (!problem.empty()) {
    for (int w = 0; w < workers; ++w) {
      std::ifstream log(folder + "/log" + std::to_string(threads ? -1 : w));
      problem += std::string{std::istreambuf_iterator<char>(log), {}};
    }
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return problem;
}

int run_all(const Options& options) {
  if (MARROW_CONFORMANCE_GPU && !options.rows && gpu_count() == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  const std::vector<Row> rows = rows_of(options);
  const auto start = Clock::now();
  int passed = 0;
  int failed = 0;
  int skipped = 0;
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
    const std::string problem = run_row(row, options.row_seconds);
    const double took = std::chrono::duration<double>(Clock::now() - began).count();
    (problem.empty() ? passed : failed)++;
    if (options.verbose)
      std::printf("%s %6.2f s  %s\n", problem.empty() ? "ok  " : "FAIL", took, row.line().c_str());
    if (!problem.empty()) {
      std::printf("FAIL: %s\n  promise: %s\n  repeat: marrow_conformance%s %s\n%s",
                  row.text("case").c_str(), row.which().promise,
                  MARROW_CONFORMANCE_GPU ? "_gpu" : "", row.line().c_str(),
                  problem.substr(0, 12000).c_str());
      if (options.expect_failure) break;
    }
    std::fflush(stdout);
    if (failed >= 20) break;  // it is broken, and each row may take its full time
  }
  if (options.rows) return 0;
  std::printf("%d passed, %d failed%s in %.1f s\n", passed, failed,
              skipped ? (", " + std::to_string(skipped) + " not started").c_str() : "",
              std::chrono::duration<double>(Clock::now() - start).count());
  if (options.expect_failure) return failed ? 0 : 1;
  if (rows.empty()) {
    std::printf("no row has these values together\n");
    return 1;
  }
  return failed ? 1 : 0;
}

}  // namespace

int run_main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.list) {
      print_list();
      return 0;
    }
    return options.worker >= -1 ? work(options) : run_all(options);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "marrow_conformance: %s. Next: --list shows the options.\n",
                 error.what.c_str());
    return 2;
  }
}

}  // namespace marrow::conformance

int main(int argc, char** argv) { return marrow::conformance::run_main(argc, argv); }
