// SPDX-License-Identifier: Apache-2.0
// The parent's side of worker processes: they get row after row, and one that is stuck or dies is
// named with the row it was at. Nothing here waits without a deadline.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "conformance/row.hpp"

namespace marrow::conformance {

inline constexpr const char* kWell = "well";
inline constexpr const char* kFailed = "failed";

/// What a worker process does: main() of `--worker`. `worker` is its rank; -1: all ranks, as threads.
int work(int worker, const std::string& folder);

/// The processes of one worker_key.
class Workers {
 public:
  explicit Workers(const Row& first);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Whether these processes can run it.
  bool serves(const Row& row) const { return row.number("ranks") && key_ == worker_key(row); }
  int rows() const { return rows_; }

  /// What went wrong, or nothing. After a failure the processes are gone.
  std::string run(const Row& row, std::chrono::seconds limit);
  /// Lets them close what they have and end.
  std::string finish(std::chrono::seconds limit);

 private:
  struct Process {
    pid_t pid = -1;
    int to = -1;    ///< its standard input
    int from = -1;  ///< its standard output
    bool answered = false;
    std::string log;
    long seen = 0;  ///< of the log, before this row
  };
  void start(const Row& row, int worker);
  bool read_answer(Process& process, std::string* problem);
  /// Waits for processes to end until the deadline, then kills them.
  std::string end(std::chrono::steady_clock::time_point deadline);
  std::string logs() const;

  std::string key_;
  std::string folder_;
  std::vector<Process> processes_;
  int rows_ = 0;
};

}  // namespace marrow::conformance
