// SPDX-License-Identifier: Apache-2.0
#include "proxy/transport.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "base/log.hpp"
#include "base/numa.hpp"
#include "base/text.hpp"
#include "bootstrap/together.hpp"
#include "proxy/progress_thread.hpp"
#include "topology/topology.hpp"

namespace marrow::proxy {
namespace {

// A progress thread passes its loop every sleep at least; this bounds one that does not.
constexpr std::chrono::milliseconds kSettleTimeout{5000};

using Blob = std::vector<std::byte>;

Blob blob_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}
std::string text_of(std::span<const std::byte> blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

class TransportImpl;

class DeviceImpl final : public Device {
 public:
  /// @param stopped  called with whether the progress threads let go of everything
  DeviceImpl(std::shared_ptr<Board> board, std::shared_ptr<DeviceRings> rings,
             std::function<void(bool)> stopped)
      : board_(std::move(board)), rings_(std::move(rings)), stopped_(std::move(stopped)) {}
  ~DeviceImpl() override { stop(); }

  const ProxyDevice* device() const override { return rings_->device(); }

  void stop() override {
    if (!board_) return;
    const std::uint64_t version = board_->change([&](View& view) {
      std::erase(view.devices, rings_);
      view.regions.erase(rings_->stage_region());
    });
    const bool clean = board_->wait_acknowledged(version, base::Deadline::after(kSettleTimeout));
    if (!clean) {
      MARROW_WARN(proxy, "operations of a closed device communicator are still under way after ",
                  kSettleTimeout.count(), " ms");
    }
    board_.reset();
    stopped_(clean);
  }

 private:
  std::shared_ptr<Board> board_;
  std::shared_ptr<DeviceRings> rings_;
  std::function<void(bool)> stopped_;
};

class TransportImpl final : public Transport {
 public:
  TransportImpl(bootstrap::Bootstrap& bootstrap, const base::Parameters& parameters,
                const Place& place, Hooks hooks)
      : bootstrap_(bootstrap),
        parameters_(parameters),
        place_pci_(topology::pci_of(place)),
        hooks_(std::move(hooks)),
        threads_(static_cast<int>(base::parameter_int("MARROW_PROXY_THREADS", parameters))),
        log_size_(static_cast<std::uint32_t>(std::countr_zero(
            static_cast<std::uint64_t>(base::parameter_int("MARROW_PROXY_RING", parameters))))),
        board_(std::make_shared<Board>(bootstrap.nranks(), threads_)),
        numbers_(std::make_shared<std::vector<bool>>(kStreams / kDeviceStreams)),
        self_(std::make_shared<TransportImpl*>(this)),
        stage_(base::parameter_string("MARROW_PROXY_STAGE", parameters)),
        chunk_(stage_chunk(static_cast<std::uint64_t>(
                               base::parameter_size("MARROW_PROXY_STAGE_BYTES", parameters)),
                           bootstrap.nranks())) {
    policy_.spins =
        static_cast<std::uint32_t>(base::parameter_int("MARROW_PROXY_SPINS", parameters));
    policy_.sleep =
        std::chrono::microseconds(base::parameter_int("MARROW_PROXY_SLEEP_US", parameters));
    for (int t = 0; t < threads_; ++t) {
      engines_.push_back(std::make_unique<Engine>(t, threads_, bootstrap.rank(), bootstrap.nranks(),
                                                  *board_, hooks_));
    }
  }

  ~TransportImpl() override {
    *self_ = nullptr;
    running_.clear();  // joins
    board_->close();
    for (const auto& [id, region] : regions_) release(*region);
    regions_.clear();
    if (staging_) release(*staging_);
    links_.clear();
  }

  /// Collective: tries one network. Throws, on every rank, why it cannot be used.
  void connect(const Candidate& candidate, base::Deadline deadline) {
    const int nranks = bootstrap_.nranks();
    std::vector<Blob> all;
    try {
      all = bootstrap::gather_together(bootstrap_, "opening it", [&] {
        Blob addresses(static_cast<std::size_t>(threads_) * sizeof(marrow_network_address));
        for (int t = 0; t < threads_; ++t) {
          links_.push_back(std::make_unique<Link>(
              candidate, hooks_.make_copy_engine ? hooks_.make_copy_engine() : nullptr, parameters_,
              place_pci_));
          engines_[t]->use(*links_[t]);
          links_[t]->listen(static_cast<std::uint32_t>(bootstrap_.rank()),
                            static_cast<std::uint32_t>(nranks), engines_[t]->events());
          std::memcpy(addresses.data() + t * sizeof(marrow_network_address), &links_[t]->address(),
                      sizeof(marrow_network_address));
        }
        return addresses;
      });
      bootstrap::together(bootstrap_, "connecting", [&] {
        for (int t = 0; t < threads_; ++t) {
          std::vector<marrow_network_address> addresses(nranks);
          for (int r = 0; r < nranks; ++r) {
            if (all[r].empty()) continue;  // masked: an address of 0 bytes
            if (all[r].size() != threads_ * sizeof(marrow_network_address)) {
              throw Error(Code::mismatch,
                          base::cat("rank ", r, " has another MARROW_PROXY_THREADS than the ",
                                    threads_, " of rank ", bootstrap_.rank()),
                          "give it one value on every rank");
            }
            std::memcpy(&addresses[r], all[r].data() + t * sizeof(marrow_network_address),
                        sizeof(marrow_network_address));
          }
          const auto left = std::chrono::nanoseconds(deadline.remaining());
          links_[t]->check(links_[t]->network().connect(links_[t]->endpoint(), addresses.data(),
                                                        static_cast<std::uint64_t>(left.count())),
                           "connect");
        }
      });
    } catch (...) {
      links_.clear();
      throw;
    }
  }

  /// Collective: starts the progress threads. Throws, on every rank, when one cannot.
  void run(const Place& place) {
    place_ = place;
    try {
      bootstrap::together(bootstrap_, "starting progress threads", [&] {
        node_ = node_of(place);
        const Pinning pinning(base::parameter_string("MARROW_PROXY_CPUS", parameters_), node_);
        MARROW_INFO(proxy, threads_, " progress threads run ", pinning.where());
        for (int t = 0; t < threads_; ++t) {
          running_.push_back(std::make_unique<ProgressThread>(
              *engines_[t], *links_[t], policy_, pinning, t, bootstrap_.rank(), hooks_));
        }
      });
    } catch (...) {
      running_.clear();  // joins
      links_.clear();
      throw;
    }
  }

  std::string name() const override { return links_[0]->network().name; }
  bool emulated() const override { return links_[0]->properties().emulated != 0; }

  std::string refuses(const memory::Block& block, bool window) const override {
    const marrow_network_properties& p = links_[0]->properties();
    if (!block.host && !p.device_memory && !can_stage()) {
      return base::cat("network ", name(), " does not reach device memory here, and ",
                       stage_ == "never" ? "MARROW_PROXY_STAGE=never forbids staging it"
                                         : "there is no copy engine to stage it");
    }
    if (window && p.needs_descriptor && block.fd < 0 && (block.host || !can_stage())) {
      for (int r = 0; r < bootstrap_.nranks(); ++r) {
        if (!bootstrap_.same_process(r)) {
          return base::cat("network ", name(),
                           " needs a file descriptor to share memory with rank ", r,
                           ", and this memory has none");
        }
      }
    }
    return {};
  }

  bool stages_device_memory() const override {
    return hooks_.make_copy_engine && can_stage() &&
           (stage_ == "always" || !links_[0]->properties().device_memory);
  }
  bool staged(std::uint32_t id) const override {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    return found != regions_.end() && found->second->staged;
  }

  void register_window(std::uint32_t id, const memory::Block& block, bool may_stage) override {
    const int me = bootstrap_.rank();
    std::shared_ptr<Region> region;
    const auto undo = [&] {
      if (region) release(*region);
    };
    try {
      // Peers talk to the endpoint of the thread that serves our rank.
      const int mine = me % threads_;
      const std::vector<Blob> keys = bootstrap::gather_together(
          bootstrap_, base::cat("registering window ", id, " with network ", name()), [&] {
            if (id >= kProxyMaxWindows)
              throw Error(Code::internal, base::cat("window number ", id, " is too large"));
            const std::string why = refuses(block, true);
            if (!why.empty())
              throw Error(Code::unsupported, why, "allocate the window with Memory::host");
            Blob key;
            region = add_memory(id, block, true, mine, &key, may_stage);
            WindowKey header{chunk_, region->staged, {}};
            if (region->staged) key = stage_key_;
            const auto bytes = std::as_bytes(std::span(&header, 1));
            key.insert(key.begin(), bytes.begin(), bytes.end());
            return key;
          });
      bootstrap::together(
          bootstrap_, base::cat("reaching window ", id, " over network ", name()), [&] {
            region->remote.resize(bootstrap_.nranks());
            for (int r = 0; r < bootstrap_.nranks(); ++r) {
              if (keys[r].empty()) continue;
              WindowKey header{};
              if (keys[r].size() < sizeof(header))
                throw Error(Code::internal, base::cat("rank ", r, " sent no window key"));
              std::memcpy(&header, keys[r].data(), sizeof(header));
              const auto key = std::span(keys[r]).subspan(sizeof(header));
              const std::string what = base::cat("window ", id, " of rank ", r);
              if (!header.staged) {
                region->remote[r] = import(r, key, what);
                continue;
              }
              if (header.chunk != chunk_) {
                throw Error(Code::mismatch,
                            base::cat("rank ", r, " stages by ", header.chunk, " bytes, rank ", me,
                                      " by ", chunk_),
                            "give MARROW_PROXY_STAGE_BYTES one value on every rank");
              }
              reach_staging(r, key, what);
            }
            publish(region);  // before any peer knows that all are ready
          });
    } catch (...) {
      deregister(id);  // if it got as far as the board
      undo();
      throw;
    }
  }

  void register_region(std::uint32_t id, const memory::Block& block) override {
    const std::string why = refuses(block, false);
    if (!why.empty()) throw Error(Code::unsupported, why, "copy through a window or host memory");
    publish(add_memory(id, block, false, -1, nullptr, true));
  }

  void deregister(std::uint32_t id) override {
    std::shared_ptr<Region> region;
    {
      std::lock_guard lock(mutex_);
      const auto found = regions_.find(id);
      if (found == regions_.end()) return;
      region = found->second;
      regions_.erase(found);
    }
    const std::uint64_t version = board_->change([&](View& view) { view.regions.erase(id); });
    if (!board_->wait_acknowledged(version, base::Deadline::after(kSettleTimeout))) {
      MARROW_WARN(proxy, "region ", id, " is still in use ", kSettleTimeout.count(),
                  " ms after it was closed");
      return;  // better a handle too many than one that is used after its end
    }
    release(*region);
  }

  std::unique_ptr<Device> create_device(memory::Arena& arena, const Requirements& requirements,
                                        const memory::Block& counters) override {
    const auto free = std::find(numbers_->begin(), numbers_->end(), false);
    if (free == numbers_->end()) {
      throw Error(Code::unsupported,
                  base::cat(numbers_->size(), " device communicators are open on the proxy path"),
                  "close one before you make another");
    }
    const auto number = static_cast<std::size_t>(free - numbers_->begin());
    // Rings near the threads that drain them, not near the one that sets them up.
    const base::PreferNode near(node_);
    auto rings = std::make_shared<DeviceRings>(
        arena, requirements, counters, bootstrap_.nranks(), threads_, log_size_,
        static_cast<std::uint32_t>(number) * kDeviceStreams, kernel_bytes(),
        static_cast<std::uint32_t>(
            base::parameter_size("MARROW_PROXY_STAGE_THREAD_BYTES", parameters_)));
    if (rings->stage().bytes != 0)
      publish(add_memory(rings->stage_region(), rings->stage(), false, -1, nullptr, false));
    (*numbers_)[number] = true;
    const std::uint64_t version =
        board_->change([&](View& view) { view.devices.push_back(rings); });
    auto device = std::make_unique<DeviceImpl>(
        board_, rings,
        [numbers = numbers_, number, self = self_, id = rings->stage_region()](bool clean) {
          (*numbers)[number] = false;
          if (*self && clean) (*self)->forget(id);
        });
    if (!board_->wait_acknowledged(version, base::Deadline::after(kSettleTimeout))) {
      throw Error(Code::internal, "the proxy's progress threads do not answer",
                  "see the errors before this one");
    }
    return device;
  }

  void fail_peer(int rank) override {
    board_->change([&](View& view) { view.failed[rank] = 1; });
  }

 private:
  /// NUMA node of the network's device, else of the GPU; -1: unknown
  int node_of(const Place& place) const {
    const int node = links_[0]->properties().numa_node;
    if (node >= 0 || !place.on_gpu()) return node;
    for (const topology::Gpu& gpu : topology::gpus()) {
      if (gpu.ordinal == place.device) return gpu.numa;
    }
    return -1;
  }

  /// Registers with every thread's endpoint; the key is of endpoint `keyed`.
  std::shared_ptr<Region> add_memory(std::uint32_t id, const memory::Block& block, bool window,
                                     int keyed, Blob* key, bool may_stage) {
    auto region = std::make_shared<Region>();
    region->id = id;
    region->window = window;
    region->block = block;
    region->local.resize(threads_);
    region->staged = may_stage && must_stage(block);
    if (!region->staged) {
      try {
        add_to_network(*region, keyed, key);
        return region;
      } catch (const Error& error) {
        // What the network promises of device memory is what it will try.
        if (!may_stage || block.host || !can_stage() || error.code() != Code::unsupported) throw;
        MARROW_INFO(proxy, "device memory is staged: ", error.sentence());
        region->staged = true;
      }
    }
    make_stage_block();
    return region;
  }

  void add_to_network(Region& region, int keyed, Blob* key) {
    const memory::Block& block = region.block;
    marrow_network_memory memory{};
    memory.address = block.host ? block.host : block.device;
    memory.bytes = block.bytes;
    memory.device = block.host ? 0 : 1;
    memory.fd = block.fd;
    memory.fd_offset = block.fd_offset;
    for (int t = 0; t < threads_; ++t) {
      std::uint8_t bytes[MARROW_NETWORK_MAX_KEY];
      std::uint32_t length = 0;
      Link& link = *links_[t];
      try {
        link.check(link.network().register_memory(link.endpoint(), &memory, &region.local[t], bytes,
                                                  &length),
                   base::cat("registering ", block.bytes, " bytes"));
      } catch (...) {
        release(region);
        throw;
      }
      if (t == keyed) {
        const auto view = std::as_bytes(std::span(bytes, length));
        key->assign(view.begin(), view.end());
      }
    }
  }

  // --- staging

  bool can_stage() const {
    return stage_ == "always" || (stage_ == "auto" && hooks_.make_copy_engine);
  }
  bool must_stage(const memory::Block& block) const {
    if (stage_ == "always") return true;
    if (block.host || stage_ == "never") return false;
    const marrow_network_properties& p = links_[0]->properties();
    if (!p.device_memory) return true;
    if (!p.needs_descriptor || block.fd >= 0) return false;
    for (int r = 0; r < bootstrap_.nranks(); ++r) {
      if (!bootstrap_.same_process(r)) return can_stage();
    }
    return false;
  }
  /// Largest put that kernels write to staging slots themselves; 0: none, since nothing will be staged.
  std::uint32_t kernel_bytes() const {
    const bool likely = stage_ == "always" || (staging_ && staging_->block.bytes != 0) ||
                        (can_stage() && !links_[0]->properties().device_memory);
    return likely ? static_cast<std::uint32_t>(
                        base::parameter_size("MARROW_PROXY_STAGE_KERNEL_BYTES", parameters_))
                  : 0;
  }

  /// What threads need to talk to peers whose memory is staged.
  Region& staging_region() {
    if (!staging_) {
      staging_ = std::make_shared<Region>();
      staging_->local.resize(threads_);
      staging_->remote.resize(bootstrap_.nranks());
      for (int t = 0; t < threads_ * 2; ++t) {
        copy_engines_.push_back(hooks_.make_copy_engine ? hooks_.make_copy_engine()
                                                        : std::make_unique<HostCopyEngine>());
      }
    }
    return *staging_;
  }
  /// Slots for what is staged here: pinned, registered, on the board.
  void make_stage_block() {
    Region& region = staging_region();
    if (region.block.bytes != 0) return;
    stage_arena_ = memory::Arena::create(place_);
    const base::PreferNode near(node_);
    const Staging shape = describe_staging();
    region.block = stage_arena_->allocate(shape.block_bytes(), Memory::host);
    try {
      add_to_network(region, bootstrap_.rank() % threads_, &stage_key_);
    } catch (...) {
      region.block = {};
      stage_arena_.reset();
      throw;
    }
    MARROW_INFO(proxy, "staging memory of ", region.block.bytes, " bytes, ", chunk_,
                " bytes a slot");
    publish_staging();
  }
  void reach_staging(int peer, std::span<const std::byte> key, const std::string& what) {
    Region& region = staging_region();
    if (!region.remote[peer]) region.remote[peer] = import(peer, key, what + ", staging memory");
    publish_staging();
  }
  Staging describe_staging() const {
    Staging staging;
    staging.chunk = chunk_;
    staging.rank = bootstrap_.rank();
    staging.nranks = bootstrap_.nranks();
    staging.block = staging_->block;
    staging.local = staging_->local;
    staging.remote = staging_->remote;
    for (int t = 0; t < threads_; ++t) {
      staging.out.push_back(copy_engines_[2 * t].get());
      staging.in.push_back(copy_engines_[2 * t + 1].get());
    }
    return staging;
  }
  void publish_staging() {
    board_->change([staging = std::make_shared<const Staging>(describe_staging())](View& view) {
      view.staging = staging;
    });
  }

  void* import(int peer, std::span<const std::byte> key, const std::string& what) {
    Link& link = *links_[peer % threads_];
    void* remote = nullptr;
    link.check(
        link.network().import_key(link.endpoint(), static_cast<std::uint32_t>(peer), key.data(),
                                  static_cast<std::uint32_t>(key.size()), &remote),
        what);
    return remote;
  }
  /// A region that is no more on the board.
  void forget(std::uint32_t id) {
    std::shared_ptr<Region> region;
    {
      std::lock_guard lock(mutex_);
      const auto found = regions_.find(id);
      if (found == regions_.end()) return;
      region = found->second;
      regions_.erase(found);
    }
    release(*region);
  }

  void publish(const std::shared_ptr<Region>& region) {
    {
      std::lock_guard lock(mutex_);
      regions_[region->id] = region;
    }
    board_->change([&](View& view) { view.regions[region->id] = region; });
  }

  /// Gives its handles back to the networks; idempotent.
  void release(Region& region) {
    for (std::size_t r = 0; r < region.remote.size(); ++r) {
      Link& link = *links_[r % threads_];
      if (region.remote[r]) link.network().release_key(link.endpoint(), region.remote[r]);
      region.remote[r] = nullptr;
    }
    for (int t = 0; t < threads_; ++t) {
      if (region.local[t])
        links_[t]->network().deregister_memory(links_[t]->endpoint(), region.local[t]);
      region.local[t] = nullptr;
    }
  }

  bootstrap::Bootstrap& bootstrap_;
  const base::Parameters parameters_;
  const std::string place_pci_;  ///< of the GPU; empty: none
  const Hooks hooks_;
  const int threads_;
  const std::uint32_t log_size_;
  IdlePolicy policy_;
  int node_ = -1;  ///< NUMA node of the progress threads; -1: unknown
  std::shared_ptr<Board> board_;
  std::shared_ptr<std::vector<bool>> numbers_;  ///< stream groups in use; core's thread only
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Link>> links_;
  /// In front of every window key.
  struct WindowKey {
    std::uint64_t chunk;
    std::uint8_t staged;  ///< the key is of the rank's staging memory
    std::uint8_t reserved[7];
  };

  std::shared_ptr<TransportImpl*> self_;  ///< for Devices that outlive us; null then
  const std::string stage_;
  const std::uint64_t chunk_;
  Place place_;
  std::unique_ptr<memory::Arena> stage_arena_;
  std::vector<std::unique_ptr<CopyEngine>> copy_engines_;  ///< [threads][out, in], of staging_
  std::shared_ptr<Region> staging_;  ///< of core's thread; null: not needed yet
  Blob stage_key_;                   ///< of staging_->block
  mutable std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<Region>> regions_;
  std::vector<std::unique_ptr<ProgressThread>> running_;
};

}  // namespace

std::unique_ptr<Transport> Transport::open(bootstrap::Bootstrap& bootstrap,
                                           const base::Parameters& parameters, const Place& place,
                                           Hooks hooks) {
  const auto deadline =
      base::Deadline::after(base::parameter_duration("MARROW_BOOTSTRAP_TIMEOUT", parameters));
  std::vector<Candidate> mine;
  std::unique_ptr<TransportImpl> transport;
  const std::vector<Blob> lists =
      bootstrap::gather_together(bootstrap, "reading MARROW_NETWORK", [&] {
        mine = candidates(base::parameter_string("MARROW_NETWORK", parameters));
        (void)Pinning(base::parameter_string("MARROW_PROXY_CPUS", parameters),
                      -1);  // refuses nonsense
        transport = std::make_unique<TransportImpl>(bootstrap, parameters, place, std::move(hooks));
        std::string names;
        for (const Candidate& candidate : mine)
          names += std::string(candidate.network->name) + "\n";
        return blob_of(names);
      });
  for (std::size_t r = 0; r < lists.size(); ++r) {
    if (!lists[r].empty() && lists[r] != lists[bootstrap.rank()]) {
      std::string theirs = text_of(lists[r]);
      std::string ours = text_of(lists[bootstrap.rank()]);
      std::replace(theirs.begin(), theirs.end(), '\n', ' ');
      std::replace(ours.begin(), ours.end(), '\n', ' ');
      throw Error(Code::mismatch,
                  base::cat("rank ", bootstrap.rank(), " would try the networks ", ours,
                            "and rank ", r, " ", theirs),
                  "give MARROW_NETWORK one value on every rank");
    }
  }
  std::string reasons;
  for (const Candidate& candidate : mine) {
    try {
      transport->connect(candidate, deadline);
      transport->run(place);
      MARROW_INFO(proxy, "network ", transport->name(), " connects ", bootstrap.nranks(), " ranks");
      return transport;
    } catch (const Error& error) {
      // Another network would not help.
      if (error.code() == Code::aborted || error.code() == Code::mismatch ||
          error.code() == Code::peer_failed || error.code() == Code::out_of_memory)
        throw;
      reasons +=
          base::cat(reasons.empty() ? "" : "; ", candidate.network->name, ": ", error.sentence());
    }
  }
  throw Error(Code::unsupported,
              base::cat("no network connects all ranks: ",
                        reasons.empty() ? "this build has none" : reasons),
              "set MARROW_NETWORK to one that reaches every host");
}

}  // namespace marrow::proxy
