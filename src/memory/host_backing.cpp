// SPDX-License-Identifier: Apache-2.0
#include "memory/host_backing.hpp"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace marrow::memory {

HostBacking host_backing(const void* pointer, std::uint64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, offset = 0, inode = 0;
    unsigned major = 0, minor = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %lx %x:%x %lu", &begin, &end, access, &offset,
                    &major, &minor, &inode) != 7 ||
        address < begin || address >= end) {
      continue;
    }
    if (access[3] != 's' || inode == 0 || bytes > end - address) return {};
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
      const int fd = std::atoi(entry.path().filename().c_str());
      struct stat status {};
      if (::fstat(fd, &status) == 0 && status.st_ino == inode &&
          status.st_dev == makedev(major, minor)) {
        return {base::Fd::dup_of(fd), address - begin + offset};
      }
    }
    return {};
  }
  return {};
}

}  // namespace marrow::memory
