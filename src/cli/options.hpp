// SPDX-License-Identifier: Apache-2.0
// What the command line says, as plain structs, and one model of all options from which both parsers
// (CLI11's and the small one of the reduced build) fill them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/numbers.hpp"

namespace marrow::cli {

enum class Command : std::uint8_t { none, demo, perf, ep, info, doctor, env, errors };

/// How ranks are started; shared by demo, perf and info.
struct RankOptions {
  int ranks = 0;           ///< 0: the command's default
  bool processes = false;  ///< ranks as processes, else threads
  bool gpu = false;        ///< --place gpu
};

struct DemoOptions {
  RankOptions where;
  std::string path = "all";
  std::string network;        ///< empty: chosen by the library
  std::string routing;        ///< file; empty: the generator
  std::int64_t tokens = 0;    ///< 0: all of the file, or the generator's default
  std::int64_t hidden = 128;  ///< float elements a token
  std::uint64_t seed = 1;
  bool corrupt = false;
  std::string json;
};

struct PerfOptions {
  RankOptions where;
  std::string operation;
  std::string path = "auto";
  std::string network;
  std::vector<std::uint64_t> sizes;  ///< empty: the operation's default
  int iterations = 0;                ///< 0: by operation and size
  int warmup = 0;
  int blocks = 0;  ///< 0: by place and operation
  int threads = 0;
  std::string memory = "auto";  ///< windows in device or host memory
  std::string json;
};

struct EpOptions {
  RankOptions where;
  std::string path = "auto";
  std::string network;
  std::int64_t tokens = 0;  ///< a rank; 0 here and below: by place
  std::int64_t hidden = 0;
  std::int64_t top_k = 0;
  std::int64_t experts = 0;
  std::string payload = "fp8";
  std::string mode = "fast";
  int sms = 0;  ///< 0: all
  bool graph = false;
  int iterations = 0;
  std::uint64_t seed = 1;
  std::string routing;  ///< file; empty: uniform
  std::string compare;  ///< "deepep=PATH"
  bool corrupt = false;
  std::string json;
};

struct InfoOptions {
  RankOptions where;
  std::string path = "auto";
  std::string network;
  std::string json;
};

struct DoctorOptions {
  std::string nic;  ///< empty: MARROW_NIC
  std::string json;
};

struct EnvOptions {
  std::string json;
  bool markdown = false;
};

struct ErrorsOptions {
  bool markdown = false;
};

struct Invocation {
  Command command = Command::none;
  DemoOptions demo;
  PerfOptions perf;
  EpOptions ep;
  InfoOptions info;
  DoctorOptions doctor;
  EnvOptions env;
  ErrorsOptions errors;
};

/// One option of a command. `set` gets the text ("" for a flag) and throws UsageError.
struct OptionSpec {
  std::string name;  ///< "--ranks"
  std::string meta;  ///< "N"; empty: a flag
  std::string help;
  std::function<void(const std::string&)> set;
};

struct CommandSpec {
  Command command = Command::none;
  std::string name;
  std::string help;
  std::string examples;  ///< lines after "Examples:"
  std::vector<OptionSpec> options;
  OptionSpec positional{};  ///< one required word; empty name: none
};

/// The whole command line, filling `into` as options are set.
std::vector<CommandSpec> command_line(Invocation& into);

/// "marrow 0.1.0", one line about the program and, in a reduced build, what is missing.
std::string headline();

/// Fills `into`. @return an exit code when there is nothing to run (--help, --version, an error that
///         was printed), else nothing
std::optional<int> parse(int argc, char** argv, Invocation& into);

/// "" in a full build, else a sentence naming what this build lacks and how to get it.
std::string reduced_notice();
/// Set by whichever parser and JSON implementation was compiled in.
extern const bool kFullParser;
extern const bool kFullJson;

}  // namespace marrow::cli
