// SPDX-License-Identifier: Apache-2.0
#include "networks/shm/host_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include "base/random.hpp"
#include "base/system_error.hpp"

namespace marrow::networks::shm {

std::string HostIdentity::cannot_share_with(const HostIdentity& other) const {
  if (boot != other.boot) return "it is on another host";
  if (network != other.network) return "it is in another network namespace of this host";
  if (user != other.user) return "it runs as another user";
  return {};
}

HostIdentity this_process() {
  static const std::uint64_t process = base::random_u64();
  HostIdentity identity;
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (!std::getline(file, boot)) base::throw_errno("reading /proc/sys/kernel/random/boot_id");
  identity.boot = std::hash<std::string>{}(boot);
  struct stat status = {};
  if (::stat("/proc/self/ns/net", &status) != 0) base::throw_errno("reading /proc/self/ns/net");
  identity.network = status.st_ino;
  identity.user = ::geteuid();
  identity.process = process;
  identity.pid = static_cast<std::uint64_t>(::getpid());
  return identity;
}

}  // namespace marrow::networks::shm
