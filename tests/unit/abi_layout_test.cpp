// SPDX-License-Identifier: Apache-2.0
// The ABI number stands for a layout. A kernel and a library of different layouts but one number would read each
// other's words wrongly and not notice, so where a member moves, the number has to change too.
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "marrow/abi/device_communicator.h"
#include "marrow/abi/gda_queue.h"
#include "marrow/abi/proxy_ring.h"

namespace marrow {
namespace {

TEST(AbiLayout, ANumberStandsForOneLayout) {
  EXPECT_EQ(kAbiVersion, 3u);
  // If one of these differs: raise kAbiVersion, then write both down here.
  using Offsets = std::vector<std::size_t>;
  EXPECT_EQ((Offsets{sizeof(WindowHandle), offsetof(WindowHandle, local),
                     offsetof(WindowHandle, gda_base), offsetof(WindowHandle, gda_local),
                     offsetof(WindowHandle, atomic_path), offsetof(WindowHandle, no_atomics),
                     offsetof(WindowHandle, staged), offsetof(WindowHandle, owner),
                     offsetof(WindowHandle, near)}),
            (Offsets{144, 16, 32, 48, 60, 62, 63, 64, 80}));
  EXPECT_EQ((Offsets{sizeof(LocalBufferHandle), offsetof(LocalBufferHandle, local),
                     offsetof(LocalBufferHandle, gda_local), offsetof(LocalBufferHandle, staged),
                     offsetof(LocalBufferHandle, owner)}),
            (Offsets{48, 16, 24, 37, 40}));
  EXPECT_EQ((Offsets{sizeof(DeviceCommunicator), offsetof(DeviceCommunicator, atomic_path),
                     offsetof(DeviceCommunicator, path), offsetof(DeviceCommunicator, sync),
                     offsetof(DeviceCommunicator, gda), offsetof(DeviceCommunicator, look),
                     offsetof(DeviceCommunicator, owner)}),
            (Offsets{608, 52, 64, 80, 560, 576, 584}));
  EXPECT_EQ((Offsets{sizeof(GdaQueue), offsetof(GdaQueue, sq), offsetof(GdaQueue, qpn),
                     offsetof(GdaQueue, mask), offsetof(GdaQueue, doorbell), offsetof(GdaQueue, cq),
                     offsetof(GdaQueue, sink), offsetof(GdaQueue, guess),
                     offsetof(GdaQueue, reserved_index), offsetof(GdaQueue, posted_index),
                     offsetof(GdaQueue, ready_index), offsetof(GdaQueue, completed_index),
                     offsetof(GdaQueue, failed), offsetof(GdaQueue, result_state)}),
            (Offsets{512, 0, 8, 12, 16, 32, 56, 120, 128, 136, 192, 256, 272, 384}));
  EXPECT_EQ((Offsets{sizeof(GdaDevice), offsetof(GdaDevice, companion),
                     offsetof(GdaDevice, counter_base), offsetof(GdaDevice, fence_base)}),
            (Offsets{128, 4, 8, 24}));
  EXPECT_EQ((Offsets{sizeof(ProxyRing), offsetof(ProxyRing, consumed), offsetof(ProxyRing, results),
                     offsetof(ProxyRing, log_size), offsetof(ProxyRing, producer),
                     offsetof(ProxyRing, limit), offsetof(ProxyRing, credits),
                     offsetof(ProxyRing, consumed_seen), offsetof(ProxyRing, looking),
                     offsetof(ProxyRing, fetch_free), offsetof(ProxyRing, generation)}),
            (Offsets{1280, 8, 16, 24, 64, 72, 128, 136, 144, 192, 256}));
  EXPECT_EQ((Offsets{sizeof(ProxyDevice), offsetof(ProxyDevice, threads),
                     offsetof(ProxyDevice, rings), offsetof(ProxyDevice, posted),
                     offsetof(ProxyDevice, completion), offsetof(ProxyDevice, magic),
                     offsetof(ProxyDevice, slots), offsetof(ProxyDevice, log_size),
                     offsetof(ProxyDevice, stage_bytes), offsetof(ProxyDevice, stage_region),
                     offsetof(ProxyDevice, stage_thread_bytes), offsetof(ProxyDevice, stage_rings),
                     offsetof(ProxyDevice, stage), offsetof(ProxyDevice, stage_unused),
                     sizeof(ProxyCompletion), offsetof(ProxyCompletion, status)}),
            (Offsets{128, 4, 8, 16, 24, 32, 40, 48, 52, 64, 68, 72, 80, 88, 64, 8}));
}

}  // namespace
}  // namespace marrow
