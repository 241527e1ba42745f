// SPDX-License-Identifier: Apache-2.0
// A row: one run of one case, as a set of named values. They are the options of the command line, the
// columns of the matrix and what a failure prints to repeat it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/case.hpp"

namespace marrow::conformance {

struct Parameter {
  const char* name;
  const char* value;   ///< default
  const char* matrix;  ///< comma list: what the matrix covers
  const char* help;
};
const std::vector<Parameter>& parameters();

/// A bad option; what() is the sentence.
struct UsageError {
  std::string what;
};

class Row {
 public:
  Row();
  /// @throws UsageError
  void set(std::string_view name, std::string_view value);
  const std::string& text(std::string_view name) const;
  std::uint64_t number(std::string_view name) const;
  bool is(std::string_view name, std::string_view value) const { return text(name) == value; }

  /// Options that differ from the default, as on a command line.
  std::vector<std::string> arguments() const;
  std::string line() const;
  const Case& which() const;
  bool operator==(const Row&) const = default;

 private:
  std::map<std::string, std::string, std::less<>> values_;
};

/// Whether two values may be in one row: an impossible pair (plain loads over a NIC) or an idle one
/// (message sizes of a case that has its own).
bool compatible(std::string_view name, std::string_view value, std::string_view other_name,
                std::string_view other_value);

std::vector<std::string> split(std::string_view text, char separator = ',');

/// Rows that cover every compatible pair of values of the given columns; the same for the same seed.
using Columns = std::vector<std::pair<std::string, std::vector<std::string>>>;
std::vector<Row> pairwise(const Columns& columns, std::uint64_t seed);
/// The full product of the columns that change the code path; the other columns' values are drawn.
std::vector<Row> product(const Columns& columns, std::uint64_t seed);

/// Runs rank `rank` of the row in this thread. Rank 0 makes the id and writes it to `id_file`, the
/// others read it there. Returns what went wrong, or nothing.
std::string run_rank(const Row& row, int rank, const std::string& id_file);

}  // namespace marrow::conformance
