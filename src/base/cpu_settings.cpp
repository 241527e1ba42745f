// SPDX-License-Identifier: Apache-2.0
// What marrow::launch asks the registry for each kernel on the CPU device.
#include "base/parameters.hpp"
#include "marrow/device/launch.cuh"

namespace marrow::detail {

CpuSettings cpu_settings() {
  return {static_cast<int>(base::parameter_int("MARROW_CPU_LANES")),
          static_cast<std::uint64_t>(base::parameter_int("MARROW_CPU_SEED"))};
}

}  // namespace marrow::detail
