// SPDX-License-Identifier: Apache-2.0
#include "base/random.hpp"

#include <sys/random.h>

#include <cerrno>
#include <vector>

#include "base/system_error.hpp"

namespace marrow::base {

void random_bytes(std::span<std::byte> out) {
  while (!out.empty()) {
    ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_errno("reading random bytes (getrandom)");
    }
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  random_bytes(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

std::string hex(std::span<const std::byte> bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (std::byte byte : bytes) {
    out.push_back(digits[std::to_integer<unsigned>(byte) >> 4]);
    out.push_back(digits[std::to_integer<unsigned>(byte) & 15]);
  }
  return out;
}

std::string random_name(std::size_t bytes) {
  std::vector<std::byte> raw(bytes);
  random_bytes(raw);
  return hex(raw);
}

}  // namespace marrow::base
