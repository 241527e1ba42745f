// SPDX-License-Identifier: Apache-2.0
// Strings without a formatting library: the core builds with a bare C++20 compiler.
#pragma once

#include <sstream>
#include <string>

namespace marrow::base {

/// Concatenates anything that has operator<<.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace marrow::base
