// SPDX-License-Identifier: Apache-2.0
// How a case of a table is started.
#pragma once

#include "conformance/kernels/kit.cuh"

namespace marrow::conformance {

template <void (*kKernel)(Args)>
void start(const Place& place, int grid, int block, const Args& args) {
  launch(place, grid, block, 0, kKernel, args);
}

}  // namespace marrow::conformance
