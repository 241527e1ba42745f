// SPDX-License-Identifier: Apache-2.0
// Reading and checking parameter values. The table is in parameters.cpp.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "base/log.hpp"
#include "base/parameters.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::base {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

/// Splits "30s" into 30 and "s".
std::optional<std::pair<std::int64_t, std::string>> number_and_unit(std::string_view text) {
  std::int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return std::pair(value, lower(text.substr(static_cast<std::size_t>(end - text.data()))));
}

std::optional<std::int64_t> scaled(std::int64_t value, std::int64_t factor) {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(value, factor, &out)) return std::nullopt;
  return out;
}

std::optional<std::int64_t> to_milliseconds(std::string_view text) {
  auto parsed = number_and_unit(text);
  if (!parsed) return std::nullopt;
  const auto& [value, unit] = *parsed;
  if (unit == "ms") return value;
  if (unit.empty() || unit == "s") return scaled(value, 1000);
  if (unit == "m" || unit == "min") return scaled(value, 60'000);
  if (unit == "h") return scaled(value, 3'600'000);
  return std::nullopt;
}

std::optional<std::int64_t> to_bytes(std::string_view text) {
  auto parsed = number_and_unit(text);
  if (!parsed) return std::nullopt;
  const auto& [value, unit] = *parsed;
  if (unit.empty() || unit == "b") return value;
  static constexpr std::string_view prefixes = "kmgt";
  std::size_t power = prefixes.find(unit[0]);
  std::string_view rest = std::string_view(unit).substr(1);
  if (power == std::string_view::npos || !(rest.empty() || rest == "b" || rest == "ib")) {
    return std::nullopt;
  }
  return scaled(value, std::int64_t{1} << (10 * (power + 1)));
}

std::optional<std::int64_t> to_integer(std::string_view text) {
  auto parsed = number_and_unit(text);
  if (!parsed || !parsed->second.empty()) return std::nullopt;
  return parsed->first;
}

std::optional<std::int64_t> to_boolean(std::string_view text) {
  std::string value = lower(text);
  if (value == "1" || value == "true" || value == "yes" || value == "on") return 1;
  if (value == "0" || value == "false" || value == "no" || value == "off") return 0;
  return std::nullopt;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> out;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    std::size_t end = std::min(text.find(separator, begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

std::optional<std::string> to_choice(const Parameter& declared, std::string_view text) {
  for (std::string_view option : split(declared.choices, '|')) {
    if (lower(option) == lower(text)) return std::string(option);
  }
  return std::nullopt;
}

[[noreturn]] void bad_value(const Parameter& declared, const ParameterValue& value) {
  const char* where = value.source == ParameterSource::communicator  ? "the communicator's settings"
                      : value.source == ParameterSource::environment ? "the environment"
                                                                     : "the built-in default";
  throw Error(Code::invalid_argument,
              cat(declared.name, "=\"", value.text, "\" (from ", where, ") is not valid: it is ",
                  describe_range(declared), "."),
              cat("set it in that range, or unset it for the default ", declared.default_value,
                  "; `marrow env` explains it."));
}

/// The number behind any numeric type, checked against the declaration.
std::int64_t number(const Parameter& declared, const ParameterValue& value) {
  std::optional<std::int64_t> parsed;
  switch (declared.type) {
    case ParameterType::boolean: parsed = to_boolean(value.text); break;
    case ParameterType::integer: parsed = to_integer(value.text); break;
    case ParameterType::duration: parsed = to_milliseconds(value.text); break;
    case ParameterType::size: parsed = to_bytes(value.text); break;
    case ParameterType::string:
    case ParameterType::choice: break;
  }
  if (!parsed || *parsed < declared.minimum || *parsed > declared.maximum ||
      (declared.power_of_two && !std::has_single_bit(static_cast<std::uint64_t>(*parsed)))) {
    bad_value(declared, value);
  }
  return *parsed;
}

const Parameter& typed(std::string_view name, ParameterType type) {
  const Parameter& declared = parameter(name);
  bool same = declared.type == type ||
              (type == ParameterType::string && declared.type == ParameterType::choice);
  if (!same) {
    throw Error(Code::internal, cat("Parameter ", name, " is a ", base::name(declared.type),
                                    " but was read as a ", base::name(type), "."));
  }
  return declared;
}

void check_one(const Parameter& declared, const ParameterValue& value) {
  if (declared.type == ParameterType::string) return;
  if (declared.type == ParameterType::choice) {
    if (!to_choice(declared, value.text)) bad_value(declared, value);
    return;
  }
  number(declared, value);
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

bool declared(std::string_view name) {
  auto all = parameters();
  return std::any_of(all.begin(), all.end(), [&](const Parameter& p) { return p.name == name; });
}

void warn_about_unknown_variables() {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> warned;
  std::lock_guard lock(mutex);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view variable = *entry;
    variable = variable.substr(0, variable.find('='));
    // MARROW_TEST_* belongs to the test programs.
    if (!variable.starts_with("MARROW_") || variable.starts_with("MARROW_TEST_")) continue;
    if (declared(variable) || !warned.emplace(variable).second) continue;
    std::string_view nearest = nearest_parameter(variable);
    MARROW_WARN(env, "Unknown variable ", variable, " is ignored",
                nearest.empty() ? "; `marrow env` lists the known ones."
                                : cat("; did you mean ", nearest, "?"));
  }
}

}  // namespace

const char* name(ParameterType type) noexcept {
  switch (type) {
    case ParameterType::boolean: return "boolean";
    case ParameterType::integer: return "integer";
    case ParameterType::duration: return "duration";
    case ParameterType::size: return "size";
    case ParameterType::string: return "string";
    case ParameterType::choice: return "choice";
  }
  return "unknown";
}

std::string describe_range(const Parameter& declared) {
  switch (declared.type) {
    case ParameterType::boolean: return "0 or 1";
    case ParameterType::string: return "text";
    case ParameterType::choice: {
      std::string out;
      for (std::string_view option : split(declared.choices, '|')) {
        out += cat(out.empty() ? "" : ", ", option);
      }
      return "one of " + out;
    }
    case ParameterType::duration:
      return cat("a duration from ", declared.minimum, "ms to ", declared.maximum / 1000,
                 "s, such as 30, 30s or 500ms");
    case ParameterType::integer:
    case ParameterType::size: break;
  }
  std::string out =
      declared.type == ParameterType::size ? "a size in bytes (K, M, G, T allowed)" : "an integer";
  if (declared.maximum == std::numeric_limits<std::int64_t>::max()) {
    out += cat(" of at least ", declared.minimum);
  } else {
    out += cat(" from ", declared.minimum, " to ", declared.maximum);
  }
  if (declared.power_of_two) out += ", a power of two";
  return out;
}

void Parameters::set(std::string_view name, std::string_view value) {
  if (!declared(name)) {
    std::string_view nearest = nearest_parameter(name);
    throw Error(Code::invalid_argument, cat("There is no parameter ", name, "."),
                nearest.empty() ? std::string("`marrow env` lists them.")
                                : cat("did you mean ", nearest, "?"));
  }
  check_one(parameter(name), {std::string(value), ParameterSource::communicator});
  values_.insert_or_assign(std::string(name), std::string(value));
}

ParameterValue parameter_text(std::string_view name, const Parameters& overrides) {
  const Parameter& declared = parameter(name);
  auto own = overrides.values().find(name);
  if (own != overrides.values().end()) return {own->second, ParameterSource::communicator};
  const char* value = std::getenv(std::string(name).c_str());
  if (value != nullptr && *value != '\0') return {value, ParameterSource::environment};
  return {std::string(declared.default_value), ParameterSource::built_in};
}

bool parameter_bool(std::string_view name, const Parameters& overrides) {
  return number(typed(name, ParameterType::boolean), parameter_text(name, overrides)) != 0;
}

std::int64_t parameter_int(std::string_view name, const Parameters& overrides) {
  return number(typed(name, ParameterType::integer), parameter_text(name, overrides));
}

std::chrono::milliseconds parameter_duration(std::string_view name, const Parameters& overrides) {
  return std::chrono::milliseconds(
      number(typed(name, ParameterType::duration), parameter_text(name, overrides)));
}

std::size_t parameter_size(std::string_view name, const Parameters& overrides) {
  return static_cast<std::size_t>(
      number(typed(name, ParameterType::size), parameter_text(name, overrides)));
}

std::string parameter_string(std::string_view name, const Parameters& overrides) {
  const Parameter& declared = typed(name, ParameterType::string);
  ParameterValue value = parameter_text(name, overrides);
  if (declared.type == ParameterType::string) return value.text;
  std::optional<std::string> option = to_choice(declared, value.text);
  if (!option) bad_value(declared, value);
  return *option;
}

void check_parameters(const Parameters& overrides) {
  warn_about_unknown_variables();
  for (const Parameter& declared : parameters()) {
    ParameterValue value = parameter_text(declared.name, overrides);
    if (value.source == ParameterSource::built_in) continue;
    check_one(declared, value);
    MARROW_INFO(env, declared.name, " set by ",
                value.source == ParameterSource::environment ? "environment" : "the program",
                " to ", value.text);
  }
}

std::string_view nearest_parameter(std::string_view name) {
  std::string_view best;
  std::size_t best_distance = name.size();
  for (const Parameter& candidate : parameters()) {
    std::size_t distance = edit_distance(name, candidate.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate.name;
    }
  }
  // A third of what follows MARROW_ may be wrong; beyond that the hint would be a guess.
  return best_distance <= std::max<std::size_t>(2, (best.size() - 7) / 3) ? best
                                                                          : std::string_view();
}

std::chrono::milliseconds parse_duration(std::string_view text, std::string_view what) {
  auto parsed = to_milliseconds(text);
  if (!parsed || *parsed < 0) {
    throw Error(Code::invalid_argument, cat(what, " \"", text, "\" is not a duration."),
                "write it like 30, 30s or 500ms.");
  }
  return std::chrono::milliseconds(*parsed);
}

std::size_t parse_size(std::string_view text, std::string_view what) {
  auto parsed = to_bytes(text);
  if (!parsed || *parsed < 0) {
    throw Error(Code::invalid_argument, cat(what, " \"", text, "\" is not a size."),
                "write bytes, or a number with K, M, G or T.");
  }
  return static_cast<std::size_t>(*parsed);
}

std::int64_t parse_int(std::string_view text, std::string_view what) {
  auto parsed = to_integer(text);
  if (!parsed) {
    throw Error(Code::invalid_argument, cat(what, " \"", text, "\" is not an integer."),
                "write a decimal number.");
  }
  return *parsed;
}

}  // namespace marrow::base
