// SPDX-License-Identifier: Apache-2.0
// The tests of both generations print a line a rank:
//   V1  [rank 0] Dispatch bandwidth: 45.1 GB/s, avg_t=33.0 us | Combine bandwidth: 52.0 GB/s, avg_t=57.1 us
//   V2  - EP:   0/4 | expanded dispatch: 0 GB/s (SO), 350 GB/s (SU), 17.2 us, 123 bytes | copy: 900 GB/s, 7.9 us
//       + EP:   0/4 | reduced combine: 0 GB/s (SO), 340 GB/s (SU), 30.1 us, 456 bytes | reduce: 800 GB/s, 12.9 us
// A caller waits for V2's kernel and its epilogue: their sum is the time here.
#include "cli/ep_compare.hpp"

#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <map>
#include <regex>

#include "cli/text.hpp"

namespace marrow::cli {
namespace {

bool there(const std::string& path) {
  struct stat about {};
  return stat(path.c_str(), &about) == 0;
}

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

/// Runs it; output of both streams. @return the exit code
int run(const std::string& command, std::string& output) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return -1;
  char buffer[4096];
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;)
    output.append(buffer, n);
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

std::string last_line(const std::string& text) {
  std::string last;
  for (const std::string& line : split(text, '\n'))
    if (!line.empty()) last = line;
  return last.substr(0, 200);
}

}  // namespace

std::vector<PeerLine> read_deepep(const std::string& output) {
  static const std::regex first(
      R"(\[rank (\d+)\] Dispatch bandwidth: ([\d.]+) GB/s, avg_t=([\d.]+) us[^|]*\| *Combine bandwidth: ([\d.]+) GB/s, avg_t=([\d.]+) us)");
  static const std::regex second(
      R"(EP: +(\d+)/\d+ +\| *(expanded dispatch|dispatch|reduced combine|combine): [^|]*?([\d.]+) GB/s \(SU\), ([\d.]+) us[^|]*\| *(?:copy|reduce): [\d.]+ GB/s, ([\d.]+) us)");
  std::map<int, PeerLine> v1, v2;
  std::map<std::pair<int, std::string>, bool> seen;
  // Ranks are processes with one pipe: a line's end is a write of its own when Python's output is unbuffered, so two
  // ranks' figures may share a line.
  for (const std::string& line : split(output, '\n')) {
    for (std::sregex_iterator i(line.begin(), line.end(), first), end; i != end; ++i) {
      const std::smatch& m = *i;
      const int rank = std::stoi(m[1]);
      v1.try_emplace(rank,
                     PeerLine{"DeepEP V1", rank, std::stod(m[3]), std::stod(m[2]), std::stod(m[5]),
                              std::stod(m[4]), "kernel time by its profiler"});
    }
    for (std::sregex_iterator i(line.begin(), line.end(), second), end; i != end; ++i) {
      const std::smatch& m = *i;
      const int rank = std::stoi(m[1]);
      const std::string kind = m[2];
      const bool dispatch = kind.find("dispatch") != std::string::npos;
      // Expert-major beats rank-major, whatever comes first.
      const bool better = kind == "expanded dispatch" || kind == "reduced combine";
      bool& done = seen[{rank, better ? kind : "plain " + kind}];
      if (done || (!better && seen[{rank, dispatch ? "expanded dispatch" : "reduced combine"}]))
        continue;
      done = true;
      PeerLine& to = v2[rank];
      to.library = "DeepEP V2";
      to.rank = rank;
      to.note = "kernel and epilogue by its profiler; GB/s of the kernel alone, of a row a rank";
      const double us = std::stod(m[4]) + std::stod(m[5]);
      (dispatch ? to.dispatch_us : to.combine_us) = us;
      (dispatch ? to.dispatch_gbs : to.combine_gbs) = std::stod(m[3]);
    }
  }
  std::vector<PeerLine> lines;
  for (const auto& [rank, line] : v1) lines.push_back(line);
  for (const auto& [rank, line] : v2) lines.push_back(line);
  return lines;
}

PeerRun run_deepep(const std::string& what, const EpOptions& o, int ranks, bool gpu) {
  const std::string prefix = "deepep=";
  if (what.rfind(prefix, 0) != 0 || what.size() == prefix.size())
    throw UsageError("--compare: '" + what + "' is not deepep=PATH.");
  const std::string folder = what.substr(prefix.size());
  PeerRun result;
  if (!gpu) {
    result.skipped.push_back("DeepEP: it needs GPUs; use --place gpu");
    return result;
  }
  struct Test {
    const char* library;
    std::vector<std::string> files;
    std::string arguments;
  };
  const std::string sizes = format(
      "--num-processes %d --num-tokens %lld --hidden %lld --num-topk %lld --num-experts %lld",
      ranks, static_cast<long long>(o.tokens), static_cast<long long>(o.hidden),
      static_cast<long long>(o.top_k), static_cast<long long>(o.experts));
  const Test tests[] = {
      {"DeepEP V1", {"/tests/legacy/test_low_latency.py", "/tests/test_low_latency.py"}, sizes},
      // Its 144 modes take minutes, and the first, fp8 and expert-major, is the one that is read.
      {"DeepEP V2", {"/tests/elastic/test_ep.py"}, sizes + " --test-first-only"},
  };
  for (const Test& test : tests) {
    std::string file;
    for (const std::string& candidate : test.files)
      if (file.empty() && there(folder + candidate)) file = folder + candidate;
    if (file.empty()) {
      result.skipped.push_back(
          format("%s: %s%s is not there", test.library, folder.c_str(), test.files.back().c_str()));
      continue;
    }
    std::string output;
    const int code = run("cd " + quoted(file.substr(0, file.rfind('/'))) +
                             " && timeout 600 python3 " + quoted(file) + " " + test.arguments,
                         output);
    std::vector<PeerLine> lines = read_deepep(output);
    if (lines.empty()) {
      result.skipped.push_back(format("%s: %s ended with %d and printed no figures: %s",
                                      test.library, file.c_str(), code, last_line(output).c_str()));
      continue;
    }
    // V2 checks what it timed when the figures are out.
    if (code != 0)
      result.skipped.push_back(
          format("%s: the rest of %s, its checks perhaps: it ended with %d: %s", test.library,
                 file.c_str(), code, last_line(output).c_str()));
    for (PeerLine& line : lines) {
      line.library = test.library;
      result.lines.push_back(std::move(line));
    }
  }
  return result;
}

}  // namespace marrow::cli
