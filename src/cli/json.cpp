// SPDX-License-Identifier: Apache-2.0
// The part of --json that both builds share: a file that cannot be written is refused before minutes
// of work, not after them.
#include "cli/json.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "marrow/error.hpp"

namespace marrow::cli {

Error cannot_write(const std::string& file, int error) {
  return Error(Code::system, "cannot write " + file + ": " + std::strerror(error),
               "name a file in a folder that exists and that this user can write to");
}

void prepare_json(const std::string& file, bool writes) {
  if (file.empty()) return;
  require_json("--json");
  if (!writes || file == "-") return;
  struct stat status {};
  const bool existed = ::stat(file.c_str(), &status) == 0;
  // For appending: what is there stays until there is something new.
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) {
    if (errno == ENXIO) return;  // a pipe whose reader comes later
    throw cannot_write(file, errno);
  }
  ::close(fd);
  if (!existed) ::unlink(file.c_str());
}

}  // namespace marrow::cli
