// SPDX-License-Identifier: Apache-2.0
// One line on a terminal's stderr while something takes longer than two seconds; nothing otherwise.
#pragma once

#include <chrono>
#include <string>

namespace marrow::cli {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Say what is being done. Cheap: redraws at most ten times a second. One thread.
  void at(const std::string& what);
  /// Removes the line; the next at() may draw it again.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point started_ = Clock::now();
  Clock::time_point next_ = started_ + std::chrono::seconds(2);
};

}  // namespace marrow::cli
