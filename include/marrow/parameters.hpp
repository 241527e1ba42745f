// SPDX-License-Identifier: Apache-2.0
// The registry of MARROW_* parameters, for programs that show or check it (`marrow env` is one).
#pragma once

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

}  // namespace marrow
