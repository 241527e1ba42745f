// SPDX-License-Identifier: Apache-2.0
// What runs before the kernel of a case: poison everywhere.
#pragma once

#include "conformance/kernels/kit.cuh"

namespace marrow::conformance {

MARROW_KERNEL prepare(Args a) {
  const Block coop;
  for (int peer = 0; peer < a.comm.nranks; ++peer) {
    const std::uint64_t slot = slot_stride(a.bytes);
    poison(coop, a.inbox.local + a.base + peer * slot, slot, 0);
    poison(coop, a.outbox.local + peer * slot, slot, 0);
    if (a.use_local) poison(coop, a.local.local + peer * slot, slot, 0);
  }
}

void launch_prepare(const Place& place, const Args& args) {
  launch(place, 1, place.on_gpu() ? 256 : 1, 0, prepare, args);
}

}  // namespace marrow::conformance
