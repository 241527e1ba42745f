// SPDX-License-Identifier: Apache-2.0
// Which errno means "a limit was reached", and what to do about each.
#include "base/system_error.hpp"

#include <system_error>

#include "base/text.hpp"

namespace marrow::base {

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
      return Error(Code::out_of_memory, sentence,
                   next_step.empty() ? "free memory, or raise the limit of the container, of "
                                       "/dev/shm or of mappings (vm.max_map_count)."
                                     : next_step);
    default: return Error(Code::system, sentence, next_step);
  }
}

void throw_errno(const std::string& what, const std::string& next_step) {
  throw system_error(errno, what, next_step);
}

}  // namespace marrow::base
