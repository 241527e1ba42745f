// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <unistd.h>

#include <cstdio>

#include "cli/text.hpp"

namespace marrow::cli {

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() { clear(); }

void Progress::at(const std::string& what) {
  const auto now = Clock::now();
  if (!terminal_ || now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - started_).count();
  std::fprintf(stderr, "\r\033[K%s (%.0f s)", what.c_str(), seconds);
  std::fflush(stderr);
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace marrow::cli
