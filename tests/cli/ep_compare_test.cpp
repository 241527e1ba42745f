// SPDX-License-Identifier: Apache-2.0
// What the tests of the two generations of DeepEP print, read; and what cannot be run, said.
#include "cli/ep_compare.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

namespace marrow::cli {
namespace {

constexpr const char* kFirst =
    "Allocating buffer size: 1827.8 MB ...\n"
    "[rank 1] Dispatch + combine bandwidth: 230.10 GB/s, avg_t=96.00 us, min_t=94.10 us, "
    "max_t=99.00 us\n"
    "[rank 1] Dispatch bandwidth: 228.10 GB/s, avg_t=33.12 us | Combine bandwidth: 257.00 GB/s, "
    "avg_t=57.01 us\n"
    "[rank 0] Dispatch bandwidth: 229.00 GB/s, avg_t=33.00 us | Combine bandwidth: 258.00 GB/s, "
    "avg_t=56.90 us\n"
    "[rank 0] Dispatch bandwidth: 1.00 GB/s, avg_t=99.00 us | Combine bandwidth: 1.00 GB/s, "
    "avg_t=99.00 us\n"
    "[rank 0] Dispatch send/recv time: 12.00 + 20.00 us | Combine send/recv time: 20.00 + 30.00 "
    "us\n";

constexpr const char* kSecond =
    "   * EP:   0/4 | dispatch: 0 GB/s (SO), 350 GB/s (SU), 17.200 us, 123 bytes | copy: 900 GB/s, "
    "7.900 us\n"
    "   - EP:   0/4 | expanded dispatch: 0 GB/s (SO), 340 GB/s (SU), 17.000 us, 123 bytes | copy: "
    "900 GB/s, 8.000 us\n"
    "   # EP:   0/4 | cached dispatch: 0 GB/s (SO), 330 GB/s (SU), 1.000 us, 123 bytes | copy: 900 "
    "GB/s, 1.000 us\n"
    "   @ EP:   0/4 | combine: 0 GB/s (SO), 320 GB/s (SU), 20.000 us, 456 bytes | reduce: 800 "
    "GB/s, 9.000 us\n"
    "   + EP:   0/4 | reduced combine: 0 GB/s (SO), 310 GB/s (SU), 30.000 us, 456 bytes | reduce: "
    "800 GB/s, 13.000 us\n"
    "   - EP:   0/4 | expanded dispatch: 0 GB/s (SO), 1 GB/s (SU), 1.000 us, 123 bytes | copy: 1 "
    "GB/s, 1.000 us\n";

TEST(EpCompare, ReadsTheFirstGeneration) {
  const std::vector<PeerLine> lines = read_deepep(kFirst);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].library, "DeepEP V1");
  EXPECT_EQ(lines[0].rank, 0);
  EXPECT_DOUBLE_EQ(lines[0].dispatch_us, 33.0);
  EXPECT_DOUBLE_EQ(lines[0].combine_us, 56.9);
  EXPECT_DOUBLE_EQ(lines[1].dispatch_gbs, 228.1);
  EXPECT_DOUBLE_EQ(lines[1].combine_gbs, 257.0);
}

TEST(EpCompare, ReadsTheSecondGenerationWithItsEpilogues) {
  const std::vector<PeerLine> lines = read_deepep(kSecond);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].library, "DeepEP V2");
  EXPECT_DOUBLE_EQ(lines[0].dispatch_us, 25.0);
  EXPECT_DOUBLE_EQ(lines[0].dispatch_gbs, 340.0);
  EXPECT_DOUBLE_EQ(lines[0].combine_us, 43.0);
}

TEST(EpCompare, KeepsRanksApartThatShareALine) {
  const auto joined = [](std::string text) {
    std::erase(text, '\n');
    return text;
  };
  std::vector<PeerLine> lines = read_deepep(joined(kFirst));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_DOUBLE_EQ(lines[0].dispatch_us, 33.0);
  EXPECT_DOUBLE_EQ(lines[0].combine_us, 56.9);
  EXPECT_DOUBLE_EQ(lines[1].dispatch_us, 33.12);
  EXPECT_DOUBLE_EQ(lines[1].combine_us, 57.01);
  lines = read_deepep(joined(kSecond));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_DOUBLE_EQ(lines[0].dispatch_us, 25.0);
  EXPECT_DOUBLE_EQ(lines[0].combine_us, 43.0);
}

TEST(EpCompare, RunsWhatIsThereAndSaysWhatIsNot) {
  std::string folder = (std::filesystem::temp_directory_path() / "marrow deepep-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::filesystem::create_directories(folder + "/tests/legacy");
  std::ofstream(folder + "/tests/legacy/test_low_latency.py")
      << "import sys\nassert sys.argv[1:3] == ['--num-processes', '4']\nprint('''" << kFirst
      << "''')\n";
  EpOptions options;
  options.tokens = 128;
  PeerRun run = run_deepep("deepep=" + folder, options, 4, true);
  EXPECT_EQ(run.lines.size(), 2u);
  ASSERT_EQ(run.skipped.size(), 1u);
  EXPECT_NE(run.skipped[0].find("DeepEP V2: "), std::string::npos);
  EXPECT_NE(run.skipped[0].find("is not there"), std::string::npos);
  std::ofstream(folder + "/tests/legacy/test_low_latency.py")
      << "raise SystemExit('no module torch')\n";
  run = run_deepep("deepep=" + folder, options, 4, true);
  EXPECT_TRUE(run.lines.empty());
  ASSERT_EQ(run.skipped.size(), 2u);
  EXPECT_NE(run.skipped[0].find("no module torch"), std::string::npos);
  EXPECT_EQ(run_deepep("deepep=" + folder, options, 4, false).skipped.size(), 1u);
  std::filesystem::create_directories(folder + "/tests/elastic");
  std::ofstream(folder + "/tests/elastic/test_ep.py")
      << "import sys\nassert sys.argv[-1] == '--test-first-only'\nprint('''" << kSecond << "''')\n";
  run = run_deepep("deepep=" + folder, options, 4, true);
  ASSERT_EQ(run.lines.size(), 1u);
  EXPECT_EQ(run.lines[0].library, "DeepEP V2");
  EXPECT_EQ(run.skipped.size(), 1u);
  std::ofstream(folder + "/tests/elastic/test_ep.py", std::ios::app)
      << "raise SystemExit('rows differ')\n";
  run = run_deepep("deepep=" + folder, options, 4, true);
  EXPECT_EQ(run.lines.size(), 1u);
  ASSERT_EQ(run.skipped.size(), 2u);
  EXPECT_NE(run.skipped[1].find("it ended with 1: rows differ"), std::string::npos);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace marrow::cli
