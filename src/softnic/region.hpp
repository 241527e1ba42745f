// SPDX-License-Identifier: Apache-2.0
// A memory region as an engine checks it, on whatever processor the engine runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "marrow/abi/abi.h"

namespace marrow::softnic {

/// What the engine needs to know about a key, all of it checked on every use.
struct Region {
  std::uint32_t key = 0;
  std::uint32_t process = 0;
  std::uint32_t access = 0;  ///< IBV_ACCESS_*
  std::uint32_t pd = 0;
  std::uint64_t iova = 0;
  std::uint64_t length = 0;
  std::byte* base = nullptr;     ///< where iova lies for this engine
  std::uint32_t gpu_memory = 0;  ///< 1: no CPU can touch it
  std::uint32_t reserved = 0;

  /// Pointer to [address, address + bytes) of the key's address space, null if not all inside.
  MARROW_HOST_DEVICE std::byte* at(std::uint64_t address, std::uint64_t bytes) const {
    const std::uint64_t from = address - iova;  // wraps to something huge below the start
    if (from > length || bytes > length - from) return nullptr;
    return base + from;
  }
};

}  // namespace marrow::softnic
