// SPDX-License-Identifier: Apache-2.0
// What stands behind Window and LocalBuffer.
#pragma once

#include <memory>

#include "core/symmetric_block.hpp"

namespace marrow::core {

class WindowState {
 public:
  /// Collective. @param owned  the arena allocated the block and frees it
  WindowState(std::shared_ptr<CommunicatorState> comm, const memory::Block& block, bool owned);
  ~WindowState() { release(); }

  /// Collective: frees now, on every rank.
  void close();
  /// Local: frees; the communicator has seen to it that nobody uses it.
  void release();
  const SymmetricBlock& symmetric() const;

 private:
  void give_back(CommunicatorState& comm);

  std::weak_ptr<CommunicatorState> comm_;
  memory::Block block_;
  bool owned_;  ///< else adopted
  std::unique_ptr<SymmetricBlock> symmetric_;
};

class LocalBufferState {
 public:
  LocalBufferState(std::shared_ptr<CommunicatorState> comm, const memory::Block& block,
                   std::uint32_t id);
  ~LocalBufferState();
  LocalBufferState(const LocalBufferState&) = delete;
  LocalBufferState& operator=(const LocalBufferState&) = delete;
  const LocalBufferHandle& handle() const { return handle_; }

 private:
  void release();

  std::shared_ptr<CommunicatorState> comm_;
  memory::Block block_;
  LocalBufferHandle handle_;
  gda::Region gda_;
};

}  // namespace marrow::core
