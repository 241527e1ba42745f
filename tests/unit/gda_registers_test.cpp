// SPDX-License-Identifier: Apache-2.0
// What a put costs a kernel in registers, as ptxas reports it for sm_90a. Needs nvcc, no GPU. One register
// more, or a spill, can cost a kernel a block per SM, so a change must be meant.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>

namespace {

struct Cost {
  int registers = -1, stack = -1, spills = -1;
};

std::string find_nvcc() {
  std::string candidates = std::getenv("PATH") ? std::getenv("PATH") : "";
  candidates += ":/usr/local/cuda/bin";
  std::istringstream folders(candidates);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = folder + "/nvcc";
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return {};
}

/// By kernel. A function a kernel calls counts as the kernel's: ptxas gives it registers of the same frame.
std::map<std::string, Cost> compile(const std::string& name, const std::string& options) {
  const std::string file = std::string(MARROW_BINARY_DIR) + "/tests/gda_registers_" + name;
  const std::string text =
      find_nvcc() +
      " -std=c++20 --expt-relaxed-constexpr -DNDEBUG -O3 -gencode arch=compute_90a,code=sm_90a"
      " -Xptxas -v -cubin -I" MARROW_SOURCE_DIR "/include -I" MARROW_SOURCE_DIR "/bench " +
      options + " -o " + file +
      ".cubin " MARROW_SOURCE_DIR "/tests/unit/gda_registers_kernels.cu > " + file + ".log 2>&1";
  EXPECT_EQ(std::system(text.c_str()), 0) << text;
  static const std::regex entry(R"(Compiling entry function '_ZN10gda_probes(\d+)(\w+?)E\w*')");
  static const std::regex spills(
      R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes)");
  static const std::regex used(R"(Used (\d+) registers)");
  std::map<std::string, Cost> found;
  std::ifstream in(file + ".log");
  std::string kernel;
  std::smatch match;
  for (std::string line; std::getline(in, line);) {
    if (std::regex_search(line, match, entry)) {
      kernel = std::string(match[2]).substr(0, std::stoul(match[1]));
      const std::string rest = line.substr(line.find("gda_probes") + 10 + match[1].length());
      kernel = rest.substr(0, std::stoul(match[1]));
      found[kernel] = {0, 0, 0};
    } else if (!kernel.empty() && std::regex_search(line, match, spills)) {
      found[kernel].stack += std::stoi(match[1]);
      found[kernel].spills += std::stoi(match[2]) + std::stoi(match[3]);
    } else if (!kernel.empty() && std::regex_search(line, match, used)) {
      found[kernel].registers = std::stoi(match[1]);
    }
  }
  return found;
}

TEST(GdaRegisters, AnExclusivePutFits24RegistersAndNothingSpills) {
  if (find_nvcc().empty()) GTEST_SKIP() << "no nvcc on PATH or in /usr/local/cuda/bin";
  const auto with = compile("with", "");
  for (const auto& [kernel, cost] : with) {
    RecordProperty(kernel, cost.registers);
    EXPECT_EQ(cost.spills, 0) << kernel << " spills";
    EXPECT_EQ(cost.stack, 0) << kernel << " has a stack";
  }
  ASSERT_TRUE(with.count("exclusive_put_24") && with.count("exclusive_put") &&
              with.count("held_put") && with.count("device_shared_put"));
  EXPECT_LE(with.at("exclusive_put_24").registers, 24);
  // Without a bound ptxas takes more, since up to 32 are free of charge: blocks of 2048 threads an SM.
  EXPECT_LE(with.at("exclusive_put").registers, 40);
  EXPECT_LE(with.at("held_put").registers, 40);

  const auto without = compile("without", "-DWITHOUT_MARROW");
  EXPECT_EQ(with.at("unrelated").registers, without.at("unrelated").registers)
      << "a kernel that only links Marrow pays for it";
}

}  // namespace
