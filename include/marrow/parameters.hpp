// SPDX-License-Identifier: Apache-2.0
// The registry of MARROW_* parameters, for programs that show or check it (`marrow env` is one).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marrow/abi/abi.h"

namespace marrow {

/// One parameter and its value in force in this process.
struct ParameterInfo {
  std::string name;           ///< MARROW_...
  std::string type;           ///< "boolean", "integer", "duration", "size", "string", "choice"
  std::string range;          ///< in words, e.g. "integer from 32 to 32768, a power of two"
  std::string default_value;  ///< as a user would write it
  std::string value;          ///< in force, not checked
  bool from_environment = false;
  std::string owner;  ///< the part of Marrow that reads it
  std::string help;   ///< one or two sentences
};

/// All parameters, sorted by name.
MARROW_API std::vector<ParameterInfo> parameters();

/// Lines of the log that this process could not write where MARROW_DEBUG_FILE says: a full disk, a closed pipe.
/// Logging never fails a communicator; this says what is missing from the log.
MARROW_API std::uint64_t dropped_log_lines() noexcept;

}  // namespace marrow
