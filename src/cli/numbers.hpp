// SPDX-License-Identifier: Apache-2.0
// Numbers and lists as users of NCCL's and perftest's tools write them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace marrow::cli {

/// Bad command line: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A whole number in [minimum, maximum]. @throws UsageError naming `what`, the text and the range
std::int64_t parse_number(std::string_view what, const std::string& text, std::int64_t minimum,
                          std::int64_t maximum);

/// Bytes, with K, M or G as powers of 1024 ("64K", "1MiB"). @throws UsageError
std::uint64_t parse_bytes(std::string_view what, const std::string& text);

/// "8,1K,64K..1M": a comma list; a..b doubles from a to b. Sorted as written.
/// @throws UsageError  for bad entries, an empty list, more than 64 entries
std::vector<std::uint64_t> parse_sizes(std::string_view what, const std::string& text);

/// One of the choices. @throws UsageError with the nearest one
std::string parse_choice(std::string_view what, const std::string& text,
                         const std::vector<std::string>& choices);

}  // namespace marrow::cli
