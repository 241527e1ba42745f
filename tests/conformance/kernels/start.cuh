// SPDX-License-Identifier: Apache-2.0
// How a case of a table is started.
#pragma once

#include "conformance/kernels/kit.cuh"

namespace marrow::conformance {

/// @param kShared  bytes of dynamic shared memory a block
template <void (*kKernel)(Args), std::size_t kShared = 0>
void start(const Place& place, int grid, int block, const Args& args) {
  launch(place, grid, block, kShared, kKernel, args);
}

}  // namespace marrow::conformance
