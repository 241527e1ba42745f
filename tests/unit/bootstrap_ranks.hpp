// SPDX-License-Identifier: Apache-2.0
// Ranks for bootstrap tests: threads of this process, or forked processes that can be killed and
// stopped.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/id.hpp"
#include "marrow/error.hpp"

namespace marrow::bootstrap::testing {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

inline std::vector<std::byte> bytes(const std::string& text) {
  auto raw = std::as_bytes(std::span(text));
  return {raw.begin(), raw.end()};
}
inline std::string text(std::span<const std::byte> raw) {
  return {reinterpret_cast<const char*>(raw.data()), raw.size()};
}

inline base::Deadline in(int ms) { return base::Deadline::after(milliseconds(ms)); }

inline Options options(int setup_ms = 10000, const char* peer_timeout = nullptr) {
  Options out;
  out.deadline = in(setup_ms);
  if (peer_timeout != nullptr) out.parameters.set("MARROW_PEER_TIMEOUT", peer_timeout);
  return out;
}

/// What a rank ended with.
struct Outcome {
  std::optional<Error> error;
  std::string what() const { return error ? error->what() : ""; }
  Code code() const { return error ? error->code() : Code::ok; }
};

/// Runs body(rank) on n threads and returns how each ended.
inline std::vector<Outcome> on_threads(int n, const std::function<void(int)>& body) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      base::log::ThreadRank name(r);
      try {
        body(r);
      } catch (const Error& error) {
        outcomes[static_cast<std::size_t>(r)].error = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

inline void expect_all_ok(const std::vector<Outcome>& outcomes) {
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].what(), "") << "rank " << r;
  }
}

/// Lines logged while it lives.
class LogLines {
 public:
  LogLines() {
    base::log::set_callback([this](auto, auto, std::string_view line) {
      std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { base::log::set_callback({}); }
  int count(const std::string& part) const {
    std::lock_guard lock(mutex_);
    int n = 0;
    for (const std::string& line : lines_) n += line.find(part) != std::string::npos;
    return n;
  }
  std::string all() const {
    std::lock_guard lock(mutex_);
    std::string out;
    for (const std::string& line : lines_) out += line + "\n";
    return out;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

/// Forked ranks. A child runs body(rank) and ends with its return value; 99 is an exception.
class Processes {
 public:
  using Body = std::function<int(int rank)>;
  Processes(int n, const Body& body) {
    for (int r = 0; r < n; ++r) start(r, body);
  }
  ~Processes() {
    for (std::size_t r = 0; r < pids_.size(); ++r) {
      if (pids_[r] < 0) continue;
      ::kill(pids_[r], SIGKILL);
      ::waitpid(pids_[r], nullptr, 0);
    }
  }
  void start(int rank, const Body& body) {
    pid_t pid = ::fork();
    if (pid == 0) {
      int status = 99;
      try {
        status = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(status);
    }
    pids_.push_back(pid);
  }
  void send(int rank, int signal) { ::kill(pids_[static_cast<std::size_t>(rank)], signal); }
  /// Exit status, or minus the signal that ended it.
  int wait(int rank) {
    int status = 0;
    pid_t& pid = pids_[static_cast<std::size_t>(rank)];
    ::waitpid(pid, &status, 0);
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  std::vector<pid_t> pids_;
};

/// False in a network namespace without any interface that is up: tests of TCP skip there.
inline bool loopback_works() {
  std::uint16_t port = 0;
  base::Fd listener = listen_tcp(loopback_address(), port);
  return connect_tcp({loopback_address(), port}).error != ENETUNREACH;
}

inline int entries(const char* directory_name) {
  int count = 0;
  DIR* directory = ::opendir(directory_name);
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

}  // namespace marrow::bootstrap::testing
