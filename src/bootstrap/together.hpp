// SPDX-License-Identifier: Apache-2.0
// A local step of a collective. A rank whose step fails must not leave the others waiting for it, and
// they must not go on without it: so every rank tells how its step went before anybody goes on.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.hpp"

namespace marrow::bootstrap {

/// Collective: runs `step` here and gathers what the steps of all ranks returned, by rank; empty for
/// masked ranks.
/// @param what  names the step in the others' sentence: "allocating a window"
/// @throws on every rank when a step failed: the own error where it happened (a failed allocation of
///         the program's memory as Error(out_of_memory)), elsewhere that error's code and sentence
///         with its rank; else what allgather() throws
std::vector<std::vector<std::byte>> gather_together(
    Bootstrap& bootstrap, const std::string& what,
    const std::function<std::vector<std::byte>()>& step);

/// The same without results.
void together(Bootstrap& bootstrap, const std::string& what, const std::function<void()>& step);

}  // namespace marrow::bootstrap
