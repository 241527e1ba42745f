// SPDX-License-Identifier: Apache-2.0
// The one registry of MARROW_* parameters. Each is declared once, in parameters.cpp; `marrow env`
// and docs/env.md are made from that table. Values are read when asked for, not at program start: a
// process may hold several communicators with different settings, and tests change the environment.
// A communicator's own settings (`Parameters`) lie over the environment.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace marrow::base {

enum class ParameterType {
  boolean,   ///< 0|1, also false|true, no|yes, off|on
  integer,   ///< decimal, 64 bits
  duration,  ///< "30" and "30s" are seconds, "500ms", "2m"; kept in milliseconds
  size,      ///< bytes; suffix K, M, G, T (powers of 1024; KiB, KB and k mean the same)
  string,    ///< anything; the owner checks it
  choice     ///< one of a list
};

/// One declared parameter.
struct Parameter {
  std::string_view name;  ///< MARROW_...
  ParameterType type;
  std::string_view default_value;  ///< as a user would write it
  std::int64_t minimum;            ///< integer, duration (ms), size (bytes); inclusive
  std::int64_t maximum;
  bool power_of_two;         ///< integer and size: only powers of two
  std::string_view choices;  ///< choice: "a|b|c"
  std::string_view owner;    ///< the part of Marrow that reads it
  std::string_view help;     ///< one or two sentences
};

/// All parameters, sorted by name.
std::span<const Parameter> parameters() noexcept;

/// The declaration; throws Error(internal) for an undeclared name: that is a bug in Marrow.
const Parameter& parameter(std::string_view name);

/// Type and range in words, e.g. "integer from 32 to 32768, a power of two".
std::string describe_range(const Parameter& parameter);
const char* name(ParameterType type) noexcept;

/// Settings of one communicator, over the environment. Plain value type.
class Parameters {
 public:
  /// Checks and keeps one setting. Throws Error(invalid_argument): unknown name (with the nearest
  /// known one) or bad value.
  void set(std::string_view name, std::string_view value);
  bool has(std::string_view name) const { return values_.find(name) != values_.end(); }
  const std::map<std::string, std::string, std::less<>>& values() const { return values_; }

 private:
  std::map<std::string, std::string, std::less<>> values_;
};

/// Where a value comes from.
enum class ParameterSource { built_in, environment, communicator };
struct ParameterValue {
  std::string text;
  ParameterSource source;
};

/// The text in force, not checked. An empty variable counts as not set.
ParameterValue parameter_text(std::string_view name, const Parameters& overrides = {});

// Typed getters. Each throws Error(invalid_argument) naming the value, the range and what to do.
bool parameter_bool(std::string_view name, const Parameters& overrides = {});
std::int64_t parameter_int(std::string_view name, const Parameters& overrides = {});
std::chrono::milliseconds parameter_duration(std::string_view name,
                                             const Parameters& overrides = {});
std::size_t parameter_size(std::string_view name, const Parameters& overrides = {});
/// string and choice; a choice is returned as declared, whatever its case was.
std::string parameter_string(std::string_view name, const Parameters& overrides = {});

/// Throws Error(invalid_argument) if any parameter in force has a bad value. Also logs (INFO, ENV)
/// every value that is not the default, and warns once per process about each unknown MARROW_*
/// variable. Called when a communicator is made.
void check_parameters(const Parameters& overrides = {});

/// The declared name nearest to `name` (edit distance), or empty if none is near.
std::string_view nearest_parameter(std::string_view name);

// Parsers, for configuration strings inside other parameters. They throw Error(invalid_argument)
// whose sentence starts with `what`.
std::chrono::milliseconds parse_duration(std::string_view text, std::string_view what);
std::size_t parse_size(std::string_view text, std::string_view what);
std::int64_t parse_int(std::string_view text, std::string_view what);

}  // namespace marrow::base
