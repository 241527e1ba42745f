// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <unistd.h>

#include <cstdio>

namespace marrow::cli {
namespace {
constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::milliseconds kRedraw{250};

void erase_line() {
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}
}  // namespace

Progress::Progress() {
  if (isatty(STDERR_FILENO) == 1) thread_ = std::thread([this] { draw(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  end_.notify_one();
  thread_.join();
  if (drawn_) erase_line();
}

void Progress::at(const std::string& what) {
  if (!thread_.joinable()) return;
  std::lock_guard lock(mutex_);
  what_ = what;
}

void Progress::clear() {
  std::lock_guard lock(mutex_);
  what_.clear();
  if (drawn_) erase_line();
  drawn_ = false;
}

void Progress::draw() {
  std::unique_lock lock(mutex_);
  auto next = started_ + kPatience;
  while (!end_.wait_until(lock, next, [&] { return ending_; })) {
    next = std::chrono::steady_clock::now() + kRedraw;
    if (what_.empty()) continue;
    const auto waited = std::chrono::steady_clock::now() - started_;
    std::fprintf(stderr, "\r\033[K%s (%.0f s)", what_.c_str(),
                 std::chrono::duration<double>(waited).count());
    std::fflush(stderr);
    drawn_ = true;
  }
}

}  // namespace marrow::cli
