// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.hpp"

#include "memory/cpu_arena.hpp"
#include "memory/cuda_arena.hpp"

namespace marrow::memory {

std::unique_ptr<Arena> Arena::create(const Place& place) {
  return place.on_gpu() ? create_cuda_arena(place.device) : create_cpu_arena();
}

}  // namespace marrow::memory
