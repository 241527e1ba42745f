// SPDX-License-Identifier: Apache-2.0
// A block of memory that windows, sync words and queues are made of: where kernels see it, where
// the CPU sees it, and the descriptor that lets another process map it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/abi.h"
#include "marrow/marrow.hpp"

namespace marrow::memory {

/// A view; the owner is memory::Allocation.
struct Block {
  std::byte* device = nullptr;  ///< address for kernels; equals `host` for pinned host memory and on the CPU device
  std::byte* host = nullptr;    ///< address for CPU threads; null: device memory
  std::uint64_t bytes = 0;
  Memory kind = Memory::host;   ///< what it really is: host memory also on the CPU device
  int fd = -1;                  ///< descriptor another process maps it by (memfd, or CUDA's for VMM memory); -1: none
  std::uint64_t fd_offset = 0;
};

}  // namespace marrow::memory
