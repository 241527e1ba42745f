// SPDX-License-Identifier: Apache-2.0
// JSON in and out. json_nlohmann.cpp has it; json_none.cpp is the reduced build, which refuses.
#pragma once

#include <string>

#include "cli/result.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {

/// @throws Error(unsupported) in a reduced build
void require_json(const std::string& option);

/// For --json FILE (empty: not asked for), before the work.
/// @param writes  this process will write the file: it is tried
/// @throws Error(unsupported) in a reduced build, Error(system) when the file cannot be written
void prepare_json(const std::string& file, bool writes);

Error cannot_write(const std::string& file, int error);

/// The document as bench/schema.json says. @throws Error(internal) for a row whose kind lies
std::string to_json(const Document& document);

/// Writes to the file, or to stdout for "-". @throws Error(system) when it cannot
void write_json(const std::string& file, const Document& document);

}  // namespace marrow::cli
