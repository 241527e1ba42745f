// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name in any file system: it dies with its last descriptor or mapping, so
// a killed job leaves nothing behind. Sealed, so that no holder can shrink it under another's feet
// (which would be SIGBUS there).
#pragma once

#include <cstddef>
#include <string>

#include "base/fd.hpp"

namespace marrow::base {

/// A sparse memory file of exactly `size` bytes (> 0), sealed against any change of its size.
/// @param name  shown in /proc/<pid>/maps, for people; need not be unique
/// Throws Error(out_of_memory or system).
Fd memfd(const std::string& name, std::size_t size);

/// Size in bytes of an open file, and whether it is sealed against shrinking: a receiver checks
/// both before it maps a stranger's descriptor. Throws Error(system).
std::size_t file_size(int fd);
bool sealed_against_shrinking(int fd);

}  // namespace marrow::base
