// SPDX-License-Identifier: Apache-2.0
// mmap and munmap, with the values in the error sentence.
#include "base/mapping.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/system_error.hpp"
#include "base/text.hpp"

namespace marrow::base {

Mapping Mapping::of_fd(int fd, std::size_t size, std::size_t offset, Access access) {
  int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data =
      ::mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    throw_errno(cat("mapping ", size, " bytes of file descriptor ", fd, " at offset ", offset));
  }
  return Mapping(data, size);
}

Mapping Mapping::anonymous(std::size_t size, bool shared_with_children) {
  int flags = MAP_ANONYMOUS | MAP_NORESERVE | (shared_with_children ? MAP_SHARED : MAP_PRIVATE);
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) throw_errno(cat("mapping ", size, " bytes of anonymous memory"));
  return Mapping(data, size);
}

void Mapping::reset() noexcept {
  if (data_ == nullptr) return;
  int saved = errno;
  ::munmap(data_, size_);
  errno = saved;
  data_ = nullptr;
  size_ = 0;
}

bool is_mapped(const void* data, std::size_t size, Mapping::Access access) {
  std::ifstream file("/proc/self/maps");
  if (!file) return true;
  std::uint64_t at = reinterpret_cast<std::uintptr_t>(data);
  const std::uint64_t end = at + size;
  if (end < at) return false;
  // Ascending and without overlap: the first gap decides.
  for (std::string line; at < end && std::getline(file, line);) {
    unsigned long long from = 0;
    unsigned long long to = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%llx-%llx %4s", &from, &to, rights) != 3 || to <= at) continue;
    if (from > at || rights[0] != 'r') return false;
    if (access == Mapping::Access::read_write && rights[1] != 'w') return false;
    at = to;
  }
  return at >= end;
}

}  // namespace marrow::base
