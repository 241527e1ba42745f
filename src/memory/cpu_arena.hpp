// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory/arena.hpp"

namespace marrow::memory {
std::unique_ptr<Arena> create_cpu_arena();
}  // namespace marrow::memory
