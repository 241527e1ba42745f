// SPDX-License-Identifier: Apache-2.0
// marrow-test: tsan-all asan-all
// Levels, subsystems, file names, one write per line; a full disk or a closed pipe loses lines,
// never the job.
#include "base/log.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "base/fd.hpp"

namespace marrow::base {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class Log : public ::testing::Test {
 protected:
  void configure(const char* level, const char* subsystems, const char* file = "") {
    ::setenv("MARROW_DEBUG", level, 1);
    ::setenv("MARROW_DEBUG_SUBSYS", subsystems, 1);
    ::setenv("MARROW_DEBUG_FILE", file, 1);
    log::reload();
  }
  void capture() {
    log::set_callback(
        [this](log::Level, log::Subsystem, std::string_view line) { lines_.emplace_back(line); });
  }
  void TearDown() override {
    log::set_callback({});
    configure("", "");
  }
  std::vector<std::string> lines_;
};

TEST_F(Log, WarnIsTheDefaultAndCarriesFileAndLine) {
  capture();
  configure("", "");
  MARROW_INFO(net, "not wanted");
  MARROW_WARN(net, "peer ", 3, " is slow");
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_THAT(lines_[0], MatchesRegex("[^:]+:[0-9]+:[0-9]+ MARROW WARN base_log_test.cpp:[0-9]+ "
                                      "peer 3 is slow"));
}

TEST_F(Log, PartsAreNotEvaluatedWhenOff) {
  capture();
  configure("WARN", "");
  int evaluated = 0;
  MARROW_TRACE(net, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST_F(Log, SubsystemsSelectAndInvert) {
  capture();
  configure("info", "init,NET");
  MARROW_INFO(net, "a");
  MARROW_INFO(proxy, "b");
  EXPECT_EQ(lines_.size(), 1u);
  configure("TRACE", "^NET");
  MARROW_TRACE(net, "c");
  MARROW_TRACE(proxy, "d");
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_THAT(lines_[1], HasSubstr("MARROW TRACE d"));
  configure("NONE", "");
  MARROW_WARN(net, "e");
  EXPECT_EQ(lines_.size(), 2u);
}

TEST_F(Log, BadSettingsWarnInsteadOfFailing) {
  capture();
  configure("LOUD", "");
  configure("WARN", "init,nets");
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_THAT(lines_[0], HasSubstr("LOUD is none of"));
  EXPECT_THAT(lines_[1], HasSubstr("\"NETS\"; known are ALL, INIT"));
}

TEST_F(Log, TheRankOfTheThreadIsShown) {
  capture();
  configure("WARN", "");
  {
    log::ThreadRank rank(5);
    MARROW_WARN(net, "x");
  }
  MARROW_WARN(net, "y");
  EXPECT_THAT(lines_[0], HasSubstr(" [5] MARROW WARN"));
  EXPECT_THAT(lines_[1], ::testing::Not(HasSubstr("[5]")));
}

TEST_F(Log, LinesOfManyThreadsDoNotInterleaveInTheFile) {
  std::string path = ::testing::TempDir() + "marrow_log_%p.txt";
  std::string real = ::testing::TempDir() + "marrow_log_" + std::to_string(::getpid()) + ".txt";
  configure("INFO", "", path.c_str());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) MARROW_INFO(net, "thread ", t, " says ", std::string(200, 'x'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::ifstream file(real);
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    EXPECT_THAT(line, MatchesRegex(".* MARROW INFO thread [0-9] says x+"));
    ++count;
  }
  EXPECT_EQ(count, 200);
  ::unlink(real.c_str());
}

TEST_F(Log, AFullDiskDropsLinesAndCountsThem) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  std::uint64_t before = log::dropped();
  configure("WARN", "", "/dev/full");
  MARROW_WARN(net, "lost");
  EXPECT_EQ(log::dropped(), before + 1);
}

TEST_F(Log, AClosedPipeDropsLinesAndDoesNotKill) {
  configure("WARN", "");
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  Fd reader(pipe_fds[0]);
  Fd writer(pipe_fds[1]);
  Fd saved_stderr = Fd::dup_of(STDERR_FILENO);
  ASSERT_EQ(::dup2(writer.get(), STDERR_FILENO), STDERR_FILENO);
  reader.close();
  std::uint64_t before = log::dropped();
  MARROW_WARN(net, "nobody reads this");
  ::dup2(saved_stderr.get(), STDERR_FILENO);
  EXPECT_EQ(log::dropped(), before + 1);
}

TEST_F(Log, ACallbackThatThrowsIsSwallowed) {
  configure("WARN", "");
  log::set_callback([](log::Level, log::Subsystem, std::string_view) { throw 1; });
  std::uint64_t before = log::dropped();
  MARROW_WARN(net, "x");
  EXPECT_EQ(log::dropped(), before + 1);
}

}  // namespace
}  // namespace marrow::base
