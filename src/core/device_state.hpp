// SPDX-License-Identifier: Apache-2.0
// What stands behind DeviceCommunicatorOwner: sync memory, counters and queues of one device communicator.
#pragma once

#include <array>
#include <memory>

#include "core/symmetric_block.hpp"
#include "gda/queues.hpp"

namespace marrow::core {

class DeviceState {
 public:
  /// Collective.
  /// @param number  Recipe::number
  DeviceState(std::shared_ptr<CommunicatorState> comm, const Requirements& requirements,
              std::uint32_t number);
  ~DeviceState();

  const DeviceCommunicator& handle() const;
  /// Collective: frees now, on every rank.
  void close();
  /// Collective, after release(): made again, by the present paths; handle() is another one then.
  void rebuild(CommunicatorState& comm);
  const Recipe& recipe() const { return recipe_; }
  /// Local: proxy threads touch nothing for us any more.
  void stop();
  /// Throws the first error that a queue recorded.
  void check() const;
  /// Local: frees; the communicator has seen to it that nobody uses it.
  void release();
  /// The survivors agreed that these ranks failed: operations to them return peer_failed at once.
  void mask(const std::vector<bool>& failed);

 private:
  void make(CommunicatorState& comm);
  static Memory sync_memory(CommunicatorState& comm, Path path);
  void make_sync_memory(CommunicatorState& comm);
  void make_counters(CommunicatorState& comm);
  void connect(CommunicatorState& comm);
  std::uint64_t* private_words(std::uint64_t count);

  std::weak_ptr<CommunicatorState> comm_;
  Requirements requirements_;
  Recipe recipe_;
  std::unique_ptr<memory::Arena> arena_;
  DeviceCommunicator handle_;
  std::uint8_t* path_table_ = nullptr;
  std::array<std::unique_ptr<SymmetricBlock>, kPaths> sync_;
  std::array<memory::Block, kPaths> counters_;
  gda::Region gda_counters_;
  std::unique_ptr<gda::Queues> queues_;
  std::unique_ptr<proxy::Device> proxy_device_;
  bool open_ = false;
  bool closed_ = false;  ///< for good
};

}  // namespace marrow::core
