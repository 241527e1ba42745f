// SPDX-License-Identifier: Apache-2.0
// Where kernels of a communicator run: a GPU and a stream, or the CPU device.
#pragma once

#include "marrow/abi/abi.h"

namespace marrow {

/// Executor of kernels. Trivially copyable.
struct Place {
  enum class Kind : std::uint8_t { cpu, gpu };
  Kind kind = Kind::cpu;
  int device = 0;          ///< CUDA ordinal, for gpu
  void* stream = nullptr;  ///< cudaStream_t, for gpu; null: the legacy default stream

  static constexpr Place cpu() { return {}; }
  static constexpr Place gpu(int device, void* stream = nullptr) {
    return {Kind::gpu, device, stream};
  }
  constexpr bool on_gpu() const { return kind == Kind::gpu; }
};

}  // namespace marrow
