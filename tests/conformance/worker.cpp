// SPDX-License-Identifier: Apache-2.0
// A worker process: reads rows from standard input, a line each, and answers each with a line on
// standard output. It has one rank, or all of them as threads; a failure is its last row.
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <mutex>
#include <sstream>
#include <thread>

#include "conformance/session.hpp"
#include "conformance/workers.hpp"

namespace marrow::conformance {
namespace {

/// A thread for each of our ranks; all take the same row at once.
class Crew {
 public:
  explicit Crew(const std::vector<int>& ranks) : problems_(ranks.size()) {
    for (std::size_t i = 0; i < ranks.size(); ++i)
      threads_.emplace_back([this, i, rank = ranks[i]] { serve(i, rank); });
  }
  ~Crew() { join(); }

  /// What the ranks say, a line each; empty when all is well.
  std::string run(const Row& row, const std::string& id_file) {
    std::unique_lock lock(mutex_);
    row_ = row;
    id_file_ = id_file;
    return turn(lock);
  }
  std::string close() {
    std::unique_lock lock(mutex_);
    over_ = true;
    return turn(lock);
  }

 private:
  std::string turn(std::unique_lock<std::mutex>& lock) {
    ++turn_;
    busy_ = threads_.size();
    changed_.notify_all();
    changed_.wait(lock, [&] { return busy_ == 0; });
    std::string all;
    for (const std::string& problem : problems_) all += problem.empty() ? "" : problem + "\n";
    return all;
  }
  void serve(std::size_t i, int rank) {
    Session session(rank);
    for (std::uint64_t seen = 0;; ++seen) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return turn_ > seen; });
      const bool last = over_;
      const Row row = row_;
      const std::string id_file = id_file_;
      lock.unlock();
      const std::string problem = last ? session.close() : session.run(row, id_file);
      lock.lock();
      problems_[i] = problem;
      if (--busy_ == 0) changed_.notify_all();
      if (last) return;
    }
  }
  void join() {
    if (!over_) (void)close();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Row row_;
  std::string id_file_;
  std::uint64_t turn_ = 0;
  std::size_t busy_ = 0;
  bool over_ = false;
  std::vector<std::string> problems_;
  std::vector<std::thread> threads_;
};

Row parse_row(const std::string& line) {
  Row row;
  std::istringstream words(line);
  std::string key, value;
  while (words >> key >> value) row.set(key.substr(2), value);
  return row;
}

}  // namespace

int work(int worker, const std::string& folder) {
  std::unique_ptr<Crew> crew;
  std::string line;
  for (int n = 0; std::getline(std::cin, line); ++n) {
    const Row row = parse_row(line);
    if (!crew) {
      std::vector<int> ranks{worker};
      if (worker < 0) {
        ranks.resize(row.number("ranks"));
        for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int>(r);
      }
      crew = std::make_unique<Crew>(ranks);
    }
    const std::string problem = crew->run(row, folder + "/id" + std::to_string(n));
    std::fputs(problem.c_str(), stderr);
    std::fflush(stderr);
    std::fputs(problem.empty() ? kWell : kFailed, stdout);
    std::fputc('\n', stdout);
    std::fflush(stdout);
    if (!problem.empty()) return 1;
  }
  const std::string problem = crew ? crew->close() : std::string();
  std::fputs(problem.c_str(), stderr);
  return problem.empty() ? 0 : 1;
}

}  // namespace marrow::conformance
