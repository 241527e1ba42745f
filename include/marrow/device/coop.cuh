// SPDX-License-Identifier: Apache-2.0
// Cooperative groups: who calls an operation together. All members call it with the same arguments;
// the result is the same for all. A group's sync orders its members' stores before the operation.
#pragma once

#include "marrow/device/platform.cuh"

namespace marrow {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

namespace detail {
/// @param any  asks the group whether one of its members says so
template <class Any>
MARROW_DEVICE Status worst_of(Status status, const Any& any) {
  Status worst = Status::ok;
  if (!any(status != Status::ok)) return worst;
  for (std::uint32_t s = 1; s <= static_cast<std::uint32_t>(Status::invalid); ++s) {
    if (any(static_cast<std::uint32_t>(status) >= s)) worst = static_cast<Status>(s);
  }
  return worst;
}
}  // namespace detail

/// One thread, alone. The default of every operation.
struct Thread {
  MARROW_DEVICE int rank() const { return 0; }
  MARROW_DEVICE int size() const { return 1; }
  MARROW_DEVICE void sync() const {}
  /// The worst status of the group's members, at each of them; also a sync.
  MARROW_DEVICE Status agree(Status status) const { return status; }
  /// Member 0's word, at each member.
  /// @param bits  the lowest that count: a block, which has no shared memory of its own, asks bit by bit
  MARROW_DEVICE std::uint64_t first(std::uint64_t word, int = 64) const { return word; }
};

/// `kLanes` neighbouring lanes of a warp (a power of two; at most the warp). On the CPU device a
/// tile is cut to the warp's lanes.
template <int kLanes>
struct Tile {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0);
  MARROW_DEVICE int width() const { return kLanes < warp_lanes() ? kLanes : warp_lanes(); }
  MARROW_DEVICE int rank() const { return lane_index() % width(); }
  MARROW_DEVICE int size() const { return count_lanes(mask()); }
  MARROW_DEVICE void sync() const { warp_sync(mask()); }
  MARROW_DEVICE Status agree(Status status) const {
    const std::uint32_t lanes = mask();
    return detail::worst_of(status, [&](bool mine) { return warp_ballot(lanes, mine) != 0; });
  }
  MARROW_DEVICE std::uint64_t first(std::uint64_t word, int = 64) const {
    const std::uint32_t lanes = mask();
    return warp_shuffle(lanes, word, lowest_lane(lanes));
  }
  /// The members' lanes, as a mask over the warp.
  MARROW_DEVICE std::uint32_t mask() const {
    const int w = width();
    if (w >= warp_lanes()) return full_mask();
    return full_mask() & (((1u << w) - 1) << (lane_index() / w * w));
  }
};

/// The warp: 32 lanes on a GPU, MARROW_CPU_LANES on the CPU device.
using Warp = Tile<32>;

/// Every lane of the warp calls, each with offsets, sizes and values of its own, all with the same peer,
/// context and options: on the gda path their operations are posted with one reservation and one
/// doorbell. (Thread does that too where the lanes happen to be together, in a queue that may be shared.)
/// The same Status for all, the worst. On the gda path invalid means that nothing was posted; a lane has at
/// most 1 GiB there, more is invalid.
struct EachLane {
  MARROW_DEVICE int rank() const { return 0; }
  MARROW_DEVICE int size() const { return 1; }
  MARROW_DEVICE void sync() const { warp_sync(full_mask()); }
  MARROW_DEVICE Status agree(Status status) const { return Warp{}.agree(status); }
};

/// The whole block.
struct Block {
  MARROW_DEVICE int rank() const { return thread_index(); }
  MARROW_DEVICE int size() const { return block_size(); }
  MARROW_DEVICE void sync() const { block_sync(); }
  MARROW_DEVICE Status agree(Status status) const {
    return detail::worst_of(status, [](bool mine) { return block_any(mine); });
  }
  MARROW_DEVICE std::uint64_t first(std::uint64_t word, int bits = 64) const {
    std::uint64_t out = 0;
    for (int bit = 0; bit < bits; ++bit)
      out |= std::uint64_t{block_any(rank() == 0 && (word >> bit & 1) != 0)} << bit;
    return out;
  }
  /// Block's dynamic shared memory, from byte_offset on.
  template <class T>
  MARROW_DEVICE T* shared(std::size_t byte_offset = 0) const {
    return dynamic_shared<T>(byte_offset);
  }
};

template <class T>
inline constexpr bool is_coop = false;
template <>
inline constexpr bool is_coop<Thread> = true;
template <>
inline constexpr bool is_coop<EachLane> = true;
template <>
inline constexpr bool is_coop<Block> = true;
template <int kLanes>
inline constexpr bool is_coop<Tile<kLanes>> = true;

}  // namespace cpu_device / gpu_device
}  // namespace marrow
