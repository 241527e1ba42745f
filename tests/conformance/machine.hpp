// SPDX-License-Identifier: Apache-2.0
// What the driver needs of the machine that runs the kernels: a place for a rank, and memory.
#pragma once

#include <cstddef>
#include <memory>

#include "marrow/place.hpp"

namespace marrow::conformance {

class Machine {
 public:
  virtual ~Machine() = default;
  /// Where rank `rank` of `gpus` GPUs runs; a stream of its own on a GPU.
  virtual Place place(int rank, int gpus) = 0;
  /// Memory that kernels reach and that a caller may own: GPU memory, or pinned host memory.
  virtual void* allocate(std::size_t bytes, bool host) = 0;
  virtual void release(void* pointer, bool host) = 0;
};

std::unique_ptr<Machine> make_machine();
/// GPUs of this machine; 0 in the CPU driver.
int gpu_count();

}  // namespace marrow::conformance
