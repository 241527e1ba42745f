// SPDX-License-Identifier: Apache-2.0
// Which errno means "a limit was reached", and what to do about each.
#include "base/system_error.hpp"

#include <sys/resource.h>

#include <system_error>

#include "base/text.hpp"

namespace marrow::base {
namespace {

constexpr const char* kMoreMemory =
    "ask for less, free memory, or raise the limit: of address space (ulimit -v), of the "
    "container, "
    "of /dev/shm, of mappings (vm.max_map_count).";

/// " (ulimit -v is 300000 KiB)", when that limit is set.
std::string address_space_limit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return cat(" (ulimit -v is ", limit.rlim_cur / 1024, " KiB)");
}

}  // namespace

std::string errno_text(int error) { return std::generic_category().message(error); }

Error system_error(int error, const std::string& what, const std::string& next_step) {
  std::string sentence = cat(what, " failed: ", errno_text(error), " (errno ", error, ").");
  switch (error) {
    case EMFILE:
      return Error(Code::out_of_memory, sentence,
                   next_step.empty() ? "raise the descriptor limit (ulimit -n)." : next_step);
    case ENFILE:
      return Error(Code::out_of_memory, sentence,
                   next_step.empty() ? "raise fs.file-max or stop other programs." : next_step);
    case ENOMEM:
    case ENOSPC:
      return Error(Code::out_of_memory,
                   error == ENOMEM ? cat(what, " failed: ", errno_text(error),
                                         address_space_limit(), " (errno ", error, ").")
                                   : sentence,
                   next_step.empty() ? kMoreMemory : next_step);
    default: return Error(Code::system, sentence, next_step);
  }
}

Error no_memory(const std::string& what) {
  return Error(Code::out_of_memory,
               cat(what, " failed: there is no memory left for it", address_space_limit(), "."),
               kMoreMemory);
}

void throw_errno(const std::string& what, const std::string& next_step) {
  throw system_error(errno, what, next_step);
}

}  // namespace marrow::base
