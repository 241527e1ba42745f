// SPDX-License-Identifier: Apache-2.0
// Closing keeps errno: destructors run between a failed call and the code that reports it.
#include "base/fd.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/system_error.hpp"
#include "base/text.hpp"

namespace marrow::base {

void Fd::reset(int fd) noexcept {
  if (fd_ >= 0 && fd_ != fd) {
    int saved = errno;
    ::close(fd_);  // Linux frees the descriptor even when close reports EINTR: no retry
    errno = saved;
  }
  fd_ = fd;
}

Fd Fd::dup_of(int fd) {
  int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw_errno(cat("duplicating file descriptor ", fd));
  return Fd(copy);
}

}  // namespace marrow::base
