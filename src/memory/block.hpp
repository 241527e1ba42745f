// SPDX-License-Identifier: Apache-2.0
// A block of memory that windows, sync words and queues are made of: where kernels see it, where
// the CPU sees it, and the descriptor that lets another process map it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/abi.h"
#include "marrow/marrow.hpp"

namespace marrow::memory {

/// A view; the owner is the Arena it came from.
struct Block {
  std::byte* device =
      nullptr;  ///< address for kernels; equals `host` for pinned host memory and on the CPU device
  std::byte* host = nullptr;  ///< address for CPU threads; null: device memory
  std::uint64_t bytes = 0;
  Memory kind = Memory::host;  ///< what it really is: host memory also on the CPU device
  int fd =
      -1;  ///< descriptor another process maps it by (memfd, or CUDA's for VMM memory); -1: none
  std::uint64_t fd_offset = 0;
};

/// What another process needs to map a block, beside its descriptor (if it has one). Sent as bytes.
struct ExportRecord {
  std::uint64_t bytes = 0;
  std::uint64_t fd_offset = 0;
  std::uint64_t ipc_offset = 0;  ///< of the block in the allocation that `ipc` names
  Memory kind = Memory::host;
  std::uint8_t has_fd = 0;   ///< 1: send block.fd along
  std::uint8_t has_ipc = 0;  ///< 1: `ipc` is a CUDA legacy IPC handle (memory from cudaMalloc)
  std::uint8_t reserved[5] = {};
  std::uint8_t ipc[64] = {};
};
static_assert(sizeof(ExportRecord) == 96);

}  // namespace marrow::memory
