// SPDX-License-Identifier: Apache-2.0
// Whole files of /proc and /sys. A read there may fail after the file was opened: of a process that has ended, an
// attribute that a driver has no value for, a folder. std::istreambuf_iterator then throws; `<<` stops.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace marrow::base {

/// What can be read of a file; empty when that is nothing. Throws nothing about files.
inline std::string read_file(const std::filesystem::path& path) {
  const std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

}  // namespace marrow::base
