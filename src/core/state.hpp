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
#include "topology/topology.hpp"

namespace marrow::core {

/// A window or device communicator, as a replacement must make it again. Trivially copyable.
struct Recipe {
  enum class What : std::uint32_t { allocated = 1, registered, device_communicator };
  What what{};
  std::uint32_t number = 0;  ///< in the order they were made
  std::uint64_t values[6] = {};
  bool operator==(const Recipe&) const = default;
};

/// What the paths are planned from, by rank. Kept, because a rank that has failed cannot be asked again.
struct Survey {
  std::vector<std::vector<Wish>> wishes;  ///< [from][to]
  std::vector<RankFacts> facts;
  std::vector<topology::Endpoint> endpoints;
  std::vector<std::vector<bool>> reach;  ///< [from][to]
};

/// A block of every rank, and what each path needs to reach it.
class SymmetricBlock;
class DeviceState;
class WindowState;
class LocalBufferState;

class CommunicatorState : public std::enable_shared_from_this<CommunicatorState> {
 public:
  /// @param replacement  takes the place of a rank that the others admit
  CommunicatorState(const UniqueId& id, int nranks, int rank, Config config,
                    bool replacement = false);
  ~CommunicatorState();
  CommunicatorState(const CommunicatorState&) = delete;
  CommunicatorState& operator=(const CommunicatorState&) = delete;

  int rank() const { return bootstrap_->rank(); }
  int nranks() const { return bootstrap_->nranks(); }
  const UniqueId& id() const { return id_; }
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

  /// At the start of each collective that makes an object: while a replacement is admitted, all ranks
  /// must make the same one now. @throws Error(mismatch) on every rank
  void begin_making(const Recipe& recipe);
  void end_making();
  /// A replacement makes the survivors' objects again: they have agreed on sizes before.
  bool being_admitted() const { return to_make_ > 0; }
  /// A replacement may do nothing else before it is complete. @throws Error(invalid_argument)
  void require_admitted(const char* what) const;
  /// Why windows and device communicators cannot be used now; empty: they can.
  std::string why_torn() const;

  /// Collective: the next number that no rank has used. (Ranks may differ after a collective that a
  /// peer's death ended half way.)
  std::uint32_t next_symmetric_id();
  std::uint32_t next_local_id();
  void forget(WindowState* window);
  void forget(DeviceState* device);
  void forget(LocalBufferState* buffer);
  void keep(LocalBufferState* buffer);

  std::shared_ptr<WindowState> allocate(std::uint64_t bytes, Memory kind);
  std::shared_ptr<WindowState> register_window(void* pointer, std::uint64_t bytes);
  std::shared_ptr<LocalBufferState> register_local(void* pointer, std::uint64_t bytes);
  std::shared_ptr<DeviceState> device_communicator(const Requirements& requirements);

  void check();
  void revoke(const std::string& why);
  std::vector<bool> agree_failures(std::chrono::milliseconds deadline);
  void admit(int rank, std::chrono::milliseconds deadline);
  void reconnect();
  std::vector<PeerInfo> peers() const;
  PeerStatistics statistics(int peer) const;
  void synchronize();
  void close();

 private:
  void choose_paths();
  void survey();
  Survey survey_failed_ranks(const std::vector<bool>& masked);
  void adopt_failures(const std::vector<bool>& failed);
  /// Collective: makes again what an admission that failed has taken apart.
  void make_again();
  void rebuild_if_torn();
  void join_survivors();
  void meet_newcomer(int objects);
  void take_apart();
  void rebuild();
  void finish_admission();
  void open_gda();
  void open_proxy();
  void watch();
  void unwatch();  ///< no call runs once it returns
  std::shared_ptr<WindowState> keep(std::shared_ptr<WindowState> window);

  const std::uint64_t number_;
  const UniqueId id_;
  Config config_;
  base::Parameters parameters_;
  std::unique_ptr<bootstrap::Bootstrap> bootstrap_;
  std::unique_ptr<memory::Arena> arena_;
  memory::Block control_;
  std::unique_ptr<FaultBoard> faults_;
  std::unique_ptr<gda::Nic> nic_;
  std::unique_ptr<proxy::Transport> proxy_;
  Survey survey_;
  std::vector<RankFacts> facts_;
  std::vector<Wish> wishes_;
  std::string gda_reason_;
  PathPlan plan_;
  mutable std::mutex mutex_;  ///< the lists below, and slow periods
  std::vector<std::shared_ptr<WindowState>> windows_;
  std::vector<std::shared_ptr<DeviceState>> devices_;
  std::vector<std::uint64_t> slow_periods_;
  std::vector<LocalBufferState*> buffers_;
  std::vector<bool> masked_;
  std::uint32_t next_id_ = 0;
  std::uint32_t next_local_ = 1u << 30;  ///< local buffers: ids that no window has
  bool closed_ = false;
  std::uint32_t made_ = 0;  ///< collectively, so the same order on every rank
  int newcomer_ = -1;       ///< the rank that is being admitted
  int to_make_ = 0;         ///< replacement: objects that the survivors have and this rank has not
  bool rebuilding_ = false;
  bool torn_ = false;  ///< windows and device communicators are released, not made again
};

}  // namespace marrow::core
