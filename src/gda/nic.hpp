// SPDX-License-Identifier: Apache-2.0
// The gda path's host side, part 1: one NIC, opened for one communicator, and memory registered with
// it. A real ConnectX and softnic come through one function table (verbs/table.hpp); nothing here
// knows which it is, except for choosing it and for where its doorbells and queues may lie.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/parameters.hpp"
#include "bootstrap/bootstrap.hpp"
#include "marrow/marrow.hpp"
#include "marrow/place.hpp"
#include "memory/arena.hpp"

namespace marrow::gda {

class Device;  // device.hpp
class Queues;  // queues.hpp

/// Memory the NIC may use. Keys are big endian, as a WQE wants them. A plain value; whoever registered
/// it calls deregister once.
struct Region {
  std::uint64_t iova = 0;  ///< address of byte 0 in WQEs, ours and our peers'
  std::uint32_t lkey_be = 0;
  std::uint32_t rkey_be = 0;
  void* handle = nullptr;  ///< null: nothing registered
};

/// What may be done to a region.
enum class Access : std::uint8_t {
  local,  ///< source of puts and target of gets of this rank
  data,   ///< window: peers read, write and add; a NIC may relax the order of their writes
  sync    ///< signals, counters: as data, writes strictly in order
};

class Nic {
 public:
  /// Collective. MARROW_NIC: auto takes a real mlx5 device if every rank finds one, else softnic if all
  /// ranks are on one host; softnic; none; or a device's name, e.g. mlx5_0.
  /// @throws Error(unsupported) on every rank, whose sentence lists what was tried; Error(timeout |
  ///         peer_failed) from the bootstrap
  static std::unique_ptr<Nic> open(bootstrap::Bootstrap& bootstrap,
                                   const base::Parameters& parameters, const Place& place);
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  /// e.g. "mlx5_0", "softnic0".
  const std::string& name() const;
  /// Whether softnic does the NIC's part.
  bool emulated() const;
  /// Whether windows of this kind (the memory's real kind: block.kind) can be used.
  /// @param why  if not null and the answer is no: one sentence
  bool can_use(Memory kind, std::string* why = nullptr) const;

  /// Collective, before the first sync memory and queues: who executes the queues of an emulated NIC. A block
  /// on each rank's GPU where some rank's registered memory is GPU memory, else a CPU thread; for good.
  /// MARROW_SOFTNIC=engine=... decides otherwise.
  /// @throws Error(network) on every rank
  void choose_engine(bootstrap::Bootstrap& bootstrap);
  /// Whether that is a block on this rank's GPU.
  bool on_gpu_engine() const;
  /// Where words that this NIC adds to lie best: signals, counters.
  Memory sync_memory() const;

  /// Registers a block. Not collective.
  /// @throws Error(unsupported) for memory this NIC cannot use, Error(out_of_memory | network)
  Region register_region(const memory::Block& block, Access access);
  /// Legal on an empty region; leaves it empty. Never throws: failures are logged.
  void deregister(Region& region) noexcept;

  /// Collective: one RC queue pair per (context, peer), ourselves included, connected.
  /// @param arena         outlives the queues; they take memory and tables from it
  /// @param requirements  contexts, counters, sharing, first_index
  /// @param counters      where DeviceCommunicator::counter[1] lies (Access::sync); null when there are none
  /// @throws Error(out_of_memory | network | mismatch | timeout | peer_failed)
  std::unique_ptr<Queues> connect(bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
                                  const Requirements& requirements, const Region* counters);

 private:
  explicit Nic(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  std::shared_ptr<Device> device_;
  bool engine_chosen_ = false;
  bool gpu_memory_ = false;  ///< some registered memory is GPU memory
};

}  // namespace marrow::gda
