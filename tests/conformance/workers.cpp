// SPDX-License-Identifier: Apache-2.0
#include "conformance/workers.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace marrow::conformance {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

/// So long the others may take once one has failed: they hear of it, or run into their own limits.
constexpr seconds kOthers{20};

void shut(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

}  // namespace

Workers::Workers(const Row& first) : key_(worker_key(first)) {
  folder_ = (std::filesystem::temp_directory_path() / "marrow-conformance-XXXXXX").string();
  if (!mkdtemp(folder_.data())) throw std::runtime_error("no temporary folder at " + folder_);
  signal(SIGPIPE, SIG_IGN);  // a worker that died is found out by its answer
  const bool threads = first.is("as", "threads");
  const int workers = threads ? 1 : static_cast<int>(first.number("ranks"));
  for (int w = 0; w < workers; ++w) start(first, threads ? -1 : w);
}

Workers::~Workers() {
  (void)end(Clock::now());
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void Workers::start(const Row& row, int worker) {
  Process process;
  process.log = folder_ + "/log" + std::to_string(worker);
  int to[2];
  int from[2];
  if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0)
    throw std::runtime_error("no pipe to a worker");
  std::vector<std::string> words = {"marrow_conformance", "--worker", std::to_string(worker),
                                    "--folder", folder_};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  process.pid = fork();
  if (process.pid == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    signal(SIGPIPE, SIG_DFL);
    const rlimit no_core{0, 0};  // windows are sparse, a core of one takes minutes
    (void)setrlimit(RLIMIT_CORE, &no_core);
    const int log = open(process.log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0 || dup2(to[0], 0) < 0 || dup2(from[1], 1) < 0 || dup2(log, 2) < 0) _exit(1);
    if (!row.number("gpus")) {
      setenv("MARROW_CPU_LANES", row.text("lanes").c_str(), 1);
      setenv("MARROW_CPU_SEED", row.text("seed").c_str(), 1);
    } else {
      // A kernel that spins for another one must not hold up that one's loading or launch.
      setenv("CUDA_MODULE_LOADING", "EAGER", 0);
      setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    }
    if (!row.text("softnic").empty()) setenv("MARROW_SOFTNIC", row.text("softnic").c_str(), 1);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  shut(to[0]);
  shut(from[1]);
  process.to = to[1];
  process.from = from[0];
  processes_.push_back(process);
}

/// True when there is nothing more to expect of it for this row.
bool Workers::read_answer(Process& process, std::string* problem) {
  char text[4096];
  const ssize_t got = read(process.from, text, sizeof(text));
  if (got > 0) {
    const std::string answer(text, static_cast<std::size_t>(got));
    if (answer == std::string(kWell) + "\n") return true;
    if (answer != std::string(kFailed) + "\n") *problem += "a worker says: " + answer;
    if (problem->empty()) *problem = "failed\n";
    return answer.find(kWell) != std::string::npos || answer.find(kFailed) != std::string::npos;
  }
  if (problem->empty()) *problem = "a worker ended\n";
  return true;
}

std::string Workers::run(const Row& row, seconds limit) {
  ++rows_;
  const std::string line = row.line() + "\n";
  std::string problem;
  for (Process& process : processes_) {
    std::error_code none;
    const auto size = std::filesystem::file_size(process.log, none);
    process.seen = none ? 0 : static_cast<long>(size);
    process.answered = false;
    if (write(process.to, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      problem = "a worker had ended before the row\n";
  }
  auto deadline = Clock::now() + limit;
  while (true) {
    std::vector<pollfd> wanted;
    std::vector<Process*> whose;
    for (Process& process : processes_) {
      if (process.answered) continue;
      wanted.push_back({process.from, POLLIN, 0});
      whose.push_back(&process);
    }
    if (wanted.empty()) break;
    if (!problem.empty()) deadline = std::min(deadline, Clock::now() + kOthers);
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      problem += problem.empty() ? "stuck for " + std::to_string(limit.count()) + " s, killed\n"
                                 : "others were stuck after that, killed\n";
      for (const Process& process : processes_) kill(process.pid, SIGKILL);
      break;
    }
    if (poll(wanted.data(), wanted.size(), static_cast<int>(std::min<long>(left, 1000))) <= 0)
      continue;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i].revents) whose[i]->answered = read_answer(*whose[i], &problem);
    }
  }
  if (problem.empty()) return {};
  problem += end(Clock::now() + seconds(5));
  return problem + logs();
}

std::string Workers::finish(seconds limit) {
  for (Process& process : processes_) {
    std::error_code none;
    const auto size = std::filesystem::file_size(process.log, none);
    process.seen = none ? 0 : static_cast<long>(size);
  }
  std::string problem = end(Clock::now() + limit);
  if (problem.empty()) return {};
  return "after its last row, " + problem + logs();
}

std::string Workers::end(Clock::time_point deadline) {
  for (Process& process : processes_) shut(process.to);
  std::string problem;
  bool killed = false;
  auto nap = std::chrono::microseconds(500);
  while (true) {
    bool all = true;
    for (std::size_t w = 0; w < processes_.size(); ++w) {
      Process& process = processes_[w];
      if (process.pid <= 0) continue;
      int status = 0;
      if (waitpid(process.pid, &status, WNOHANG) != process.pid) {
        all = false;
        continue;
      }
      process.pid = -1;
      if (status == 0 || killed) continue;
      problem += "worker " + std::to_string(w) +
                 (WIFSIGNALED(status) ? " died of signal " + std::to_string(WTERMSIG(status))
                                      : " ended with " + std::to_string(WEXITSTATUS(status))) +
                 "\n";
    }
    if (all) break;
    if (!killed && Clock::now() >= deadline) {
      killed = true;
      problem += "a worker did not end, killed\n";
      for (const Process& process : processes_) {
        if (process.pid > 0) kill(process.pid, SIGKILL);
      }
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::microseconds(5000));
  }
  for (Process& process : processes_) shut(process.from);
  return problem;
}

std::string Workers::logs() const {
  std::string all;
  for (const Process& process : processes_) {
    std::ifstream log(process.log);
    log.seekg(process.seen);
    all += std::string{std::istreambuf_iterator<char>(log), {}};
  }
  return all;
}

}  // namespace marrow::conformance
