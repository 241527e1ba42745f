// SPDX-License-Identifier: Apache-2.0
// Making an endpoint, its peers, its memory.
#include "networks/libfabric/endpoint.hpp"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <span>

#include "base/parameters.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "networks/libfabric/table.hpp"

namespace marrow::networks::libfabric {
namespace {

using base::cat;

constexpr std::uint32_t kAddressMagic = 0x4d4c4632;
constexpr std::uint32_t kKeyMagic = 0x4d4c4b31;
constexpr std::size_t kReceives = 256;  // packets that may arrive between two looks
constexpr std::size_t kSends = 256;     // packets too large to be injected that are under way

struct Address {
  std::uint32_t magic;
  std::uint32_t rank;
  std::uint32_t format;
  std::uint32_t bytes;
  std::uint64_t host;  ///< where the provider stays on one host
  char provider[24];
  std::uint8_t data[MARROW_NETWORK_MAX_ADDRESS - 48 - sizeof(Token)];
  Token token;
};
static_assert(sizeof(Address) == MARROW_NETWORK_MAX_ADDRESS);

struct Key {
  std::uint32_t magic;
  std::uint32_t id;
  std::uint64_t key;
  std::uint64_t base;
  std::uint64_t bytes;
  std::uint64_t address;  ///< for the rank itself
  std::uint64_t device;
};
static_assert(sizeof(Key) <= MARROW_NETWORK_MAX_KEY);

/// The same for processes that share a kernel.
std::uint64_t host_number() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  return std::hash<std::string>{}(text);
}

int gpu_of(void* address) {
  int ordinal = 0;
  cuda::check(cuda::driver().pointer_attribute(&ordinal, cuda::PointerAttribute::device_ordinal,
                                               reinterpret_cast<cuda::DevicePointer>(address)),
              "asking which GPU has some memory");
  return ordinal;
}

}  // namespace

Endpoint::Endpoint(const marrow_network_services& services, const fi_info& device,
                   const Options& options, std::uint32_t rank, std::uint32_t nranks,
                   const marrow_network_events& events)
    : services_(services),
      options_(options),
      rank_(rank),
      nranks_(nranks),
      events_(events),
      info_(table().dupinfo(&device)),
      carries_rank_(carries_rank(device, options)) {
  if (!info_) throw std::bad_alloc();
  base::random_bytes(std::as_writable_bytes(std::span(token_)));
  const char* patience =
      services.parameter ? services.parameter(services.user, "MARROW_PEER_TIMEOUT") : nullptr;
  if (patience) patience_ = base::parse_duration(patience, "MARROW_PEER_TIMEOUT");
  if (nranks > 1u << 16)
    throw Error(Code::unsupported,
                cat("network libfabric connects 65536 ranks at most, not ", nranks));
  // What is injected has no completion, so a connection that breaks and is made again loses it unseen; where
  // packets come in order, the receiver sees the gap.
  const std::uint64_t order = info_->tx_attr->msg_order & info_->rx_attr->msg_order;
  numbers_packets_ =
      (order & FI_ORDER_SAS) && std::string(info_->fabric_attr->prov_name).starts_with("tcp");
  closes_connections_ =
      !options_.keeps_connections && std::string(info_->fabric_attr->prov_name).starts_with("tcp");
  constexpr std::size_t kHeaders = Packet::kHeader + Packet::kValueHeader;
  if (info_->tx_attr->inject_size > kHeaders) {
    most_injected_ =
        std::min(info_->tx_attr->inject_size - kHeaders, sizeof(Packet::Content::value.data));
  }
  for (std::uint32_t r = 0; r < nranks; ++r) peers_.push_back(std::make_unique<Peer>());
  open(device);
}

void Endpoint::open(const fi_info& device) {
  const Table& t = table();
  const std::string name = cat(device.fabric_attr->prov_name, " on ",
                               device.domain_attr->name ? device.domain_attr->name : "?");
  fid_fabric* fabric = nullptr;
  check(t.fabric(info_->fabric_attr, &fabric, nullptr), cat("opening fabric ", name));
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check(fabric->ops->domain(fabric, info_.get(), &domain, nullptr), cat("opening domain ", name));
  domain_.reset(domain);

  fi_av_attr av_attr{};
  av_attr.type = FI_AV_TABLE;
  av_attr.count = nranks_;
  fid_av* av = nullptr;
  check(domain->ops->av_open(domain, &av_attr, &av, nullptr), "making an address vector");
  av_.reset(av);

  fi_cq_attr cq_attr{};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = FI_WAIT_NONE;
  fid_cq* cq = nullptr;
  check(domain->ops->cq_open(domain, &cq_attr, &cq, nullptr), "making a completion queue");
  cq_.reset(cq);

  fid_ep* ep = nullptr;
  check(domain->ops->endpoint(domain, info_.get(), &ep, nullptr),
        cat("making an endpoint of ", name));
  ep_.reset(ep);
  check(ep->fid.ops->bind(&ep->fid, &av->fid, 0), "binding an address vector");
  check(ep->fid.ops->bind(&ep->fid, &cq->fid, FI_TRANSMIT | FI_RECV), "binding a completion queue");
  check(ep->fid.ops->control(&ep->fid, FI_ENABLE, nullptr), cat("enabling an endpoint of ", name));

  packets_.resize(kReceives + kSends);
  packets_mr_ = register_own(packets_.data(), packets_.size() * sizeof(Packet));
  receives_.resize(kReceives);
  for (std::size_t i = 0; i < kReceives; ++i) {
    receives_[i].kind = Context::Kind::receive;
    receives_[i].packet = &packets_[i];
    post_receive(receives_[i]);
  }
  for (std::size_t i = 0; i < kSends; ++i) {
    Slot& slot = sends_.emplace_back();
    slot.kind = Context::Kind::send;
    slot.packet = &packets_[kReceives + i];
    free_sends_.push_back(&slot);
  }
}

Endpoint::~Endpoint() = default;

/// Our own packets, where the provider wants even local memory registered.
Owned<fid_mr> Endpoint::register_own(void* data, std::size_t bytes) {
  if (!(info_->domain_attr->mr_mode & FI_MR_LOCAL)) return nullptr;
  fid_mr* mr = nullptr;
  check(domain_->mr->reg(&domain_->fid, data, bytes, FI_SEND | FI_RECV, 0, ~std::uint64_t{0} >> 1,
                         0, &mr, nullptr),
        "registering memory for messages");
  return Owned<fid_mr>(mr);
}

void Endpoint::post_receive(Slot& slot) {
  void* desc = packets_mr_ ? packets_mr_->mem_desc : nullptr;
  check(ep_->msg->recv(ep_.get(), slot.packet, sizeof(Packet), desc, FI_ADDR_UNSPEC,
                       static_cast<Context*>(&slot)),
        "posting a receive");
}

marrow_network_address Endpoint::address() const {
  Address mine{};
  mine.magic = kAddressMagic;
  mine.rank = rank_;
  mine.format = info_->addr_format;
  mine.host = host_number();
  mine.token = token_;
  std::strncpy(mine.provider, info_->fabric_attr->prov_name, sizeof(mine.provider) - 1);
  std::size_t bytes = sizeof(mine.data);
  check(ep_->cm->getname(&ep_->fid, mine.data, &bytes), "asking for the endpoint's address");
  if (bytes > sizeof(mine.data)) {
    throw Error(Code::unsupported, cat("an address of ", bytes, " bytes is longer than the ",
                                       sizeof(mine.data), " that fit"));
  }
  mine.bytes = static_cast<std::uint32_t>(bytes);
  log(3, cat("libfabric: ", info_->fabric_attr->prov_name, " on ",
             info_->domain_attr->name ? info_->domain_attr->name : "?", " at ",
             address_text(mine.format, mine.data, bytes)));
  marrow_network_address address{};
  address.bytes = sizeof(mine);
  std::memcpy(address.data, &mine, sizeof(mine));
  return address;
}

void Endpoint::connect(const marrow_network_address* addresses) {
  const bool one_host = properties_of(*info_, options_).host_only != 0;
  const std::uint64_t our_host = host_number();
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    if (addresses[r].bytes == 0) {  // failed already: nothing is asked of it
      peers_[r]->gone.store(true, std::memory_order_relaxed);
      continue;
    }
    Address theirs;
    std::memcpy(&theirs, addresses[r].data, sizeof(theirs));
    if (addresses[r].bytes != sizeof(theirs) || theirs.magic != kAddressMagic || theirs.rank != r ||
        theirs.bytes > sizeof(theirs.data)) {
      throw Error(Code::version, cat("rank ", r, "'s address is not one of this network"),
                  "run the same version of Marrow on every rank");
    }
    theirs.provider[sizeof(theirs.provider) - 1] = 0;
    Peer& peer = *peers_[r];
    peer.token = theirs.token;
    peer.where = address_text(theirs.format, theirs.data, theirs.bytes);
    if (info_->fabric_attr->prov_name != std::string(theirs.provider) ||
        info_->addr_format != theirs.format) {
      throw Error(
          Code::unsupported,
          cat("rank ", rank_, " uses libfabric's ", info_->fabric_attr->prov_name, " and rank ", r,
              " its ", theirs.provider, " at ", peer.where, ", or another kind of address"),
          "choose the same with MARROW_NETWORK=libfabric?prov=..., MARROW_NIC and "
          "MARROW_SOCKET_IFNAME on every rank");
    }
    if (one_host && theirs.host != our_host) {
      throw Error(Code::unsupported,
                  cat("rank ", r, " is on another host, which libfabric's ", theirs.provider,
                      " does not reach"),
                  "use MARROW_NETWORK=libfabric");
    }
    fi_addr_t index = FI_ADDR_NOTAVAIL;
    const int inserted = av_->ops->insert(av_.get(), theirs.data, 1, &index, 0, nullptr);
    if (inserted != 1 || index == FI_ADDR_NOTAVAIL) {
      throw Error(Code::network, cat("rank ", r, "'s address ", peer.where,
                                     " was not accepted by libfabric's ", theirs.provider));
    }
    peer.address = index;
    rank_of_[index] = r;
  }
}

// --- memory -----------------------------------------------------------------------------------

std::unique_ptr<Region> Endpoint::register_memory(const marrow_network_memory& memory, void* key,
                                                  std::uint32_t* key_bytes) {
  auto region = std::make_unique<Region>();
  region->data = static_cast<std::byte*>(memory.address);
  region->bytes = memory.bytes;
  region->device = memory.device != 0;
  {
    std::lock_guard lock(mutex_);
    region->id = next_region_++;
  }
  iovec range{memory.address, memory.bytes};
  fi_mr_attr attr{};
  attr.mr_iov = &range;
  attr.iov_count = 1;
  attr.access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  // Where the provider leaves the choice to us, it is the only guard of a write.
  const std::size_t key_bytes_there = info_->domain_attr->mr_key_size;
  attr.requested_key = base::random_u64();
  if (key_bytes_there < 8) attr.requested_key &= (std::uint64_t{1} << (8 * key_bytes_there)) - 1;
  if (region->device && !services_.copy) {
    throw Error(Code::unsupported,
                "network libfabric writes to device memory by a copy engine, and here is none",
                "make a communicator on a GPU");
  }
  if (region->device && !options_.device_is_host) {
    if (!(info_->caps & FI_HMEM))
      throw Error(Code::unsupported, cat("libfabric's ", info_->fabric_attr->prov_name,
                                         " does not reach device memory here"));
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = gpu_of(memory.address);
  }
  fid_mr* mr = nullptr;
  check(domain_->mr->regattr(&domain_->fid, &attr, 0, &mr),
        cat("registering ", memory.bytes, " bytes of ", region->device ? "device" : "host",
            " memory"));
  region->mr.reset(mr);
  if (info_->domain_attr->mr_mode & FI_MR_ENDPOINT) {
    check(mr->fid.ops->bind(&mr->fid, &ep_->fid, 0), "binding memory to the endpoint");
    check(mr->fid.ops->control(&mr->fid, FI_ENABLE, nullptr), "enabling memory");
  }
  if (mr->key == FI_KEY_NOTAVAIL)
    throw Error(Code::unsupported, "this provider's memory keys are longer than 8 bytes");
  const auto address = reinterpret_cast<std::uint64_t>(memory.address);
  const Key made{kKeyMagic,    region->id,
                 mr->key,      info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? address : 0,
                 memory.bytes, address,
                 memory.device};
  std::memcpy(key, &made, sizeof(made));
  *key_bytes = sizeof(made);
  std::lock_guard lock(mutex_);
  regions_[region->id] = region.get();
  return region;
}

void Endpoint::deregister_memory(const Region& region) {
  std::lock_guard lock(mutex_);
  regions_.erase(region.id);
}

std::unique_ptr<Remote> Endpoint::import_key(std::uint32_t peer, const void* key,
                                             std::uint32_t key_bytes) {
  Key theirs{};
  if (key_bytes == sizeof(theirs)) std::memcpy(&theirs, key, sizeof(theirs));
  if (theirs.magic != kKeyMagic) {
    throw Error(Code::version, cat("rank ", peer, "'s key is not one of this network"),
                "run the same version of Marrow on every rank");
  }
  auto remote = std::make_unique<Remote>();
  remote->id = theirs.id;
  remote->key = theirs.key;
  remote->base = theirs.base;
  remote->bytes = theirs.bytes;
  remote->device = theirs.device != 0;
  if (peer == rank_) remote->own = reinterpret_cast<std::byte*>(theirs.address);
  return remote;
}

void* Endpoint::descriptor(const Region& region) const {
  return region.mr ? region.mr->mem_desc : nullptr;
}

void Endpoint::abort(std::uint32_t peer) {
  peers_[peer]->gone.store(true, std::memory_order_release);
  aborted_.store(true, std::memory_order_release);  // meets take_aborted()
}

}  // namespace marrow::networks::libfabric
