// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/host.hpp"

#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <mutex>

#include "base/random.hpp"
#include "base/sha256.hpp"
#include "base/text.hpp"

namespace marrow::bootstrap {

std::string this_host_name() {
  std::array<char, 256> buffer{};
  if (::gethostname(buffer.data(), buffer.size() - 1) != 0) return "unknown-host";
  return buffer.data();
}

std::uint64_t this_host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) boot = this_host_name();
  std::array<char, 128> network{};
  if (::readlink("/proc/self/ns/net", network.data(), network.size() - 1) < 0) network[0] = '\0';
  std::string text = base::cat("marrow host ", boot, " ", network.data());
  base::Digest digest = base::sha256(std::as_bytes(std::span(text)));
  std::uint64_t id = 0;
  std::memcpy(&id, digest.data(), sizeof(id));
  return id;
}

std::uint64_t this_process_id() {
  static std::mutex mutex;
  static pid_t owner = -1;
  static std::uint64_t id = 0;
  std::lock_guard lock(mutex);
  if (owner != ::getpid()) {  // first call, or a child after fork
    owner = ::getpid();
    id = base::random_u64();
  }
  return id;
}

}  // namespace marrow::bootstrap
