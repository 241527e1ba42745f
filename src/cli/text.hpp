// SPDX-License-Identifier: Apache-2.0
// Text for people: printf formats without a formatting library, so that the reduced build is the same program.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace marrow::cli {

/// printf into a string.
__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...);

/// "8 B", "64 KiB", "1 MiB": exact multiples only, bytes otherwise.
std::string bytes_text(std::uint64_t bytes);

/// A time in microseconds with three significant digits at least: "0.853", "12.4", "1530".
std::string us_text(double us);

std::string join(const std::vector<std::string>& parts, std::string_view separator);
std::vector<std::string> split(std::string_view text, char separator);

/// The known word nearest to `word` (edit distance at most 3), or empty.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace marrow::cli
