// SPDX-License-Identifier: Apache-2.0
// Set-up: addresses, keys, and what the connector's thread does for this endpoint.
#include "networks/verbs/endpoint.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "cuda/mappings.hpp"
#include "networks/guarded.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;
namespace v = marrow::verbs;

/// The address of a RoCE port is one of its network interface too; a link-local one means nothing alone.
std::string ip_of_port(const v::Port& port) {
  if (!port.ethernet || v::is_link_local(port.gid.gid) || port.gid.kind == v::GidKind::roce_v1)
    return {};
  return v::to_text(port.gid.gid);
}

}  // namespace

Endpoint::Endpoint(const Options& options, std::uint32_t rank, std::uint32_t nranks,
                   const marrow_network_events& events)
    : options_(options),
      rank_(rank),
      nranks_(nranks),
      events_(events),
      requests_(kChain),
      buffers_(kChain),
      making_(nranks),
      cq_of_(nranks) {
  for (std::uint32_t r = 0; r < nranks; ++r) peers_.push_back(std::make_unique<Peer>());
  // softnic's job takes its name from rank 0, whose address comes with connect.
  device_ = Device::open(options, "");
  const bool real = device_ != nullptr;
  connector_ = std::make_unique<Connector>(static_cast<Connectable&>(*this), rank, options_, real,
                                           real ? ip_of_port(device_->port()) : "");
}

Endpoint::~Endpoint() {
  connector_->stop();
  for (const auto& peer : peers_) peer->queue.reset();
  news_.clear();
  making_.clear();
  for (v::ibv_cq* cq : cqs_) {
    if (const int error = device_->table().destroy_cq(cq))
      MARROW_WARN(net, "verbs: destroying a completion queue: ", base::errno_text(error));
  }
}

marrow_network_address Endpoint::address() const {
  Address mine = connector_->address();
  if (device_) {
    mine.port = v::address_of(device_->port());
  } else {
    mine.emulated = 1;
  }
  marrow_network_address address{};
  address.bytes = sizeof mine;
  std::memcpy(address.data, &mine, sizeof mine);
  return address;
}

void Endpoint::check(const Address& theirs, std::uint32_t r, std::uint32_t bytes) const {
  if (bytes < 8 || theirs.magic != kAddressMagic || theirs.protocol != kProtocol ||
      bytes != sizeof(Address) || theirs.rank != r) {
    const bool ours = bytes >= 8 && theirs.magic == kAddressMagic;
    throw Error(Code::version,
                ours ? cat("rank ", r, " speaks version ", theirs.protocol,
                           " of the verbs network's protocol (", bytes, " bytes, rank ",
                           theirs.rank, "), rank ", rank_, " speaks version ", kProtocol)
                     : cat("rank ", r, "'s address is not one of the verbs network"),
                "run the same version of Marrow on every rank");
  }
  const bool emulated = device_ == nullptr;
  if ((theirs.emulated != 0) != emulated) {
    throw Error(Code::mismatch,
                cat("rank ", r, " uses ", theirs.emulated ? "softnic" : "a real NIC", ", rank ",
                    rank_, emulated ? " softnic" : " a real NIC"),
                "give MARROW_NIC one value that every rank has");
  }
  std::string why;
  if (emulated) {
    why = connector_->address().host.cannot_share_with(theirs.host);
    if (!why.empty()) why += ", and softnic connects one host only";
  } else {
    why = v::cannot_reach(device_->port(), theirs.port);
  }
  if (!why.empty()) {
    throw Error(Code::unsupported, cat("rank ", rank_, " cannot reach rank ", r, ": ", why),
                emulated ? "take a network that reaches it, or a real NIC"
                         : "choose ports and GIDs alike (MARROW_NIC, MARROW_GID_INDEX)");
  }
}

void Endpoint::connect(const marrow_network_address* addresses, std::chrono::milliseconds timeout) {
  const auto deadline = base::Deadline::after(timeout);
  std::vector<Address> all(nranks_);
  std::uint32_t first = nranks_;
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    if (addresses[r].bytes == 0) {  // failed already: nothing is asked of it
      peers_[r]->stage = Stage::broken;
      continue;
    }
    first = std::min(first, r);
    std::memcpy(&all[r], addresses[r].data, sizeof(Address));
    check(all[r], r, addresses[r].bytes);
    all[r].socket_name[sizeof all[r].socket_name - 1] = 0;
    all[r].ips = std::min<std::uint8_t>(all[r].ips, kMostIps);
  }
  if (!device_) {
    const auto token = std::as_bytes(std::span(all[first].token));
    Options soft = options_;
    if (soft.provider.empty()) soft.nic = "softnic";
    device_ = Device::open(soft, "marrow-net-" + base::hex(token));
  }
  // Connections are made later, at first use: what is left of set-up's time says nothing about them.
  connector_->start(std::move(all), device_, options_.peer_timeout);
  if (options_.eager) wait_for_all(deadline);
}

/// For connect=eager. No operation was posted yet, so nothing but news can come.
void Endpoint::wait_for_all(base::Deadline deadline) {
  std::vector<std::uint32_t> wanted;
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    if (peers_[r]->stage == Stage::broken) continue;  // it had failed before
    peers_[r]->stage = Stage::connecting;
    wanted.push_back(r);
    connector_->want(r);
  }
  for (std::size_t i = 0; i < wanted.size();) {
    const std::uint32_t r = wanted[i];
    Peer& peer = *peers_[r];
    if (has_news_.load(std::memory_order_acquire)) take_news();
    if (peer.stage == Stage::ready) {
      ++i;
      continue;
    }
    if (peer.stage == Stage::broken)
      throw Error(Code::peer_failed, peer.down.value_or(cat("rank ", r, " cannot be connected")));
    if (deadline.expired())
      throw Error(Code::timeout, cat("rank ", r, " did not connect in time"),
                  "see that rank's error");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::unique_ptr<Region> Endpoint::register_memory(const marrow_network_memory& memory, void* key,
                                                  std::uint32_t* key_bytes) {
  if (!device_) {
    throw Error(Code::invalid_argument, "memory is registered after connect() on softnic",
                "connect the endpoint first");
  }
  std::string why;
  if (memory.device != 0 && !device_->takes_gpu_memory(&why))
    throw Error(Code::unsupported, cat("GPU memory with ", device_->name(), ": ", why),
                "use Memory::host");
  v::Memory what;
  what.address = memory.address;
  what.bytes = memory.bytes;
  what.gpu = memory.device != 0;
  what.fd = memory.fd;
  what.fd_offset = memory.fd_offset;
  // Data may relax its order: a completion, which is what a message is told by, stays behind it.
  const unsigned rights = v::IBV_ACCESS_LOCAL_WRITE | v::IBV_ACCESS_REMOTE_WRITE |
                          v::IBV_ACCESS_REMOTE_READ | v::IBV_ACCESS_REMOTE_ATOMIC;
  const v::Registration made =
      v::register_memory(device_->table(), device_->context(), device_->pd(), what, rights,
                         cuda::dma_buf_of, device_->name());
  MARROW_TRACE(net, "verbs: ", memory.bytes, " bytes registered as ", made.way);
  auto region = std::make_unique<Region>();
  region->region = made.region;
  region->address = reinterpret_cast<std::uint64_t>(memory.address);
  region->bytes = memory.bytes;
  region->gpu = what.gpu;
  const Key out{kKeyMagic, made.region->rkey, region->address, region->bytes, memory.device, 0};
  std::memcpy(key, &out, sizeof out);
  *key_bytes = sizeof out;
  return region;
}

void Endpoint::deregister_memory(Region& region) {
  if (const int error = device_->table().dereg_mr(region.region)) {
    throw Error(Code::network,
                cat("deregistering ", region.bytes, " bytes with ", device_->name(), ": ",
                    v::last_failure(device_->table(), error)),
                "close windows when nothing uses them any more");
  }
}

std::unique_ptr<RemoteRegion> Endpoint::import_key(std::uint32_t peer, const void* key,
                                                   std::uint32_t key_bytes) const {
  Key theirs{};
  if (key_bytes == sizeof theirs) std::memcpy(&theirs, key, sizeof theirs);
  if (theirs.magic != kKeyMagic) {
    throw Error(Code::version, cat("rank ", peer, "'s key is not one of the verbs network"),
                "run the same version of Marrow on every rank");
  }
  auto region = std::make_unique<RemoteRegion>();
  *region = {theirs.address, theirs.bytes, theirs.rkey, peer, theirs.gpu != 0};
  return region;
}

/// A flush reads from the window no more: a READ of memory that is gone would end the connection.
void Endpoint::release_key(const RemoteRegion& remote) {
  std::lock_guard lock(gpu_mutex_);
  std::erase(peers_[remote.peer]->gpu, &remote);
}

void Endpoint::abort(std::uint32_t peer) {
  peers_[peer]->aborted.store(true, std::memory_order_release);
  has_news_.store(true, std::memory_order_release);
}

// --- the connector's thread ---------------------------------------------------------------------

void Endpoint::tell(News news) {
  {
    std::lock_guard lock(mutex_);
    news_.push_back(std::move(news));
  }
  has_news_.store(true, std::memory_order_release);
}

/// A completion queue holds whatever its queue pairs can have under way, flushed receives included, so
/// it cannot overrun. Each is twice as large as the one before: few to poll, little for few peers.
v::ibv_cq* Endpoint::cq_for_one_more(std::uint32_t peer) {
  if (room_ > 0) {
    --room_;
    return cqs_.back();
  }
  const int most = device_->attributes().max_cqe;
  const std::uint32_t each = options_.depth + kReserve + options_.credits;
  std::uint32_t pairs = std::min(next_room_, nranks_);
  while (pairs > 1 && most > 0 && pairs * each > static_cast<std::uint32_t>(most)) pairs /= 2;
  errno = 0;
  v::ibv_cq* cq = device_->table().create_cq(device_->context(), static_cast<int>(pairs * each),
                                             nullptr, nullptr, 0);
  if (!cq) {
    const int error = errno;
    throw Error(
        error == ENOMEM ? Code::out_of_memory : Code::network,
        cat(device_->name(), " gave no completion queue of ", pairs * each, " entries for rank ",
            peer, ": ", v::last_failure(device_->table(), error), "; ", v::locked_memory_limit()),
        "raise `ulimit -l`, or choose a smaller MARROW_VERBS_DEPTH and "
        "MARROW_VERBS_CREDITS");
  }
  cqs_.push_back(cq);
  room_ = pairs - 1;
  next_room_ = std::min(next_room_ * 2, 256u);
  return cq;
}

End Endpoint::make_end(std::uint32_t peer) {
  if (!making_[peer]) {
    v::ibv_cq*& cq = cq_of_[peer];
    if (!cq) cq = cq_for_one_more(peer);
    making_[peer] = std::make_unique<QueuePair>(device_, cq, options_, peer);
  }
  return making_[peer]->end();
}

void Endpoint::join(std::uint32_t peer, const End& theirs) {
  making_[peer]->connect(theirs);
  News news;
  news.kind = News::joined;
  news.peer = peer;
  news.queue = std::move(making_[peer]);
  news.cq = cq_of_[peer];
  tell(std::move(news));
}

void Endpoint::ready(std::uint32_t peer) {
  News news;
  news.kind = News::ready;
  news.peer = peer;
  tell(std::move(news));
}

void Endpoint::failed(std::uint32_t peer, const Error& error) {
  making_[peer].reset();
  News news;
  news.kind = News::failed;
  news.peer = peer;
  news.sentence = one_sentence(error);
  tell(std::move(news));
}

void Endpoint::closed(std::uint32_t peer, bool on_purpose) {
  News news;
  news.kind = News::closed;
  news.peer = peer;
  news.on_purpose = on_purpose;
  tell(std::move(news));
}

void Endpoint::device_event(const v::ibv_async_event& event) {
  News news;
  news.kind = News::device;
  news.event = event;
  tell(std::move(news));
}

}  // namespace marrow::networks::rdma
