// SPDX-License-Identifier: Apache-2.0
// What a group promises its members, for the CPU device and for GPUs alike: they meet, each hears the worst status
// whoever has it, and member 0's word arrives whole.
#pragma once

#include "marrow/device.cuh"

namespace marrow {

inline constexpr std::uint32_t kGroupsSharedBytes = 1024 * 8;  ///< a word for each of 1024 threads

template <class Coop>
MARROW_DEVICE void group_agrees(const Coop& coop, int group_of_mine, std::uint64_t* wrong) {
  auto* slot = dynamic_shared<std::uint64_t>();
  const auto expect = [&](bool good) {
    if (!good) add_relaxed<Scope::system>(wrong, std::uint64_t{1});
  };
  for (int r = 0; r < 16; ++r) {
    const bool mine = coop.rank() == r % coop.size();
    if (mine) slot[group_of_mine] = static_cast<std::uint64_t>(r);
    coop.sync();
    expect(slot[group_of_mine] == static_cast<std::uint64_t>(r));
    expect(coop.agree(mine ? Status::aborted : Status::timeout) == Status::aborted);
    expect(coop.agree(mine ? static_cast<Status>(r % 5) : Status::ok) ==
           static_cast<Status>(r % 5));
  }
  for (std::uint64_t r = 1; r <= 4; ++r) {
    const std::uint64_t word = 0x9e3779b97f4a7c15ull * r, here = coop.rank() == 0 ? word : ~word;
    expect(coop.first(here) == word);
    expect((coop.first(here, 7) & 127) == (word & 127));
  }
}

/// By a block of any size.
MARROW_DEVICE void groups_agree(std::uint64_t* wrong) {
  const int t = thread_index();
  group_agrees(Thread{}, t, wrong);
  block_sync();
  const Tile<2> pair;
  group_agrees(pair, t / pair.width(), wrong);
  block_sync();
  group_agrees(Warp{}, t / warp_lanes(), wrong);
  block_sync();
  group_agrees(Block{}, 0, wrong);
}

}  // namespace marrow
