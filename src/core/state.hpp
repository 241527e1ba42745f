// SPDX-License-Identifier: Apache-2.0
// The communicator behind marrow::Communicator: one object that owns, in the order of tear-down,
// device communicators, windows, transports, memory and the bootstrap.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/parameters.hpp"
#include "bootstrap/bootstrap.hpp"
#include "bootstrap/together.hpp"
#include "core/fault_board.hpp"
#include "core/path_plan.hpp"
#include "gda/nic.hpp"
#include "marrow/marrow.hpp"
#include "memory/arena.hpp"
#include "proxy/transport.hpp"

namespace marrow::core {

/// A block of every rank, and what each path needs to reach it.
class SymmetricBlock;
class DeviceState;
class WindowState;
class LocalBufferState;

class CommunicatorState : public std::enable_shared_from_this<CommunicatorState> {
 public:
  CommunicatorState(const UniqueId& id, int nranks, int rank, Config config);
  ~CommunicatorState();
  CommunicatorState(const CommunicatorState&) = delete;
  CommunicatorState& operator=(const CommunicatorState&) = delete;

  int rank() const { return bootstrap_->rank(); }
  int nranks() const { return bootstrap_->nranks(); }
  const Place& place() const { return config_.place; }
  /// Tells the communicators of this process apart; never 0.
  std::uint64_t number() const { return number_; }
  bootstrap::Bootstrap& bootstrap() { return *bootstrap_; }
  const base::Parameters& parameters() const { return parameters_; }
  memory::Arena& arena() { return *arena_; }
  gda::Nic* nic() { return nic_.get(); }
  proxy::Transport* proxy() { return proxy_.get(); }
  const PathPlan& plan() const { return plan_; }
  ControlBlock* control_device() const { return reinterpret_cast<ControlBlock*>(control_.device); }
  FaultBoard& faults() { return *faults_; }
  bool uses(Path path) const { return plan_.connected() >> static_cast<int>(path) & 1; }

  /// A local step of a collective: when it throws on any rank it throws on all, so nobody is left
  /// waiting. The others' error says whose it was.
  void together(const std::string& what, const std::function<void()>& step) {
    bootstrap::together(*bootstrap_, what, step);
  }

  /// All ranks gave the same value, or Error(mismatch) naming who gave which, on every rank.
  void same_on_all(const char* what, std::uint64_t value);

  template <class T>
  std::vector<T> allgather(const T& mine) {
    const auto all = bootstrap_->allgather(std::as_bytes(std::span(&mine, 1)));
    std::vector<T> values(all.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].size() == sizeof(T)) std::memcpy(&values[r], all[r].data(), sizeof(T));
    }
    return values;
  }

  /// Every rank's block as an address of ours where we can load/store it; empty blocks elsewhere.
  /// What was mapped is released with release_shared.
  std::vector<memory::Block> share(memory::Arena& arena, const memory::Block& mine);

  /// Collective: the next number that no rank has used. (Ranks may differ after a collective that a
  /// peer's death ended half way.)
  std::uint32_t next_symmetric_id();
  std::uint32_t next_local_id();
  void forget(WindowState* window);
  void forget(DeviceState* device);

  std::shared_ptr<WindowState> allocate(std::uint64_t bytes, Memory kind);
  std::shared_ptr<WindowState> register_window(void* pointer, std::uint64_t bytes);
  std::shared_ptr<LocalBufferState> register_local(void* pointer, std::uint64_t bytes);
  std::shared_ptr<DeviceState> device_communicator(const Requirements& requirements);

  void check();
  void revoke(const std::string& why);
  std::vector<bool> agree_failures(std::chrono::milliseconds deadline);
  std::vector<PeerInfo> peers() const;
  PeerStatistics statistics(int peer) const;
  void synchronize();
  void close();

 private:
  void choose_paths();
  std::vector<std::vector<bool>> who_reaches_whom();
  void open_gda();
  void open_proxy();
  void watch();
  void unwatch();  ///< no call runs once it returns
  std::shared_ptr<WindowState> keep(std::shared_ptr<WindowState> window);

  const std::uint64_t number_;
  Config config_;
  base::Parameters parameters_;
  std::unique_ptr<bootstrap::Bootstrap> bootstrap_;
  std::unique_ptr<memory::Arena> arena_;
  memory::Block control_;
  std::unique_ptr<FaultBoard> faults_;
  std::unique_ptr<gda::Nic> nic_;
  std::unique_ptr<proxy::Transport> proxy_;
  std::vector<RankFacts> facts_;
  std::vector<Wish> wishes_;
  std::string gda_reason_;
  PathPlan plan_;
  mutable std::mutex mutex_;  ///< the lists below, and slow periods
  std::vector<std::shared_ptr<WindowState>> windows_;
  std::vector<std::shared_ptr<DeviceState>> devices_;
  std::vector<std::uint64_t> slow_periods_;
  std::vector<bool> masked_;
  std::uint32_t next_id_ = 0;
  std::uint32_t next_local_ = 1u << 30;  ///< local buffers: ids that no window has
  bool closed_ = false;
};

}  // namespace marrow::core
