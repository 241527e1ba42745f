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
  DeviceImpl(std::shared_ptr<Board> board, std::shared_ptr<DeviceRings> rings,
             std::function<void()> stopped)
      : board_(std::move(board)), rings_(std::move(rings)), stopped_(std::move(stopped)) {}
  ~DeviceImpl() override { stop(); }

  const ProxyDevice* device() const override { return rings_->device(); }

  void stop() override {
    if (!board_) return;
    const std::uint64_t version =
        board_->change([&](View& view) { std::erase(view.devices, rings_); });
    if (!board_->wait_acknowledged(version, base::Deadline::after(kSettleTimeout))) {
      MARROW_WARN(proxy, "operations of a closed device communicator are still under way after ",
                  kSettleTimeout.count(), " ms");
    }
    board_.reset();
    stopped_();
  }

 private:
  std::shared_ptr<Board> board_;
  std::shared_ptr<DeviceRings> rings_;
  std::function<void()> stopped_;
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
        numbers_(std::make_shared<std::vector<bool>>(kStreams / kDeviceStreams)) {
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
    running_.clear();  // joins
    board_->close();
    for (const auto& [id, region] : regions_) release(*region);
    regions_.clear();
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
    if (!block.host && !p.device_memory) {
      return base::cat("network ", name(), " does not reach device memory here");
    }
    if (window && p.needs_descriptor && block.fd < 0) {
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

  void register_window(std::uint32_t id, const memory::Block& block) override {
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
            region = add_memory(id, block, true, mine, &key);
            return key;
          });
      bootstrap::together(
          bootstrap_, base::cat("reaching window ", id, " over network ", name()), [&] {
            region->remote.resize(bootstrap_.nranks());
            for (int r = 0; r < bootstrap_.nranks(); ++r) {
              if (keys[r].empty()) continue;
              Link& link = *links_[r % threads_];
              link.check(link.network().import_key(
                             link.endpoint(), static_cast<std::uint32_t>(r), keys[r].data(),
                             static_cast<std::uint32_t>(keys[r].size()), &region->remote[r]),
                         base::cat("window ", id, " of rank ", r));
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
    publish(add_memory(id, block, false, -1, nullptr));
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
    auto rings = std::make_shared<DeviceRings>(arena, requirements, counters, bootstrap_.nranks(),
                                               threads_, log_size_,
                                               static_cast<std::uint32_t>(number) * kDeviceStreams);
    (*numbers_)[number] = true;
    const std::uint64_t version =
        board_->change([&](View& view) { view.devices.push_back(rings); });
    auto device = std::make_unique<DeviceImpl>(
        board_, rings, [numbers = numbers_, number] { (*numbers)[number] = false; });
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
                                     int keyed, Blob* key) {
    auto region = std::make_shared<Region>();
    region->id = id;
    region->window = window;
    region->block = block;
    region->local.resize(threads_);
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
        link.check(link.network().register_memory(link.endpoint(), &memory, &region->local[t],
                                                  bytes, &length),
                   base::cat("registering ", block.bytes, " bytes"));
      } catch (...) {
        release(*region);
        throw;
      }
      if (t == keyed) {
        const auto view = std::as_bytes(std::span(bytes, length));
        key->assign(view.begin(), view.end());
      }
    }
    return region;
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
  std::mutex mutex_;
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
