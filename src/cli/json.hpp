// SPDX-License-Identifier: Apache-2.0
// JSON in and out. json_nlohmann.cpp has it; json_none.cpp is the reduced build, which refuses.
#pragma once

#include <string>

#include "cli/result.hpp"

namespace marrow::cli {

/// @throws Error(unsupported) in a reduced build: call before the work, not after it
void require_json(const std::string& option);

/// The document as bench/schema.json says. @throws Error(internal) for a row whose kind lies
std::string to_json(const Document& document);

/// Writes to the file, or to stdout for "-". @throws Error(system) when it cannot
void write_json(const std::string& file, const Document& document);

}  // namespace marrow::cli
