// SPDX-License-Identifier: Apache-2.0
#include "base/memfd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/system_error.hpp"
#include "base/text.hpp"

namespace marrow::base {

Fd memfd(const std::string& name, std::size_t size) {
  Fd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno(cat("creating shared memory \"", name, "\""));
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    throw_errno(cat("sizing shared memory \"", name, "\" to ", size, " bytes"));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_errno(cat("sealing shared memory \"", name, "\""));
  }
  return fd;
}

std::size_t file_size(int fd) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) throw_errno(cat("reading the size of file descriptor ", fd));
  return static_cast<std::size_t>(status.st_size);
}

bool sealed_against_shrinking(int fd) {
  int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace marrow::base
