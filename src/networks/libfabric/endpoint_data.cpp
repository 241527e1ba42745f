// SPDX-License-Identifier: Apache-2.0
// What the progress thread does: start operations, take completions, apply packets.
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "networks/libfabric/endpoint.hpp"
#include "networks/libfabric/table.hpp"
#include "networks/store_value.hpp"

namespace marrow::networks::libfabric {
namespace {

using base::cat;

const Region& local(const marrow_network_operation& o) {
  return *static_cast<const Region*>(o.local);
}
const Remote& remote(const marrow_network_operation& o) {
  return *static_cast<const Remote*>(o.remote);
}

/// Whether the failure is of the way to the peer, and not of this operation.
bool is_of_the_connection(int error) {
  return error != FI_EACCES && error != FI_EPERM && error != FI_EINVAL && error != FI_EMSGSIZE &&
         error != FI_ETRUNC && error != FI_ENOKEY && error != FI_EKEYREJECTED &&
         error != FI_EOPNOTSUPP && error != FI_ENOSYS;
}

}  // namespace

Endpoint::Request& Endpoint::take_request(const marrow_network_operation& o) {
  if (free_requests_.empty()) {
    requests_.emplace_back().kind = Context::Kind::operation;
    free_requests_.push_back(&requests_.back());
  }
  Request& request = *free_requests_.back();
  free_requests_.pop_back();
  request.token = o.token;
  request.peer = o.peer;
  request.active = true;
  request.dropped = false;
  return request;
}

void Endpoint::give_back(Request& request) {
  request.active = false;
  if (request.kind == Context::Kind::send) {
    free_sends_.push_back(static_cast<Slot*>(&request));
  } else {
    free_requests_.push_back(&request);
  }
}

void Endpoint::complete(std::uint64_t token, std::uint32_t peer, int status) {
  completions_.push_back({token, 0, status, peer});
}

// --- posting ----------------------------------------------------------------------------------

/// @return 0, -FI_EAGAIN: later, or what is wrong
std::int64_t Endpoint::write(const marrow_network_operation& o) {
  Request& request = take_request(o);
  const std::uint64_t data =
      carries_rank_ ? std::uint64_t{rank_} << 32 | o.immediate : std::uint64_t{o.immediate};
  std::byte* from = local(o).data + o.local_offset;
  const std::uint64_t to = remote(o).base + o.remote_offset;
  const fi_addr_t peer = peers_[o.peer]->address;
  void* desc = descriptor(local(o));
  void* context = static_cast<Context*>(&request);
  const std::int64_t result =
      o.has_immediate
          ? ep_->rma->writedata(ep_.get(), from, o.bytes, desc, data, peer, to, remote(o).key,
                                context)
          : ep_->rma->write(ep_.get(), from, o.bytes, desc, peer, to, remote(o).key, context);
  if (result != 0) give_back(request);
  return result;
}

std::int64_t Endpoint::read(const marrow_network_operation& o) {
  Request& request = take_request(o);
  const std::int64_t result =
      ep_->rma->read(ep_.get(), local(o).data + o.local_offset, o.bytes, descriptor(local(o)),
                     peers_[o.peer]->address, remote(o).base + o.remote_offset, remote(o).key,
                     static_cast<Context*>(&request));
  if (result != 0) give_back(request);
  return result;
}

std::int64_t Endpoint::send(const marrow_network_operation& o) {
  Packet packet;
  packet.token = peers_[o.peer]->token;
  packet.kind = o.kind == MARROW_NETWORK_MESSAGE ? PacketKind::message : PacketKind::value;
  packet.has_immediate = o.has_immediate ? 1 : 0;
  packet.bytes = static_cast<std::uint8_t>(o.bytes) & 0x7f;
  packet.source = static_cast<std::uint16_t>(rank_);
  packet.number = peers_[o.peer]->packets_sent;
  std::size_t bytes = Packet::kHeader + o.bytes;
  if (packet.kind == PacketKind::message) {
    std::memcpy(packet.content.message, o.inline_data, o.bytes);
  } else {
    packet.content.value.region = remote(o).id;
    packet.content.value.immediate = o.immediate;
    packet.content.value.offset = o.remote_offset;
    const void* data = o.kind == MARROW_NETWORK_PUT
                           ? static_cast<const void*>(local(o).data + o.local_offset)
                           : o.inline_data;
    std::memcpy(packet.content.value.data, data, o.bytes);
    bytes += Packet::kValueHeader;
  }
  if (bytes <= info_->tx_attr->inject_size) {
    const std::int64_t result =
        ep_->msg->inject(ep_.get(), &packet, bytes, peers_[o.peer]->address);
    if (result != 0) return result;
    ++peers_[o.peer]->packets_sent;
    complete(o.token, o.peer, MARROW_NETWORK_OK);
    return 0;
  }
  if (free_sends_.empty()) return -FI_EAGAIN;
  Slot& slot = *free_sends_.back();
  std::memcpy(static_cast<void*>(slot.packet), &packet, bytes);
  void* desc = packets_mr_ ? packets_mr_->mem_desc : nullptr;
  const std::int64_t result = ep_->msg->send(ep_.get(), slot.packet, bytes, desc,
                                             peers_[o.peer]->address, static_cast<Context*>(&slot));
  if (result != 0) return result;
  ++peers_[o.peer]->packets_sent;
  free_sends_.pop_back();
  slot.token = o.token;
  slot.peer = o.peer;
  slot.active = true;
  slot.dropped = false;
  return 0;
}

/// To ourselves: no provider need be asked whether it can.
void Endpoint::run_own(const marrow_network_operation& o) {
  std::byte* const theirs = o.remote ? remote(o).own + o.remote_offset : nullptr;
  std::byte* const ours = o.local ? local(o).data + o.local_offset : nullptr;
  const bool device = (o.local && local(o).device) || (o.remote && remote(o).device);
  switch (o.kind) {
    case MARROW_NETWORK_PUT:
      if (device && start_copy(theirs, ours, o.bytes, {.source = rank_, .operation = o})) return;
      if (!device) std::memcpy(theirs, ours, o.bytes);
      break;
    case MARROW_NETWORK_PUT_VALUE:
      if (device && start_copy(theirs, o.inline_data, o.bytes, {.source = rank_, .operation = o}))
        return;
      if (!device) store_value(theirs, o.inline_data, o.bytes);
      break;
    case MARROW_NETWORK_GET:
      if (device && start_copy(ours, theirs, o.bytes, {.source = rank_, .operation = o})) return;
      if (!device) std::memcpy(ours, theirs, o.bytes);
      break;
    default: break;
  }
  if (device) return complete(o.token, o.peer, MARROW_NETWORK_ERROR);
  finish_own(o);
}

void Endpoint::finish_own(const marrow_network_operation& o) {
  // Callbacks belong into progress().
  if (o.kind == MARROW_NETWORK_MESSAGE || o.has_immediate) own_.push_back(o);
  complete(o.token, o.peer, MARROW_NETWORK_OK);
}

/// A host source of up to 64 bytes is read before it returns. False: that failed, and the log says so.
bool Endpoint::start_copy(void* to, const void* from, std::uint64_t bytes, Copying copying) {
  if (!services_.copy ||
      services_.copy(services_.user, to, from, bytes, &copying.ticket) != MARROW_NETWORK_OK) {
    log(2, cat("the GPU's copy engine did not take ", bytes, " bytes"));
    copy_failed_ = true;
    return false;
  }
  copying_.push_back(copying);
  return true;
}

/// Says those that have ended.
std::uint32_t Endpoint::take_copies() {
  std::uint32_t called = 0;
  while (!copying_.empty()) {
    const int state = services_.copy_test(services_.user, copying_.front().ticket);
    if (state == 0) break;
    const Copying ended = copying_.front();
    copying_.pop_front();
    const marrow_network_operation& o = ended.operation;
    const bool own = ended.source == rank_;
    if (state < 0) {
      copy_failed_ = true;
      if (own) complete(o.token, o.peer, MARROW_NETWORK_ERROR);
    } else if (own) {
      finish_own(o);
    } else if (o.has_immediate) {
      events_.immediate(events_.user, ended.source, o.immediate);
      ++called;
    }
  }
  if (std::exchange(copy_failed_, false)) {
    throw Error(Code::cuda, cat("a copy into or out of rank ", rank_, "'s device memory failed"),
                "look for the first CUDA error");
  }
  return called;
}

std::int64_t Endpoint::start(const marrow_network_operation& o) {
  if (o.peer == rank_) {
    run_own(o);
    return 0;
  }
  const bool device = o.local && local(o).device;
  switch (o.kind) {
    case MARROW_NETWORK_PUT:
      return o.bytes <= most_injected_ && !device && !remote(o).device ? send(o) : write(o);
    case MARROW_NETWORK_GET: return read(o);
    case MARROW_NETWORK_PUT_VALUE:
    case MARROW_NETWORK_MESSAGE: return send(o);
    default: complete(o.token, o.peer, MARROW_NETWORK_UNSUPPORTED); return 0;
  }
}

std::uint32_t Endpoint::post(const marrow_network_operation* operations, std::uint32_t n) {
  for (std::uint32_t i = 0; i < n; ++i) {
    const marrow_network_operation& o = operations[i];
    Peer& peer = *peers_[o.peer];
    if (peer.gone.load(std::memory_order_acquire)) {
      complete(o.token, o.peer, MARROW_NETWORK_PEER_FAILED);
      continue;
    }
    const std::int64_t result = start(o);
    if (result == 0) {
      peer.trying = {};
      continue;
    }
    if (result == -FI_EAGAIN) return i;
    const int error = static_cast<int>(-result);
    if (is_of_the_connection(error)) {
      if (still_trying(o.peer, error)) return i;
      complete(o.token, o.peer, MARROW_NETWORK_PEER_FAILED);
      continue;
    }
    log(2, cat("an operation of ", o.bytes, " bytes to rank ", o.peer, " at ", peer.where,
               " was refused: ", text(error)));
    complete(o.token, o.peer, MARROW_NETWORK_ERROR);
  }
  return n;
}

/// A way that is closed may open again: a link that is down for seconds, a peer that starts slowly. Called inside
/// post(), where no callback may be: progress() says the end.
bool Endpoint::still_trying(std::uint32_t rank, std::int64_t error) {
  Peer& peer = *peers_[rank];
  const auto now = Clock::now();
  if (peer.trying == Clock::time_point{}) peer.trying = now;
  if (now - peer.trying < patience_) return true;
  if (!peer.gone.exchange(true, std::memory_order_acq_rel)) {
    given_up_.emplace_back(rank,
                           cat("rank ", rank, " at ", peer.where, " could not be reached for ",
                               patience_.count(), " ms: ", text(error)));
  }
  aborted_.store(true, std::memory_order_release);  // meets take_aborted()
  return false;
}

std::uint32_t Endpoint::say_given_up() {
  std::uint32_t said = 0;
  for (auto& [rank, why] : std::exchange(given_up_, {})) {
    if (std::exchange(peers_[rank]->down, true)) continue;
    events_.peer_down(events_.user, rank, why.c_str());
    ++said;
  }
  return said;
}

void Endpoint::peer_down(std::uint32_t rank, const std::string& why) {
  Peer& peer = *peers_[rank];
  const bool known = peer.gone.exchange(true, std::memory_order_acq_rel);
  aborted_.store(true, std::memory_order_release);
  if (known || peer.down) return;
  peer.down = true;
  events_.peer_down(events_.user, rank, why.c_str());
}

// --- completions ------------------------------------------------------------------------------

/// Operations of peers that are gone fail. What the provider still has it may read or write whenever it likes, so they end
/// as it gives them back: over tcp because the connection is closed, elsewhere if it notices by itself. What it has not
/// given back within kGrace ends all the same, since those who wait may not wait for ever; then the log says that
/// the memory is not free yet. No provider but tcp has a call that ends it sooner: fi_cancel is for receives.
std::uint32_t Endpoint::take_aborted() {
  const bool fresh = aborted_.exchange(false, std::memory_order_acq_rel);
  if (!fresh && ends_.empty()) return 0;
  const auto now = Clock::now();
  if (fresh) {
    for (std::uint32_t r = 0; r < nranks_; ++r) {
      Peer& peer = *peers_[r];
      if (!peer.gone.load(std::memory_order_acquire) || std::exchange(peer.ending, true)) continue;
      const auto its = [r](const Request& q) { return q.active && q.peer == r; };
      const bool any = std::any_of(requests_.begin(), requests_.end(), its) ||
                       std::any_of(sends_.begin(), sends_.end(), its);
      // Not without one: ofi_rxm 1.17 does not bear that an address goes which it is connecting to.
      if (any && closes_connections_ && r != rank_)
        av_->ops->remove(av_.get(), &peer.address, 1, 0);
      ends_.push_back({r, any && r != rank_ ? now + kGrace : now});
    }
  }
  std::uint32_t any = 0;
  const auto drop = [&](Request& request, std::uint32_t rank) {
    if (!request.active || request.dropped || request.peer != rank) return;
    request.dropped = true;
    complete(request.token, request.peer, MARROW_NETWORK_PEER_FAILED);
    ++any;
  };
  std::erase_if(ends_, [&](const auto& end) {
    if (now < end.second) return false;
    for (Slot& slot : sends_) drop(slot, end.first);
    const std::uint32_t before = any;
    for (Request& request : requests_) drop(request, end.first);
    if (any != before) {
      log(2, cat(any - before, " reads and writes to rank ", end.first, " are still with provider ",
                 info_->fabric_attr->prov_name,
                 ", which may touch their memory until that rank's process has ended"));
    }
    return true;
  });
  return any;
}

/// @return whether its immediate may be said: not while a copy is under way, which says it then
bool Endpoint::store_packet(std::uint32_t source, const Packet& packet) {
  const auto& value = packet.content.value;
  std::lock_guard lock(mutex_);  // the region stays while we write to it
  const auto found = regions_.find(value.region);
  if (found == regions_.end()) return true;
  const Region& region = *found->second;
  if (value.offset > region.bytes || packet.bytes > region.bytes - value.offset) {
    log(2, cat("rank ", source, " put ", packet.bytes, " bytes to offset ", value.offset,
               " of a region of ", region.bytes, ": refused"));
    return true;
  }
  if (region.device) {
    Copying copying{.source = source};
    copying.operation.has_immediate = packet.has_immediate;
    copying.operation.immediate = value.immediate;
    // Where it failed, nothing says that it landed.
    start_copy(region.data + value.offset, value.data, packet.bytes, copying);
    return false;
  }
  store_value(region.data + value.offset, value.data, packet.bytes);
  return true;
}

/// Whether no packet of its source is missing before it.
bool Endpoint::follows(const Packet& packet) {
  if (!numbers_packets_) return true;
  Peer& peer = *peers_[packet.source];
  if (packet.number == peer.packets_taken) {
    ++peer.packets_taken;
    return true;
  }
  peer_down(packet.source,
            cat("the connection from rank ", packet.source, " at ", peer.where, " broke, and ",
                packet.number - peer.packets_taken, " messages were lost with it"));
  return false;
}

std::uint32_t Endpoint::take_packet(const Packet& packet, std::size_t bytes) {
  const std::uint32_t source = packet.source;
  if (bytes < Packet::kHeader || packet.token != token_) {
    if (!std::exchange(stranger_, true))
      log(2, "libfabric: a packet without this job's token was refused");
    return 0;
  }
  if (source >= nranks_ || !follows(packet)) return 0;
  if (packet.kind == PacketKind::message) {
    if (packet.bytes > MARROW_NETWORK_MAX_MESSAGE || bytes != Packet::kHeader + packet.bytes)
      return 0;
    events_.message(events_.user, source, packet.content.message, packet.bytes);
    return 1;
  }
  if (packet.bytes > sizeof(packet.content.value.data) ||
      bytes != Packet::kHeader + Packet::kValueHeader + packet.bytes)
    return 0;
  // A region that was closed meanwhile: its sequence counts all the same.
  if (store_packet(source, packet) && packet.has_immediate)
    events_.immediate(events_.user, source, packet.content.value.immediate);
  return 1;
}

std::uint32_t Endpoint::take(const fi_cq_data_entry& entry, fi_addr_t from) {
  auto* context = static_cast<Context*>(entry.op_context);
  if ((entry.flags & FI_REMOTE_WRITE) ||
      (entry.flags & (FI_RMA | FI_REMOTE_CQ_DATA)) == (FI_RMA | FI_REMOTE_CQ_DATA)) {
    std::uint64_t source = entry.data >> 32;
    if (!carries_rank_) {
      const auto known = rank_of_.find(from);
      source = known == rank_of_.end() ? nranks_ : known->second;
    }
    if (source < nranks_) {
      events_.immediate(events_.user, static_cast<std::uint32_t>(source),
                        static_cast<std::uint32_t>(entry.data));
    }
    // Some providers spend a posted receive on it.
    if (info_->mode & FI_RX_CQ_DATA && context) post_receive(*static_cast<Slot*>(context));
    return 1;
  }
  if (!context) return 0;
  if (context->kind == Context::Kind::receive) {
    Slot& slot = *static_cast<Slot*>(context);
    const std::uint32_t called = take_packet(*slot.packet, entry.len);
    post_receive(slot);
    return called;
  }
  Request& request = *static_cast<Request*>(context);
  if (!request.dropped) complete(request.token, request.peer, MARROW_NETWORK_OK);
  give_back(request);
  return 1;
}

void Endpoint::fail(Request& request, int error) {
  const std::uint32_t rank = request.peer;
  const bool connection = is_of_the_connection(error);
  if (!request.dropped)
    complete(request.token, rank, connection ? MARROW_NETWORK_PEER_FAILED : MARROW_NETWORK_ERROR);
  give_back(request);
  if (connection) {
    peer_down(rank, cat("the connection to rank ", rank, " at ", peers_[rank]->where,
                        " broke: ", text(error)));
  } else {
    log(2, cat("rank ", rank, " at ", peers_[rank]->where, " refused an operation: ", text(error)));
  }
}

void Endpoint::take_error() {
  fi_cq_err_entry entry{};
  if (cq_->ops->readerr(cq_.get(), &entry, 0) < 0) return;
  auto* context = static_cast<Context*>(entry.op_context);
  if (!context) return;
  if (context->kind == Context::Kind::receive) {
    if (entry.err != FI_ECANCELED) post_receive(*static_cast<Slot*>(context));
    return;
  }
  fail(*static_cast<Request*>(context), entry.err);
}

std::uint32_t Endpoint::progress() {
  std::uint32_t called = take_aborted();
  for (std::size_t n = own_.size(); n != 0; --n) {
    const marrow_network_operation o = own_.front();
    own_.pop_front();
    if (o.kind == MARROW_NETWORK_MESSAGE) {
      events_.message(events_.user, rank_, o.inline_data, static_cast<std::uint32_t>(o.bytes));
    } else {
      events_.immediate(events_.user, rank_, o.immediate);
    }
    ++called;
  }
  fi_cq_data_entry entries[32];
  fi_addr_t sources[32];
  // Bounded, so that one busy sender does not keep our own operations waiting.
  for (int round = 0; round < 8; ++round) {
    const std::int64_t n =
        carries_rank_ ? cq_->ops->read(cq_.get(), entries, std::size(entries))
                      : cq_->ops->readfrom(cq_.get(), entries, std::size(entries), sources);
    if (n == -FI_EAVAIL) {
      take_error();
      ++called;
      continue;
    }
    if (n == -FI_EAGAIN || n == 0) break;
    check(n, "reading completions");
    for (std::int64_t i = 0; i < n; ++i) called += take(entries[i], carries_rank_ ? 0 : sources[i]);
    if (n < static_cast<std::int64_t>(std::size(entries))) break;
  }
  // Last: what such a peer sent came before its end.
  called += say_given_up();
  return called + take_copies();
}

std::uint32_t Endpoint::test(marrow_network_completion* completions, std::uint32_t n) {
  std::uint32_t count = 0;
  for (; count < n && !completions_.empty(); ++count) {
    completions[count] = completions_.front();
    completions_.pop_front();
  }
  return count;
}

}  // namespace marrow::networks::libfabric
