// SPDX-License-Identifier: Apache-2.0
// Which open file backs a range of host memory, so that memory somebody else mapped can be shared.
#pragma once

#include <cstdint>

#include "base/fd.hpp"

namespace marrow::memory {

struct HostBacking {
  base::Fd fd;               ///< invalid: private memory, or its file is no longer open here
  std::uint64_t offset = 0;  ///< of the range in the file
};

/// Looks at /proc/self; the descriptor is a new one for the same file.
HostBacking host_backing(const void* pointer, std::uint64_t bytes);

}  // namespace marrow::memory
