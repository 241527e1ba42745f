// SPDX-License-Identifier: Apache-2.0
// Memory that a network cannot read or write, GPU memory above all, is staged: what is sent goes through
// a slot of pinned host memory here, what arrives through one at the target, and a copy engine moves the
// bytes between slots and the memory itself.
//
// Who owns what: the sender. A rank's staging block has, for each peer, kStageSlots slots to send from or
// fetch into, and as many that only this peer puts into or asks to be filled. Slot k of the one half and
// slot k of the other are taken together by whoever starts a transfer, so that neither side ever waits
// for memory of the other in a circle: what frees a slot (a completion, a credit, a copy) needs none.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "memory/arena.hpp"
#include "proxy/copy_engine.hpp"

namespace marrow::proxy {

/// Slots to one peer: transfers of that many chunks are under way at once.
inline constexpr int kStageSlots = 8;
inline constexpr std::uint64_t kStageSmallestChunk = 4096;
inline constexpr std::uint64_t kStageLargestChunk = std::uint64_t{1} << 19;

/// Bytes of a slot: what `total` bytes leave for both halves of nranks peers, a power of two in the limits
/// above (the smallest is taken whatever the total is).
std::uint64_t stage_chunk(std::uint64_t total, int nranks);

/// As progress threads see it. On the board; changed by putting another one there.
struct Staging {
  std::uint64_t chunk = 0;  ///< the same on every rank
  int rank = 0;
  int nranks = 0;
  memory::Block block;       ///< [2][nranks][kStageSlots][chunk]; empty: nothing here is staged
  std::vector<void*> local;  ///< [threads] handles of it; null without a block
  std::vector<void*>
      remote;  ///< [nranks] of the peers' blocks, by the thread that talks to them; null: not needed
  std::vector<CopyEngine*> out;  ///< [threads] from staged memory of ours into slots
  std::vector<CopyEngine*> in;   ///< [threads] from slots into it, and what peers ask for

  /// Where our slot to send from or fetch into lies in our block.
  std::uint64_t out_offset(std::uint32_t peer, int slot) const {
    return (static_cast<std::uint64_t>(peer) * kStageSlots + static_cast<std::uint64_t>(slot)) *
           chunk;
  }
  /// Where the slot lies, in the block of whoever receives, that `from` puts into.
  std::uint64_t in_offset(std::uint32_t from, int slot) const {
    return out_offset(static_cast<std::uint32_t>(nranks) + from, slot);
  }
  std::uint64_t block_bytes() const {
    return out_offset(static_cast<std::uint32_t>(nranks) * 2, 0);
  }
};

/// Copies by the CPU, for memory that it can reach: what MARROW_PROXY_STAGE=always stages on the CPU
/// device. A copy is made when somebody asks whether it is done, never before copy() has returned, so
/// that who does not ask is found out.
class HostCopyEngine final : public CopyEngine {
 public:
  void attach_thread() override {}
  std::uint64_t copy(void* to, const void* from, std::size_t bytes) override;
  bool done(std::uint64_t ticket) override;
  void* map(int fd, std::uint64_t fd_offset, std::size_t bytes) override;
  void unmap(void* address, std::size_t bytes) override;

 private:
  struct Copy {
    void* to;
    const void* from;  ///< null: `small`
    std::size_t bytes;
    std::byte small[64];
  };
  std::vector<Copy> copies_;
  std::uint64_t last_ = 0;
};

}  // namespace marrow::proxy
