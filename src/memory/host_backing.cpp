// SPDX-License-Identifier: Apache-2.0
#include "memory/host_backing.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

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
    // Another thread may close a descriptor and open another under its number at any moment: so look by
    // path, and judge the descriptor that is ours.
    const auto same = [&](const struct stat& status) {
      return status.st_ino == inode && status.st_dev == makedev(major, minor);
    };
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
      struct stat status {};
      if (::stat(entry.path().c_str(), &status) != 0 || !same(status)) continue;
      base::Fd file(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
      if (file && ::fstat(file.get(), &status) == 0 && same(status)) {
        return {std::move(file), address - begin + offset};
      }
    }
    return {};
  }
  return {};
}

}  // namespace marrow::memory
