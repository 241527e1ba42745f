// SPDX-License-Identifier: Apache-2.0
// Progress shows on a terminal after two seconds, while the caller is busy, and goes away.
#include "cli/progress.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <string>

namespace marrow::cli {
namespace {

/// stderr is the given descriptor while it lives.
class StderrIs {
 public:
  explicit StderrIs(int fd) : before_(dup(STDERR_FILENO)) { dup2(fd, STDERR_FILENO); }
  ~StderrIs() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }

 private:
  int before_;
};

std::string drain(int fd) {
  fcntl(fd, F_SETFL, O_NONBLOCK);
  std::string text;
  char part[256];
  for (ssize_t n; (n = read(fd, part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(n));
  return text;
}

TEST(Progress, ATerminalSeesLongWorkOnly) {
  int terminal = -1, ours = -1;
  ASSERT_EQ(openpty(&ours, &terminal, nullptr, nullptr, nullptr), 0);
  {
    const StderrIs redirected(terminal);
    {
      Progress quick;
      quick.at("quick");
    }
    EXPECT_EQ(drain(ours), "");
    {
      Progress slow;
      slow.at("wave 1 of 7");
      std::this_thread::sleep_for(std::chrono::milliseconds(3000));  // one long kernel
    }
  }
  const std::string text = drain(ours);
  EXPECT_NE(text.find("wave 1 of 7 ("), std::string::npos) << text;
  EXPECT_EQ(text.substr(text.size() - 4), "\r\033[K");
  close(ours);
  close(terminal);
}

TEST(Progress, APipeSeesNothing) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    const StderrIs redirected(ends[1]);
    Progress slow;
    slow.at("wave 1 of 7");
    std::this_thread::sleep_for(std::chrono::milliseconds(2300));
  }
  EXPECT_EQ(drain(ends[0]), "");
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace marrow::cli
