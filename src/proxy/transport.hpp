// SPDX-License-Identifier: Apache-2.0
// The proxy path of one communicator: a network, its progress threads, the table of regions they may
// touch, and the rings of each device communicator.
//
// Who calls what when:
//   open                     collective, once
//   register_window          collective, every window and sync window, before its handle is used
//   create_device            collective
//   Device::stop             before peers free memory: after it this rank's threads touch nothing for it.
//                            Then a barrier, then memory may go
//   deregister, destructors  not collective, bounded
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/parameters.hpp"
#include "bootstrap/bootstrap.hpp"
#include "marrow/abi/proxy_ring.h"
#include "marrow/error.hpp"
#include "marrow/marrow.hpp"
#include "memory/arena.hpp"
#include "proxy/copy_engine.hpp"

namespace marrow::proxy {

/// What core lends to a transport. Each may be empty.
struct Hooks {
  /// What a progress thread or the network could not do, with the peer's rank (-1: none). Called on a
  /// progress thread; must not block or call the transport.
  std::function<void(int peer, const Error& error)> on_error;
  /// A copy engine for one progress thread; empty: device memory is refused.
  std::function<std::unique_ptr<CopyEngine>()> make_copy_engine;
};

/// The rings of one device communicator. The destructor stops it.
class Device {
 public:
  virtual ~Device() = default;
  /// For DeviceCommunicator::proxy: an address kernels can use.
  virtual const ProxyDevice* device() const = 0;
  /// Threads forget the rings; operations still under way are dropped. Bounded, idempotent.
  virtual void stop() = 0;
};

class Transport {
 public:
  /// Collective of all ranks: agrees on a network (MARROW_NETWORK), connects, starts the threads.
  /// @throws Error(unsupported) saying for each network why not, the same on every rank;
  ///         Error(invalid_argument) for an unknown network, listing the known ones
  static std::unique_ptr<Transport> open(bootstrap::Bootstrap& bootstrap,
                                         const base::Parameters& parameters, const Place& place,
                                         Hooks hooks);

  virtual ~Transport() = default;

  /// The network's name, e.g. "shm".
  virtual std::string name() const = 0;
  /// Software stands in for the hardware it names (softnic).
  virtual bool emulated() const = 0;
  /// Why such memory cannot be a window or local buffer; empty: it can.
  virtual std::string refuses(const memory::Block& block, bool window) const = 0;
  /// Whether the network says that it reaches no device memory, and what is here of it will be staged.
  virtual bool stages_device_memory() const = 0;
  /// Whether the network does not reach that registered region, so that it is staged (staging.hpp).
  virtual bool staged(std::uint32_t id) const = 0;

  /// Collective: makes the block a window of number `id` (below kProxyMaxWindows, the same on every
  /// rank, unused). @throws Error on every rank when it fails on one
  /// @param may_stage  no: for memory that other ranks' or networks' writes must reach at once (signals)
  virtual void register_window(std::uint32_t id, const memory::Block& block,
                               bool may_stage = true) = 0;
  /// Not collective: source of puts, target of gets. id below kProxyMaxRegions, no window's.
  virtual void register_region(std::uint32_t id, const memory::Block& block) = 0;
  /// Either kind. Waits (bounded) until the threads have let go of it; descriptors that name it are
  /// refused afterwards. No throw; an unknown id is ignored.
  virtual void deregister(std::uint32_t id) = 0;

  /// Collective. arena must outlive the Device. counters: host memory, one 64-bit word per counter.
  virtual std::unique_ptr<Device> create_device(memory::Arena& arena,
                                                const Requirements& requirements,
                                                const memory::Block& counters) = 0;

  /// A peer is gone: operations to it complete with Status::peer_failed, now and later. Any thread; returns at once.
  virtual void fail_peer(int rank) = 0;
};

/// A network for people: `marrow info`.
struct NetworkInfo {
  std::string name;
  std::string device;  ///< first device; empty: none on this host
  std::string reason;  ///< why it cannot be used here; empty: it can
  int priority = 0;
};
/// All networks linked into this program. Tries init; no endpoint is made.
std::vector<NetworkInfo> known_networks();

}  // namespace marrow::proxy
