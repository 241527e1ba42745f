// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory/arena.hpp"

namespace marrow::memory {
/// Arena of one GPU. @throws Error(unsupported) without a driver, Error(invalid_argument) without that GPU
std::unique_ptr<Arena> create_cuda_arena(int device);
}  // namespace marrow::memory
