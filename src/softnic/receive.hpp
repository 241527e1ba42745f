// SPDX-License-Identifier: Apache-2.0
// A ring of receive WQEs, of one queue pair or shared by several of one process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace marrow::softnic {

struct ReceiveQueue {
  const std::byte* ring = nullptr;
  const std::uint32_t* record = nullptr;  ///< producer index, BE; null = nothing can be posted
  std::uint32_t depth = 0;                ///< receives, power of two; 0 = none
  std::uint32_t stride = 0;               ///< bytes a receive, power of two >= 16
  std::uint32_t pd = 0;
  std::uint16_t consumer = 0;
};

}  // namespace marrow::softnic
