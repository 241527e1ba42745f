// SPDX-License-Identifier: Apache-2.0
// One round of softnic_posted.cuh on queues of its own, one rank posting to itself.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "marrow/marrow.hpp"
#include "unit/softnic_posted.cuh"

namespace marrow::softnic_posted {

/// @param wqes  of each queue; 16-bit indices wrap at 65536
/// @param good  one mistake in that many WQEs, and one at the end
/// @return how many WQEs were posted and compared
inline std::uint64_t round(Communicator& comm, const Place& place, int queues, int block,
                           std::uint64_t seed, std::uint64_t wqes, std::uint32_t good,
                           Memory memory) {
  Window window = comm.allocate(std::size_t{2} << 20, memory);
  Window out = comm.allocate(sizeof(Verdict) * static_cast<std::size_t>(queues), Memory::host);
  auto device = comm.device_communicator({.contexts = queues, .sharing = Sharing::thread});
  auto* verdicts = reinterpret_cast<Verdict*>(out.host());
  for (int q = 0; q < queues; ++q) verdicts[q] = {};
  launch(place, queues, block, sizeof(Shared), post_and_compare, device.handle(), window.handle(),
         seed, wqes, good, static_cast<Verdict*>(out.data()));
  comm.synchronize();
  std::uint64_t posted = 0;
  for (int q = 0; q < queues; ++q) {
    const Verdict& v = verdicts[q];
    EXPECT_EQ(v.line, 0u) << "seed " << seed << " queue " << q << ": softnic_posted.cuh line "
                          << v.line << ", at " << v.at << ": got " << v.got << ", wanted "
                          << v.wanted << "; " << v.posted << " WQEs posted";
    posted += v.posted;
  }
  device.close();
  out.close();
  window.close();
  return posted;
}

inline Config config(const Place& place, const std::string& softnic) {
  Config config;
  config.place = place;
  config.parameters = {{"MARROW_PATH", "gda"},
                       {"MARROW_NIC", "softnic"},
                       {"MARROW_SOFTNIC", softnic},
                       {"MARROW_GDA_DEPTH", "256"}};
  return config;
}

}  // namespace marrow::softnic_posted
