// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): the bootstrap authenticates its frames with
// them, and the core may depend on nothing but the compiler. Speed is irrelevant here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace marrow::base {

using Digest = std::array<std::byte, 32>;

/// Incremental SHA-256.
class Sha256 {
 public:
  Sha256() noexcept;
  void update(std::span<const std::byte> bytes) noexcept;
  /// Ends the message; the object must not be used afterwards.
  Digest finish() noexcept;

 private:
  void block(const std::byte* data) noexcept;

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> buffer_;
  std::uint64_t length_ = 0;  // bytes seen
};

Digest sha256(std::span<const std::byte> bytes) noexcept;

/// HMAC-SHA-256 over the concatenation of `parts`. The parts are not separated: callers give them
/// fixed sizes or put lengths in front.
Digest hmac_sha256(std::span<const std::byte> key,
                   std::initializer_list<std::span<const std::byte>> parts) noexcept;

/// Compares in a time that depends on the lengths only, so that a wrong MAC cannot be found byte by
/// byte from the outside.
bool constant_time_equal(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace marrow::base
