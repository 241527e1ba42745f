// SPDX-License-Identifier: Apache-2.0
// Operations become work requests, chains of them, and doorbells.
#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "networks/verbs/endpoint.hpp"
#include "networks/verbs/words.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;
namespace v = marrow::verbs;

const Region& local_of(const marrow_network_operation& o) {
  return *static_cast<const Region*>(o.local);
}
const RemoteRegion& remote_of(const marrow_network_operation& o) {
  return *static_cast<const RemoteRegion*>(o.remote);
}

bool holds(std::uint64_t bytes, std::uint64_t offset, std::uint64_t n) {
  return offset <= bytes && n <= bytes - offset;
}

bool is_atomic(std::uint32_t kind) {
  return kind == MARROW_NETWORK_ADD || kind == MARROW_NETWORK_FETCH_ADD ||
         kind == MARROW_NETWORK_COMPARE_SWAP;
}

/// It takes a receive of the peer.
bool takes_receive(const marrow_network_operation& o) {
  return o.kind == MARROW_NETWORK_MESSAGE || o.has_immediate != 0;
}

}  // namespace

void Endpoint::complete(std::uint64_t token, std::uint32_t peer, int status, std::uint64_t value) {
  completions_.push_back({token, value, status, peer});
}

/// A request that the NIC would refuse stops the whole queue pair: better one operation fails.
const char* Endpoint::wrong(const Peer& peer, const marrow_network_operation& o) const {
  switch (o.kind) {
    case MARROW_NETWORK_PUT:
    case MARROW_NETWORK_GET:
      if (!o.local || !o.remote) return "it names no memory";
      if (!holds(local_of(o).bytes, o.local_offset, o.bytes)) return "it leaves our region";
      if (!holds(remote_of(o).bytes, o.remote_offset, o.bytes))
        return "it leaves the peer's region";
      if (o.bytes > device_->port().most) return "it is larger than max_message";
      if (o.kind == MARROW_NETWORK_GET && o.has_immediate) return "a get carries no immediate";
      return nullptr;
    case MARROW_NETWORK_PUT_VALUE:
      if (!o.remote || !holds(remote_of(o).bytes, o.remote_offset, o.bytes))
        return "it leaves the peer's region";
      return o.bytes > kSlotBytes ? "it is larger than max_inline" : nullptr;
    case MARROW_NETWORK_MESSAGE:
      return o.bytes > kSlotBytes ? "it is longer than a message" : nullptr;
    case MARROW_NETWORK_FLUSH: return nullptr;
    default: break;
  }
  if (!is_atomic(o.kind)) return "there is no such kind";
  if (device_->attributes().atomic_cap == 0 || peer.queue->theirs().max_answers == 0)
    return "the NIC has no atomics";
  if (!o.remote || !holds(remote_of(o).bytes, o.remote_offset, 8))
    return "it leaves the peer's region";
  return (remote_of(o).address + o.remote_offset) % 8 != 0 ? "its word is not aligned" : nullptr;
}

/// Whether there is room for it: in the queue, and at the peer.
bool Endpoint::fits(Peer& peer, const marrow_network_operation& o, std::uint32_t chained) {
  const std::uint32_t used = peer.posted - peer.completed + chained;
  if (used + kMostRequests > peer.queue->depth()) return false;
  if (!takes_receive(o)) return true;
  // Acquire: what the peer did with those messages is over.
  const std::uint64_t returned =
      std::atomic_ref(peer.queue->words().returned).load(std::memory_order_acquire);
  return peer.messages < peer.queue->theirs().credits + returned;
}

v::ibv_send_wr& Endpoint::next(Peer& peer, int opcode, const Slot& slot) {
  const std::uint32_t number = peer.posted + chained_;
  peer.slots[number % peer.slots.size()] = slot;
  v::ibv_send_wr& request = requests_[chained_];
  request = {};
  request.wr_id = work_id(peer.queue->peer(), number, false);
  request.opcode = opcode;
  request.sg_list = &buffers_[chained_];
  if (chained_ > 0) requests_[chained_ - 1].next = &request;
  ++chained_;
  return request;
}

/// Bytes that are in no registered memory: inline, or copied where the NIC can read them.
void Endpoint::payload(Peer& peer, v::ibv_send_wr& request, const void* data, std::uint32_t bytes) {
  if (bytes == 0) return;
  request.num_sge = 1;
  if (bytes <= peer.queue->max_inline()) {
    request.send_flags |= v::IBV_SEND_INLINE;
    *request.sg_list = {reinterpret_cast<std::uint64_t>(data), bytes, 0};
    return;
  }
  std::byte* copy = peer.queue->staging(static_cast<std::uint32_t>(request.wr_id));
  std::memcpy(copy, data, bytes);
  *request.sg_list = {reinterpret_cast<std::uint64_t>(copy), bytes, peer.queue->lkey()};
}

/// A READ pushes the writes before it out, but only those on its own way: host and GPU memory lie on two.
void Endpoint::fill_read(Peer& peer, std::uint64_t from, std::uint32_t rkey, const Slot& slot) {
  v::ibv_send_wr& request = next(peer, v::IBV_WR_RDMA_READ, slot);
  request.num_sge = 1;
  *request.sg_list = {reinterpret_cast<std::uint64_t>(peer.queue->sink()), 1, peer.queue->lkey()};
  request.wr.rdma.remote_addr = from;
  request.wr.rdma.rkey = rkey;
}

void Endpoint::wrote_gpu(Peer& peer, const RemoteRegion& remote) {
  peer.gpu_written = true;
  std::lock_guard lock(gpu_mutex_);
  if (std::find(peer.gpu.begin(), peer.gpu.end(), &remote) == peer.gpu.end())
    peer.gpu.push_back(&remote);
}

/// If the peer's GPU memory was written to: sees to it that all of it is placed, by a READ of any window
/// there that is still open. @return whether there is one
bool Endpoint::fill_gpu_read(Peer& peer, const Slot& slot) {
  if (!std::exchange(peer.gpu_written, false)) return false;
  std::lock_guard lock(gpu_mutex_);
  if (peer.gpu.empty()) return false;
  fill_read(peer, peer.gpu.back()->address, peer.gpu.back()->rkey, slot);
  peer.gpu.clear();
  return true;
}

void Endpoint::fill_flush(Peer& peer, const marrow_network_operation& o) {
  fill_gpu_read(peer, {o.token, 1, 0, MARROW_NETWORK_FLUSH, false});
  const End& theirs = peer.queue->theirs();
  fill_read(peer, theirs.control + offsetof(ControlWords, read_me), theirs.control_rkey,
            {o.token, 1, 0, MARROW_NETWORK_FLUSH, true});
}

void Endpoint::fill(Peer& peer, const marrow_network_operation& o) {
  if (o.kind == MARROW_NETWORK_FLUSH) return fill_flush(peer, o);
  const Slot slot{o.token, o.bytes, o.remote_offset, o.kind, true};
  if (takes_receive(o)) ++peer.messages;
  if (o.kind == MARROW_NETWORK_MESSAGE) {
    // The peer learns of it through host memory, which no NIC orders behind GPU memory: the message
    // leaves when a READ has come back.
    const bool after_gpu = fill_gpu_read(peer, {o.token, 1, 0, MARROW_NETWORK_FLUSH, false});
    v::ibv_send_wr& request = next(peer, v::IBV_WR_SEND, slot);
    if (after_gpu) request.send_flags |= v::IBV_SEND_FENCE;
    payload(peer, request, o.inline_data, static_cast<std::uint32_t>(o.bytes));
    return;
  }
  const RemoteRegion& remote = remote_of(o);
  const std::uint64_t target = remote.address + o.remote_offset;
  bool apart = false;
  if (is_atomic(o.kind)) {
    const bool swap = o.kind == MARROW_NETWORK_COMPARE_SWAP;
    v::ibv_send_wr& request =
        next(peer, swap ? v::IBV_WR_ATOMIC_CMP_AND_SWP : v::IBV_WR_ATOMIC_FETCH_AND_ADD, slot);
    request.num_sge = 1;
    *request.sg_list = {reinterpret_cast<std::uint64_t>(
                            peer.queue->result(static_cast<std::uint32_t>(request.wr_id))),
                        8, peer.queue->lkey()};
    request.wr.atomic.remote_addr = target;
    request.wr.atomic.rkey = remote.rkey;
    request.wr.atomic.compare_add = swap ? o.compare : o.operand;
    request.wr.atomic.swap = o.operand;
  } else {
    // Into GPU memory the immediate goes on its own, as a message does.
    apart = o.has_immediate && (remote.gpu || peer.gpu_written);
    const int opcode = o.kind == MARROW_NETWORK_GET ? v::IBV_WR_RDMA_READ
                       : o.has_immediate && !apart  ? v::IBV_WR_RDMA_WRITE_WITH_IMM
                                                    : v::IBV_WR_RDMA_WRITE;
    Slot of_data = slot;
    of_data.completes = !apart;
    v::ibv_send_wr& request = next(peer, opcode, of_data);
    request.wr.rdma.remote_addr = target;
    request.wr.rdma.rkey = remote.rkey;
    if (o.has_immediate) request.imm_data = htonl(o.immediate);
    if (o.kind == MARROW_NETWORK_PUT_VALUE) {
      payload(peer, request, o.inline_data, static_cast<std::uint32_t>(o.bytes));
    } else if (o.bytes != 0) {
      const Region& local = local_of(o);
      const std::uint64_t source = local.address + o.local_offset;
      const auto bytes = static_cast<std::uint32_t>(o.bytes);
      if (o.kind == MARROW_NETWORK_PUT && !local.gpu && bytes <= peer.queue->max_inline()) {
        payload(peer, request, reinterpret_cast<const void*>(source), bytes);
      } else {
        request.num_sge = 1;
        *request.sg_list = {source, bytes, local.region->lkey};
      }
    }
  }
  if (remote.gpu && o.kind != MARROW_NETWORK_GET) wrote_gpu(peer, remote);
  if (apart) {
    const bool read = fill_gpu_read(peer, {o.token, 1, 0, MARROW_NETWORK_FLUSH, false});
    v::ibv_send_wr& request = next(peer, v::IBV_WR_RDMA_WRITE_WITH_IMM, slot);
    request.wr.rdma.remote_addr = target;
    request.wr.rdma.rkey = remote.rkey;
    request.imm_data = htonl(o.immediate);
    if (read) request.send_flags |= v::IBV_SEND_FENCE;
  }
}

/// Hands the chain to the NIC.
void Endpoint::submit(Peer& peer) {
  if (chained_ == 0) return;
  const std::uint32_t n = chained_;
  chained_ = 0;
  requests_[n - 1].send_flags |= v::IBV_SEND_SIGNALED;
  v::ibv_send_wr* bad = nullptr;
  const int error =
      peer.queue->qp()->context->ops.post_send(peer.queue->qp(), requests_.data(), &bad);
  if (error == 0) {
    peer.posted += n;
    return;
  }
  // Those before `bad` went out.
  std::uint32_t good = 0;
  while (good < n && &requests_[good] != bad) ++good;
  if (!bad) good = 0;
  peer.posted += good;
  const std::uint32_t who = peer.queue->peer();
  const Slot first = peer.slots[peer.posted % peer.slots.size()];
  for (std::uint32_t i = good; i < n; ++i) {
    const Slot& slot = peer.slots[(peer.posted + i - good) % peer.slots.size()];
    if (slot.completes) complete(slot.token, who, MARROW_NETWORK_ERROR);
  }
  fail(who, cat(operation_text(first.kind), " of ", first.bytes, " bytes to rank ", who,
                " could not be posted to ", device_->name(), ": ",
                v::last_failure(device_->table(), error > 0 ? error : errno),
                "; look at the kernel's log and the NIC's state (rdma link)"));
}

std::uint32_t Endpoint::post(const marrow_network_operation* operations, std::uint32_t n) {
  if (n == 0) return 0;
  const std::uint32_t who = operations[0].peer;
  Peer& peer = *peers_[who];
  if (peer.stage == Stage::idle && !peer.aborted.load(std::memory_order_acquire)) {
    peer.stage = Stage::connecting;
    connector_->want(who);
  }
  std::uint32_t taken = 0;
  for (; taken < n; ++taken) {
    const marrow_network_operation& o = operations[taken];
    if (peer.stage == Stage::broken || peer.aborted.load(std::memory_order_acquire)) {
      submit(peer);
      complete(o.token, who, MARROW_NETWORK_PEER_FAILED);
      continue;
    }
    if (peer.stage != Stage::ready) return 0;
    if (wrong(peer, o)) {
      submit(peer);  // completions in the order of posting
      complete(o.token, who, MARROW_NETWORK_INVALID);
      continue;
    }
    if (!fits(peer, o, chained_)) break;
    fill(peer, o);
    if (chained_ + kMostRequests > kChain) submit(peer);
  }
  submit(peer);
  return taken;
}

/// Tells the peer how many of its messages have been received. Taken back to later when the queue is full.
void Endpoint::give_back(Peer& peer) {
  const std::uint32_t used = peer.posted - peer.completed;
  const std::uint32_t who = peer.queue->peer();
  if (used + 1 > peer.slots.size()) {
    if (!peer.owes) owing_.push_back(who);
    peer.owes = true;
    return;
  }
  v::ibv_send_wr& request = next(peer, v::IBV_WR_RDMA_WRITE, {0, 8, 0, 0, false});
  payload(peer, request, &peer.received, 8);
  const End& theirs = peer.queue->theirs();
  request.wr.rdma.remote_addr = theirs.control + offsetof(ControlWords, returned);
  request.wr.rdma.rkey = theirs.control_rkey;
  peer.returned = peer.received;
  submit(peer);
}

}  // namespace marrow::networks::rdma
