// SPDX-License-Identifier: Apache-2.0
// Starting a thread fails with a limit's name instead of "Resource temporarily unavailable".
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::base {

/// @param what  whose thread: "the bootstrap thread of rank 3"
/// @throws Error(out_of_memory) when the system gives none
template <class Body>
std::thread start_thread(const std::string& what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(Code::out_of_memory, cat("Starting ", what, " failed: ", error.what(), "."),
                "raise the limit of threads or of memory (ulimit -u, ulimit -v, the container's "
                "pids limit).");
  }
}

}  // namespace marrow::base
