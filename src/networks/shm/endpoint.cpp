// SPDX-License-Identifier: Apache-2.0
#include "networks/shm/endpoint.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "base/memfd.hpp"
#include "base/parameters.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::shm {
namespace {

constexpr std::uint32_t kAddressMagic = 0x4d534831;
constexpr std::uint32_t kKeyMagic = 0x4d534b31;

struct Address {
  std::uint32_t magic;
  std::uint32_t rank;
  HostIdentity identity;
  std::uint64_t endpoint_id;
  char socket_name[64];
};
static_assert(sizeof(Address) <= MARROW_NETWORK_MAX_ADDRESS);

struct Key {
  std::uint32_t magic;
  std::uint32_t device;
  std::uint64_t region_id;
  std::uint64_t bytes;
  std::uint64_t address;  ///< used inside one process only
  std::uint64_t has_fd;
};
static_assert(sizeof(Key) <= MARROW_NETWORK_MAX_KEY);

/// Inboxes of this process, for ranks that are threads: they share the object, not a mapping of it.
class LocalInboxes {
 public:
  void add(std::uint64_t id, const std::shared_ptr<Inbox>& inbox) {
    std::lock_guard lock(mutex_);
    inboxes_[id] = inbox;
  }
  void remove(std::uint64_t id) {
    std::lock_guard lock(mutex_);
    inboxes_.erase(id);
  }
  std::shared_ptr<Inbox> find(std::uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = inboxes_.find(id);
    return found == inboxes_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<Inbox>> inboxes_;
};
LocalInboxes& local_inboxes() {
  static LocalInboxes inboxes;
  return inboxes;
}

}  // namespace

Options parse_options(const std::string& text) {
  Options options;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('&', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    const std::size_t equal = std::min(item.find('='), item.size());
    const std::string key = item.substr(0, equal);
    if (key != "reorder") {
      throw Error(Code::invalid_argument, base::cat("network shm has no option '", key, "'"),
                  "its only option is reorder=<seed>, for tests");
    }
    options.reorder = static_cast<std::uint64_t>(base::parse_int(
        equal < item.size() ? item.substr(equal + 1) : "", "option reorder of network shm"));
  }
  return options;
}

Endpoint::Endpoint(const marrow_network_services& services, const Options& options,
                   std::uint32_t rank, std::uint32_t nranks, const marrow_network_events& events)
    : services_(services),
      options_(options),
      rank_(rank),
      nranks_(nranks),
      events_(events),
      identity_(this_process()),
      endpoint_id_(base::random_u64()),
      inbox_(std::make_shared<Inbox>(nranks)),
      random_(options.reorder * 0x9e3779b97f4a7c15ull + rank + 1) {
  for (std::uint32_t r = 0; r < nranks; ++r) {
    peers_.push_back(std::make_unique<Peer>());
    peers_[r]->receiver.attach(&inbox_->from(r));
  }
  server_.offer(kInboxId, {base::Fd::dup_of(inbox_->fd()), 0, base::file_size(inbox_->fd())});
  local_inboxes().add(endpoint_id_, inbox_);
  server_.start();
}

Endpoint::~Endpoint() {
  local_inboxes().remove(endpoint_id_);
  inbox_->set_closed();
}

marrow_network_address Endpoint::address() const {
  Address mine{};
  mine.magic = kAddressMagic;
  mine.rank = rank_;
  mine.identity = identity_;
  mine.endpoint_id = endpoint_id_;
  server_.socket_name().copy(mine.socket_name, sizeof(mine.socket_name) - 1);
  marrow_network_address address{};
  address.bytes = sizeof(mine);
  std::memcpy(address.data, &mine, sizeof(mine));
  return address;
}

void Endpoint::connect(const marrow_network_address* addresses, base::Deadline deadline) {
  std::vector<Address> all(nranks_);
  // First who can be reached at all, so that a wrong host is said at once and not after a timeout.
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    if (addresses[r].bytes == 0) {  // failed before this endpoint was made
      peers_[r]->gone.store(true, std::memory_order_release);
      continue;
    }
    std::memcpy(&all[r], addresses[r].data, sizeof(Address));
    if (addresses[r].bytes != sizeof(Address) || all[r].magic != kAddressMagic ||
        all[r].rank != r) {
      throw Error(Code::version, base::cat("rank ", r, "'s address is not one of this network"),
                  "run the same version of Marrow on every rank");
    }
    all[r].socket_name[sizeof(all[r].socket_name) - 1] = 0;
    peers_[r]->identity = all[r].identity;
    const std::string why = identity_.cannot_share_with(all[r].identity);
    if (!why.empty()) {
      throw Error(Code::unsupported,
                  base::cat("rank ", rank_, " cannot share memory with rank ", r, ": ", why),
                  "use a network that reaches it");
    }
  }
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    Peer& peer = *peers_[r];
    if (addresses[r].bytes == 0) continue;
    if (identity_.same_process(peer.identity)) {
      peer.inbox = local_inboxes().find(all[r].endpoint_id);
      if (!peer.inbox) {
        throw Error(Code::peer_failed,
                    base::cat("rank ", r, ", a thread of this process, closed its endpoint"));
      }
    } else {
      try {
        peer.client = std::make_unique<DescriptorClient>(all[r].socket_name, deadline);
        Offer offer = peer.client->ask(kInboxId, deadline);
        peer.inbox = std::make_shared<Inbox>(std::move(offer.fd), nranks_);
      } catch (const Error& error) {
        throw Error(error.code(), base::cat("connecting to rank ", r, ": ", error.sentence()),
                    error.next_step());
      }
      server_.watch(peer.client->socket(), [&peer, r] {
        peer.why = peer.inbox->closed() ? base::cat("rank ", r, " closed its endpoint")
                                        : base::cat("rank ", r, "'s process ended");
        // Publishes `why`; meets progress().
        peer.closed.store(true, std::memory_order_release);
      });
    }
    peer.sender.attach(&peer.inbox->from(rank_));
  }
}

std::unique_ptr<Region> Endpoint::register_memory(const marrow_network_memory& memory, void* key,
                                                  std::uint32_t* key_bytes) {
  auto region = std::make_unique<Region>();
  region->data = static_cast<std::byte*>(memory.address);
  region->bytes = memory.bytes;
  region->device = memory.device != 0;
  region->id = next_region_.fetch_add(1, std::memory_order_relaxed);
  if (region->device && !services_.copy) {
    throw Error(Code::unsupported, "device memory without a copy engine to reach it by");
  }
  if (memory.fd >= 0) {
    server_.offer(region->id, {base::Fd::dup_of(memory.fd), memory.fd_offset, memory.bytes});
  }
  const Key made{kKeyMagic,
                 memory.device,
                 region->id,
                 memory.bytes,
                 reinterpret_cast<std::uint64_t>(memory.address),
                 memory.fd >= 0};
  std::memcpy(key, &made, sizeof(made));
  *key_bytes = sizeof(made);
  return region;
}

void Endpoint::deregister_memory(Region& region) { server_.withdraw(region.id); }

std::unique_ptr<Region> Endpoint::import_key(std::uint32_t peer_rank, const void* key,
                                             std::uint32_t key_bytes) {
  Key theirs{};
  if (key_bytes == sizeof(theirs)) std::memcpy(&theirs, key, sizeof(theirs));
  if (theirs.magic != kKeyMagic) {
    throw Error(Code::version, base::cat("rank ", peer_rank, "'s key is not one of this network"),
                "run the same version of Marrow on every rank");
  }
  Peer& peer = *peers_[peer_rank];
  auto region = std::make_unique<Region>();
  region->bytes = theirs.bytes;
  region->device = theirs.device != 0;
  if (identity_.same_process(peer.identity)) {
    region->data = reinterpret_cast<std::byte*>(theirs.address);
    return region;
  }
  if (!theirs.has_fd) {
    throw Error(Code::unsupported,
                base::cat("rank ", peer_rank,
                          "'s memory is private to its process: it has no file descriptor"),
                "take windows from Communicator::allocate, or register memory of a memfd");
  }
  constexpr std::chrono::milliseconds kPatience{10000};
  Offer offer = peer.client->ask(theirs.region_id, base::Deadline::after(kPatience));
  if (offer.bytes != theirs.bytes) {
    throw Error(Code::network, base::cat("rank ", peer_rank, " offers ", offer.bytes,
                                         " bytes, its key says ", theirs.bytes));
  }
  if (region->device) {
    if (!services_.map_device)
      throw Error(Code::unsupported, "device memory without a copy engine to reach it by");
    region->mapped =
        services_.map_device(services_.user, offer.fd.get(), offer.offset, offer.bytes);
    if (!region->mapped) {
      throw Error(Code::cuda, base::cat("mapping ", offer.bytes, " bytes of rank ", peer_rank,
                                        "'s device memory failed"));
    }
    region->data = static_cast<std::byte*>(region->mapped);
    return region;
  }
  if (base::file_size(offer.fd.get()) < offer.offset + offer.bytes) {
    throw Error(Code::network, base::cat("rank ", peer_rank, "'s memory is shorter than it says"));
  }
  // A mapping starts at a page; the region need not.
  constexpr std::uint64_t kPage = 4096;
  const std::uint64_t lead = offer.offset % kPage;
  region->mapping = base::Mapping::of_fd(offer.fd.get(), offer.bytes + lead, offer.offset - lead);
  region->data = region->mapping.as<std::byte>(lead);
  return region;
}

void Endpoint::release_key(Region& region) {
  if (region.mapped) services_.unmap_device(services_.user, region.mapped, region.bytes);
  region.mapped = nullptr;
}

void Endpoint::abort(std::uint32_t peer) {
  peers_[peer]->gone.store(true, std::memory_order_release);
}

}  // namespace marrow::networks::shm
