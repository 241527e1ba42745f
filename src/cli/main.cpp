// SPDX-License-Identifier: Apache-2.0
// `marrow`: demo, perf, ep, info, doctor, env, errors. Everything is on the public API.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>

#include "cli/commands.hpp"
#include "cli/json.hpp"
#include "cli/ranks.hpp"
#include "marrow/error.hpp"
#include "marrow/parameters.hpp"

namespace marrow::cli {

std::map<std::string, std::string> path_parameters(const std::string& path,
                                                   const std::string& network) {
  std::map<std::string, std::string> parameters;
  if (path != "auto") parameters["MARROW_PATH"] = path;  // else the environment's wish holds
  if (!network.empty()) parameters[path == "gda" ? "MARROW_NIC" : "MARROW_NETWORK"] = network;
  return parameters;
}

namespace {

/// 2: the command line or the machine; 1: something went wrong between ranks.
int exit_code(Code code) {
  switch (code) {
    case Code::invalid_argument:
    case Code::mismatch:
    case Code::unsupported:
    case Code::authentication:
    case Code::version:
    case Code::out_of_memory:
    case Code::system: return 2;
    default: return 1;
  }
}

int run(const Invocation& invocation) {
  switch (invocation.command) {
    case Command::demo: return run_demo(invocation.demo);
    case Command::perf: return run_perf(invocation.perf);
    case Command::ep: return run_ep(invocation.ep);
    case Command::info: return run_info(invocation.info);
    case Command::doctor: return run_doctor(invocation.doctor);
    case Command::env: return run_env(invocation.env);
    case Command::errors: return run_errors(invocation.errors);
    case Command::none: break;
  }
  return 2;
}

/// --json of a command that runs on ranks.
std::string json_file(const Invocation& invocation) {
  switch (invocation.command) {
    case Command::demo: return invocation.demo.json;
    case Command::perf: return invocation.perf.json;
    case Command::ep: return invocation.ep.json;
    case Command::info: return invocation.info.json;
    default: return {};
  }
}

/// Ranks to start as processes, or 0.
int wanted_processes(const Invocation& invocation) {
  const RankOptions* where = invocation.command == Command::demo   ? &invocation.demo.where
                             : invocation.command == Command::perf ? &invocation.perf.where
                             : invocation.command == Command::ep   ? &invocation.ep.where
                             : invocation.command == Command::info ? &invocation.info.where
                                                                   : nullptr;
  if (where == nullptr || !where->processes || under_launcher()) return 0;
  if (where->ranks != 0) return where->ranks;
  return invocation.command == Command::demo ? 4 : 2;
}

/// At a command's end, however it ends.
struct SaysWhatWasLost {
  SaysWhatWasLost() = default;
  SaysWhatWasLost(const SaysWhatWasLost&) = delete;
  SaysWhatWasLost& operator=(const SaysWhatWasLost&) = delete;
  ~SaysWhatWasLost() {
    const std::uint64_t lost = dropped_log_lines();
    if (lost == 0) return;
    std::fprintf(
        stderr,
        "marrow: %llu log lines could not be written (MARROW_DEBUG_FILE: disk full or closed).\n",
        static_cast<unsigned long long>(lost));
  }
};

}  // namespace

int main_of(int argc, char** argv) {
  Invocation invocation;
  if (const std::optional<int> done = parse(argc, argv, invocation)) return *done;
  const SaysWhatWasLost lost;
  try {
    if (const int processes = wanted_processes(invocation)) {
      prepare_json(json_file(invocation), true);  // before four ranks find out
      return spawn_processes(processes, argv);
    }
    const int result = run(invocation);
    // Results that did not reach the disk or the reader are no success.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::fprintf(stderr, "marrow: standard output could not be written (disk full or closed).\n");
      return result != 0 ? result : 2;
    }
    return result;
  } catch (const Error& error) {
    std::fprintf(stderr, "marrow: %s\n", error.what());
    return exit_code(error.code());
  } catch (const UsageError& error) {
    std::fprintf(stderr, "marrow: %s\n", error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "marrow: out_of_memory: there is no memory left. Next: use fewer ranks, tokens or "
                 "bytes, or raise the limit (ulimit -v, the container's).\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "marrow: %s\n", error.what());
    return 1;
  }
}

}  // namespace marrow::cli

int main(int argc, char** argv) { return marrow::cli::main_of(argc, argv); }
