// SPDX-License-Identifier: Apache-2.0
// Who can share memory with whom: same kernel, same network namespace (abstract sockets), same user.
#pragma once

#include <cstdint>
#include <string>

namespace marrow::networks::shm {

struct HostIdentity {
  std::uint64_t boot = 0;     ///< hash of the kernel's boot id
  std::uint64_t network = 0;  ///< inode of the network namespace
  std::uint64_t user = 0;     ///< effective user
  std::uint64_t process = 0;  ///< random, per process
  std::uint64_t pid = 0;      ///< a forked child has its parent's `process`

  bool same_process(const HostIdentity& other) const {
    return process == other.process && pid == other.pid && boot == other.boot;
  }
  /// Empty when memory can be shared, else why not.
  std::string cannot_share_with(const HostIdentity& other) const;
};

/// This process. Throws Error(system).
HostIdentity this_process();

}  // namespace marrow::networks::shm
