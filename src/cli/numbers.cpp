// SPDX-License-Identifier: Apache-2.0
#include "cli/numbers.hpp"

#include <charconv>

#include "cli/text.hpp"

namespace marrow::cli {

std::int64_t parse_number(std::string_view what, const std::string& text, std::int64_t minimum,
                          std::int64_t maximum) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < minimum ||
      value > maximum) {
    throw UsageError(format("%s is '%s': it must be a whole number from %lld to %lld.",
                            std::string(what).c_str(), text.c_str(),
                            static_cast<long long>(minimum), static_cast<long long>(maximum)));
  }
  return value;
}

std::uint64_t parse_bytes(std::string_view what, const std::string& text) {
  std::uint64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string unit(end, last);
  int shift = -1;
  if (unit.empty() || unit == "B") {
    shift = 0;
  } else if (unit.size() == 1 || unit.substr(1) == "iB" || unit.substr(1) == "B") {
    const std::size_t at = std::string_view("KMGkmg").find(unit[0]);
    if (at != std::string_view::npos) shift = static_cast<int>(at % 3 + 1) * 10;
  }
  if (error != std::errc{} || end == text.data() || shift < 0 || value == 0 ||
      value > (std::uint64_t{1} << 40) >> shift) {
    throw UsageError(
        format("%s has '%s': a size is 1 to 2^40 bytes, written 8, 1K, 64K or 1M (powers of 1024).",
               std::string(what).c_str(), text.c_str()));
  }
  return value << shift;
}

std::vector<std::uint64_t> parse_sizes(std::string_view what, const std::string& text) {
  std::vector<std::uint64_t> sizes;
  for (const std::string& entry : split(text, ',')) {
    const std::size_t dots = entry.find("..");
    if (dots == std::string::npos) {
      sizes.push_back(parse_bytes(what, entry));
    } else {
      const std::uint64_t first = parse_bytes(what, entry.substr(0, dots));
      const std::uint64_t last = parse_bytes(what, entry.substr(dots + 2));
      if (first > last) {
        throw UsageError(format("%s has '%s': the first size is larger than the last.",
                                std::string(what).c_str(), entry.c_str()));
      }
      for (std::uint64_t size = first; size <= last; size *= 2) sizes.push_back(size);
    }
    if (sizes.size() > 64) throw UsageError(std::string(what) + " has more than 64 sizes.");
  }
  return sizes;
}

std::string parse_choice(std::string_view what, const std::string& text,
                         const std::vector<std::string>& choices) {
  for (const std::string& choice : choices) {
    if (choice == text) return choice;
  }
  const std::string near = nearest(text, choices);
  throw UsageError(format("%s is '%s': it must be one of %s.%s", std::string(what).c_str(),
                          text.c_str(), join(choices, ", ").c_str(),
                          near.empty() ? "" : (" Did you mean '" + near + "'?").c_str()));
}

}  // namespace marrow::cli
