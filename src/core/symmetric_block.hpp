// SPDX-License-Identifier: Apache-2.0
// One block of memory per rank under one handle: the common part of windows and of sync memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/state.hpp"
#include "gda/nic.hpp"

namespace marrow::core {

/// Which paths a block is made reachable by: bit per Path.
using PathBits = std::uint8_t;
constexpr PathBits bit(Path path) { return static_cast<PathBits>(1u << static_cast<int>(path)); }

/// Why add, fetch_add, compare_swap and SignalAt are refused on windows of such memory; empty: they work.
/// @param gpu         whether kernels run on a GPU
/// @param gpu_engine  whether blocks on GPUs execute the gda path's queues
std::string why_no_atomics(bool gpu, Path atomic_path, const memory::Block& block,
                           bool gpu_engine = false);

class SymmetricBlock {
 public:
  /// Collective. The block stays the caller's; the arena keeps tables and mappings.
  /// @param id  the same on every rank; what proxy descriptors carry
  SymmetricBlock(CommunicatorState& comm, memory::Arena& arena, const memory::Block& block,
                 std::uint32_t id, PathBits paths, gda::Access access);
  /// Local: deregisters and unmaps. Nobody may use the block any more.
  ~SymmetricBlock();
  SymmetricBlock(const SymmetricBlock&) = delete;
  SymmetricBlock& operator=(const SymmetricBlock&) = delete;

  /// For kernels that start from now on: whether atomics work on host memory is known once the first device
  /// communicator has chosen softnic's engine.
  WindowHandle handle() const;
  const memory::Block& block() const { return block_; }
  std::string why_no_atomics() const;
  /// The peer's part as an address of ours; empty when not load/store reachable.
  const memory::Block& peer(int rank) const { return peers_[rank]; }

 private:
  void map_peers();
  void register_gda(gda::Access access);
  void register_proxy();
  void release();

  CommunicatorState& comm_;
  memory::Arena& arena_;
  memory::Block block_;
  PathBits paths_;
  gda::Access access_;
  WindowHandle handle_;
  std::vector<memory::Block> peers_;
  std::vector<bool> mapped_;  ///< by rank: peers_ has a mapping of ours, not a thread's address
  gda::Region gda_;
  bool proxy_registered_ = false;
};

}  // namespace marrow::core
