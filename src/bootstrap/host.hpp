// SPDX-License-Identifier: Apache-2.0
// Who can share what with whom. "Same host" means: descriptors can be passed, that is one kernel and
// one network namespace (abstract Unix sockets live in it). Containers of one pod share it, containers
// of two pods on one machine do not, and rightly count as two hosts.
#pragma once

#include <cstdint>
#include <string>

namespace marrow::bootstrap {

/// Equal exactly for processes that can pass descriptors to each other.
std::uint64_t this_host_id();

/// Differs between any two processes, also after fork; unlike a pid it means the same in all PID
/// namespaces.
std::uint64_t this_process_id();

/// For people.
std::string this_host_name();

}  // namespace marrow::bootstrap
