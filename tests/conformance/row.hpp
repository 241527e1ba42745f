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

#if defined(MARROW_CONFORMANCE_GPU)
inline constexpr bool kGpu = true;
#else
inline constexpr bool kGpu = false;
#endif

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

/// Whether the row can be run at all: what no pair of values shows.
bool possible(const Row& row);

/// Of a row's figures (bench/schema.json): emulated where the CPU device runs the kernels or softnic moves
/// the bytes, as on some pairs of `mixed`; else measured.
std::string_view kind_of(std::string_view path);

std::vector<std::string> split(std::string_view text, char separator = ',');

/// Rows that cover every compatible pair of values of the given columns; the same for the same seed.
using Columns = std::vector<std::pair<std::string, std::vector<std::string>>>;
std::vector<Row> pairwise(const Columns& columns, std::uint64_t seed);
/// The full product of the columns that change the code path; the other columns' values are drawn.
std::vector<Row> product(const Columns& columns, std::uint64_t seed);

/// The rows are dealt out so that one process runs many, and one communicator as many as may share
/// it. Rows of one worker_key may share processes; those of one communicator_key a communicator.
std::string worker_key(const Row& row);
std::string communicator_key(const Row& row);
/// Neighbours share what they can, in stretches of at most `batch` rows; stretches of different
/// processes take turns, so that a run cut short by its time limit loses a little of everything.
std::vector<Row> in_batches(const std::vector<Row>& rows, std::size_t batch);

}  // namespace marrow::conformance
