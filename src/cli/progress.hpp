// SPDX-License-Identifier: Apache-2.0
// One line on a terminal's stderr while something takes longer than two seconds; nothing otherwise.
// A thread draws it, because what takes long is often one kernel.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace marrow::cli {

class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Say what is being done now. Any thread.
  void at(const std::string& what);
  /// Removes the line before other output; the next at() may draw it again.
  void clear();

 private:
  void draw();

  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable end_;
  std::string what_;  ///< empty: nothing to show
  bool drawn_ = false;
  bool ending_ = false;
  std::thread thread_;  ///< only with a terminal
};

}  // namespace marrow::cli
