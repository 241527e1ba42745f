// SPDX-License-Identifier: Apache-2.0
// Where progress threads run: near the NIC, or where MARROW_PROXY_CPUS says.
#pragma once

#include <string>
#include <vector>

namespace marrow::proxy {

class Pinning {
 public:
  /// @param wanted     MARROW_PROXY_CPUS: auto, none, or CPUs as in "2-5,8"
  /// @param numa_node  of the network's device, or of the GPU; -1: unknown
  /// Throws Error(invalid_argument) for text that is none of these.
  Pinning(const std::string& wanted, int numa_node);

  /// Binds the calling thread: with a list, thread t to CPU t of it (round and round); else to all CPUs of the
  /// node, so that the operating system can still move it away from an application's thread. Where that is
  /// not allowed, the thread stays unbound and the log says so.
  void pin(int thread) const;

  /// For the log, e.g. "on CPUs 0-15 of NUMA node 0 (hwloc)".
  const std::string& where() const { return where_; }
  const std::vector<int>& cpus() const { return cpus_; }
  bool one_each() const { return one_each_; }

 private:
  std::vector<int> cpus_;  ///< empty: unbound
  bool one_each_ = false;
  std::string where_;
};

/// CPUs of "2-5,8", ascending as written. @throws Error(invalid_argument)
std::vector<int> parse_cpus(const std::string& text);
/// The reverse.
std::string cpus_text(const std::vector<int>& cpus);

}  // namespace marrow::proxy
