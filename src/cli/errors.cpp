// SPDX-License-Identifier: Apache-2.0
// Every error code in words. The switch has no default: a new code without words does not compile.
#include <cstdio>

#include "cli/commands.hpp"
#include "cli/table.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {
namespace {

struct Words {
  const char* meaning;
  const char* cause;
  const char* fix;
};

Words words(Code code) {
  switch (code) {
    case Code::ok: return {"Nothing went wrong.", "-", "-"};
    case Code::invalid_argument:
      return {"A value is outside its documented range.",
              "A wrong size, rank or handle in a call, a bad MARROW_* value, or a kernel that "
              "passed a bad peer, signal or context.",
              "The sentence names the value and the range. `marrow env` lists the parameters; for "
              "kernels build with MARROW_CHECKED=ON, "
              "which reports file and line."};
    case Code::mismatch:
      return {"The ranks disagree.",
              "Different rank counts, two ranks with one number, different window sizes, "
              "parameters or versions.",
              "The sentence names both ranks and both values: make the call with the same "
              "arguments on every rank."};
    case Code::timeout:
      return {"A deadline passed; the sentence names who was waited for.",
              "A rank never arrived, is stopped or stuck, or a message is lost; or the deadline is "
              "too short for the work.",
              "Look at the named rank first. MARROW_BOOTSTRAP_TIMEOUT bounds set-up, "
              "MARROW_WAIT_TIMEOUT waits in kernels, "
              "MARROW_PEER_TIMEOUT silence."};
    case Code::peer_failed:
      return {"A peer's process or connection ended.",
              "It exited, was killed, or its host or link went down.",
              "Read that rank's own output. Survivors go on after `agree_failures`; `admit` takes "
              "a new process in."};
    case Code::aborted:
      return {"The communicator was revoked.",
              "Some rank called `revoke`, usually because it failed.",
              "The sentence has that rank and its reason."};
    case Code::unsupported:
      return {"The machine or this build lacks something.",
              "No path between two ranks, no GPU, no NIC, a driver or library that is missing, or "
              "memory that a path cannot use.",
              "The sentence names what is missing. `marrow info` shows every pair, and why better "
              "paths were rejected."};
    case Code::authentication:
      return {"A rank could not prove that it belongs to the job.",
              "Another job's secret, another user, or a stranger on the port.",
              "Give all ranks the same UniqueId or MARROW_SECRET_FILE."};
    case Code::version:
      return {"Two sides speak different versions.",
              "Ranks with different libraries, or a kernel built against another ABI.",
              "Build and run everything with one version; the sentence names both."};
    case Code::out_of_memory:
      return {"Memory, locked memory, file descriptors or queue space ran out.",
              "Windows or queues too large, `ulimit -l` or `ulimit -n` too small.",
              "The sentence names which. Raise the limit or ask for less."};
    case Code::system:
      return {"A call to the operating system failed.",
              "The sentence has its text, e.g. a full disk or a missing permission.",
              "Fix what the text says; MARROW_DEBUG=INFO shows what came before."};
    case Code::cuda:
      return {"A CUDA call failed.", "The sentence has CUDA's text.",
              "If a kernel failed, run it under compute-sanitizer; if set-up failed, compare "
              "`nvidia-smi` and `marrow info`."};
    case Code::network:
      return {
          "A NIC or network reported a failed operation.",
          "A cable or switch, a peer that died, or a region that is no longer registered.",
          "The sentence has the peer and the syndrome. Check the link, then the peer's output."};
    case Code::internal:
      return {"A bug in Marrow.", "-", "Report it with the output of MARROW_DEBUG=INFO."};
  }
  return {"", "", ""};
}

}  // namespace

int run_errors(const ErrorsOptions& options) {
  Table table = options.markdown
                    ? Table({{"Code"}, {"Number", true}, {"Meaning"}, {"Cause"}, {"Fix"}})
                    : Table({{"code"}, {"number", true}, {"meaning"}});
  for (std::uint32_t number = 0; name(static_cast<Code>(number)) != std::string("unknown");
       ++number) {
    const auto code = static_cast<Code>(number);
    const Words text = words(code);
    if (options.markdown) {
      table.add({"`" + std::string(name(code)) + "`", std::to_string(number), text.meaning,
                 text.cause, text.fix});
    } else {
      table.add({name(code), std::to_string(number), text.meaning});
    }
  }
  if (options.markdown) {
    std::printf(
        "# Errors\n\n"
        "Generated by `marrow errors --markdown`; do not edit. The host API throws "
        "`marrow::Error`: a code for programs, a\n"
        "sentence with the peer and the values, and the next step. Numbers never change "
        "meaning.\n\n%s",
        table.markdown().c_str());
  } else {
    std::printf("%s\nCause and fix of each: marrow errors --markdown\n", table.text().c_str());
  }
  return 0;
}

}  // namespace marrow::cli
