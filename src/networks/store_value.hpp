// SPDX-License-Identifier: Apache-2.0
// How a network that is code stores what a PUT_VALUE carries.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace marrow::networks {

/// Aligned 8-byte words whole and released, since a kernel may poll one; the rest byte by byte.
inline void store_value(std::byte* to, const std::uint8_t* from, std::size_t bytes) {
  std::size_t done = 0;
  if ((reinterpret_cast<std::uintptr_t>(to) & 7) == 0) {
    for (; done + 8 <= bytes; done += 8) {
      std::uint64_t word;
      std::memcpy(&word, from + done, 8);
      std::atomic_ref(*reinterpret_cast<std::uint64_t*>(to + done))
          .store(word, std::memory_order_release);
    }
  }
  for (; done < bytes; ++done) {
    std::atomic_ref(*reinterpret_cast<std::uint8_t*>(to + done))
        .store(from[done], std::memory_order_release);
  }
}

}  // namespace marrow::networks
