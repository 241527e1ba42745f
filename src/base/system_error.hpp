// SPDX-License-Identifier: Apache-2.0
// Turns errno into marrow::Error. Running out of descriptors, memory or locked memory gets its own
// code and a next step, because the user can raise those limits.
#pragma once

#include <cerrno>
#include <string>

#include "marrow/error.hpp"

namespace marrow::base {

/// Text of an errno value, thread-safe.
std::string errno_text(int error);

/// Makes the Error for a failed system call. `what` is what was attempted, with its values.
Error system_error(int error, const std::string& what, const std::string& next_step = {});

/// Makes the Error for a std::bad_alloc: what was attempted (with its size, where one is known), and
/// this process's limit of address space if it has one.
Error no_memory(const std::string& what);

/// Throws system_error(errno, ...).
[[noreturn]] void throw_errno(const std::string& what, const std::string& next_step = {});

}  // namespace marrow::base
