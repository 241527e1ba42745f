// SPDX-License-Identifier: Apache-2.0
// Secrets and names come from the kernel (getrandom), never from a seeded generator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace marrow::base {

/// Fills `out` with unpredictable bytes. Throws Error(system).
void random_bytes(std::span<std::byte> out);

std::uint64_t random_u64();

/// Lower-case hexadecimal, two digits a byte.
std::string hex(std::span<const std::byte> bytes);

/// 2 * bytes hexadecimal digits, unpredictable: for names of sockets and files.
std::string random_name(std::size_t bytes = 16);

}  // namespace marrow::base
