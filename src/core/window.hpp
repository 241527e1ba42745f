// SPDX-License-Identifier: Apache-2.0
// What stands behind Window and LocalBuffer.
#pragma once

#include <memory>

#include "core/symmetric_block.hpp"

namespace marrow::core {

class WindowState {
 public:
  /// Collective. @param recipe  allocated: the arena allocated the block and frees it
  WindowState(std::shared_ptr<CommunicatorState> comm, const memory::Block& block,
              const Recipe& recipe);
  ~WindowState() { release(); }

  /// Collective: frees now, on every rank.
  void close();
  /// Local: frees; the communicator has seen to it that nobody uses it.
  void release();
  const SymmetricBlock& symmetric() const;
  /// Local: lets go of peers and keys, keeps the memory.
  void suspend() { symmetric_.reset(); }
  /// Collective, after suspend(): reachable again, by the present paths.
  void rebuild(CommunicatorState& comm);
  const Recipe& recipe() const { return recipe_; }

 private:
  void give_back(CommunicatorState& comm);
  void make(CommunicatorState& comm);

  std::weak_ptr<CommunicatorState> comm_;
  memory::Block block_;
  Recipe recipe_;
  bool open_ = true;
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
  /// Lets go of keys, keeps the memory; then registers it again, by the present paths.
  void suspend();
  void attach();

 private:
  void release();

  std::shared_ptr<CommunicatorState> comm_;
  memory::Block block_;
  LocalBufferHandle handle_;
  gda::Region gda_;
};

}  // namespace marrow::core
