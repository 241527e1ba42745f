// SPDX-License-Identifier: Apache-2.0
#include "ep/launches.hpp"

#include "ep/launches_body.cuh"

namespace marrow::ep {

const Launches& launches(const Place& place) {
  static constexpr Launches kCpu{run_dispatch,
                                 run_combine,
                                 run_flush,
                                 run_reset,
                                 run_report,
                                 [](const Place&) {},
                                 [](const Place&) { return false; },
                                 [](const Place&) { return 0; },
                                 [](const Place&) {}};
  if (!place.on_gpu()) return kCpu;
#if MARROW_WITH_CUDA
  return gpu_launches();
#else
  throw Error(Code::unsupported, "an ep::Group on a GPU: this library was built without nvcc",
              "build it with MARROW_CUDA=ON");
#endif
}

}  // namespace marrow::ep
