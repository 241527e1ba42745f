// SPDX-License-Identifier: Apache-2.0
// What the progress thread does: move bytes, send and receive messages.
#include <algorithm>
#include <cstring>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "networks/shm/endpoint.hpp"
#include "networks/store_value.hpp"

namespace marrow::networks::shm {
namespace {

Region& region(void* handle) { return *static_cast<Region*>(handle); }

}  // namespace

void Endpoint::complete(const marrow_network_operation& operation, int status) {
  completions_.push_back({operation.token, 0, status, operation.peer});
}

bool Endpoint::touches_device(const marrow_network_operation& o) const {
  return (o.remote && region(o.remote).device) || (o.local && region(o.local).device);
}

/// Does it now. False: the peer's inbox is full.
bool Endpoint::run(Peer& peer, const marrow_network_operation& o) {
  switch (o.kind) {
    case MARROW_NETWORK_PUT:
    case MARROW_NETWORK_PUT_VALUE:
      if (o.has_immediate && !peer.sender.space()) return false;
      if (o.kind == MARROW_NETWORK_PUT) {
        std::memcpy(region(o.remote).data + o.remote_offset, region(o.local).data + o.local_offset,
                    o.bytes);
      } else {
        store_value(region(o.remote).data + o.remote_offset, o.inline_data, o.bytes);
      }
      if (o.has_immediate) peer.sender.send(nullptr, 0, o.immediate);
      break;
    case MARROW_NETWORK_GET:
      std::memcpy(region(o.local).data + o.local_offset, region(o.remote).data + o.remote_offset,
                  o.bytes);
      break;
    case MARROW_NETWORK_MESSAGE:
      if (!peer.sender.space()) return false;
      peer.sender.send(o.inline_data, static_cast<std::uint32_t>(o.bytes), 0);
      break;
    case MARROW_NETWORK_FLUSH:
      if (!peer.held.empty() && peer.held.front().operation.token != o.token) return false;
      break;  // a put that was done is in the peer's memory
    default: complete(o, MARROW_NETWORK_UNSUPPORTED); return true;
  }
  complete(o, MARROW_NETWORK_OK);
  return true;
}

std::uint32_t Endpoint::post(const marrow_network_operation* operations, std::uint32_t n) {
  if (n == 0) return 0;
  Peer& peer = *peers_[operations[0].peer];
  for (std::uint32_t i = 0; i < n; ++i) {
    const marrow_network_operation& o = operations[i];
    if (peer.gone.load(std::memory_order_acquire)) {
      complete(o, MARROW_NETWORK_PEER_FAILED);
      continue;
    }
    const bool put = o.kind == MARROW_NETWORK_PUT || o.kind == MARROW_NETWORK_PUT_VALUE;
    const bool wait = options_.reorder ? put : !peer.held.empty();
    if (wait || touches_device(o)) {
      if (peer.held.size() >= kSlots) return i;
      if (peer.held.empty()) ++held_peers_;
      peer.held.push_back({o});
      continue;
    }
    if (!run(peer, o)) return i;
  }
  return n;
}

std::uint64_t Endpoint::start_copy(const marrow_network_operation& o) {
  Region& remote = region(o.remote);
  const void* from = o.inline_data;
  void* to = remote.data + o.remote_offset;
  if (o.kind == MARROW_NETWORK_PUT) from = region(o.local).data + o.local_offset;
  if (o.kind == MARROW_NETWORK_GET) {
    from = to;
    to = region(o.local).data + o.local_offset;
  }
  std::uint64_t ticket = 0;
  if (services_.copy(services_.user, to, from, o.bytes, &ticket) != MARROW_NETWORK_OK) {
    throw Error(Code::cuda, base::cat("a copy of ", o.bytes, " bytes to or from rank ", o.peer,
                                      " failed to start"));
  }
  return ticket;
}

std::uint64_t Endpoint::random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_;
}

/// Test mode: any held put may be the next, and none is for some passes. Bounded by age.
void Endpoint::shuffle_held(Peer& peer) {
  if (peer.held.size() > 1) std::swap(peer.held.front(), peer.held[random() % peer.held.size()]);
  for (Held& held : peer.held) ++held.age;
  const auto oldest = std::max_element(peer.held.begin(), peer.held.end(),
                                       [](const Held& a, const Held& b) { return a.age < b.age; });
  if (oldest->age > 200) std::swap(peer.held.front(), *oldest);
}

/// Starts copies in order; what is not a copy waits for all before it.
std::uint32_t Endpoint::progress_held(Peer& peer) {
  std::uint32_t done = 0;
  if (peer.gone.load(std::memory_order_acquire)) {
    for (const Held& held : peer.held) complete(held.operation, MARROW_NETWORK_PEER_FAILED), ++done;
    peer.held.clear();
    return done;
  }
  if (options_.reorder) {
    shuffle_held(peer);
    if (random() % 4 != 0 && peer.held.front().age < 200) return 0;
  }
  for (Held& held : peer.held) {
    if (held.copying) continue;
    if (!touches_device(held.operation)) break;
    held.ticket = start_copy(held.operation);
    held.copying = true;
  }
  while (!peer.held.empty()) {
    Held& front = peer.held.front();
    if (front.copying) {
      const int state = services_.copy_test(services_.user, front.ticket);
      if (state == 0) break;
      complete(front.operation, state > 0 ? MARROW_NETWORK_OK : MARROW_NETWORK_ERROR);
    } else if (touches_device(front.operation) || !run(peer, front.operation)) {
      break;
    }
    peer.held.pop_front();
    ++done;
    if (options_.reorder) break;
  }
  return done;
}

std::uint32_t Endpoint::receive(std::uint32_t rank, Peer& peer) {
  std::uint32_t called = 0;
  // Bounded, so that one busy sender does not keep our own operations waiting.
  for (; called < 64; ++called) {
    const Slot* slot = peer.receiver.next();
    if (!slot) break;
    if (slot->bytes == 0) {
      events_.immediate(events_.user, rank, slot->immediate);
    } else {
      events_.message(events_.user, rank, slot->data,
                      std::min<std::uint32_t>(slot->bytes, MARROW_NETWORK_MAX_MESSAGE));
    }
    peer.receiver.pop();
  }
  return called;
}

std::uint32_t Endpoint::progress() {
  std::uint32_t called = 0;
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    Peer& peer = *peers_[r];
    // First: whether it closed. What it sent before that is in the ring by then.
    const bool closed = peer.closed.load(std::memory_order_acquire);
    const std::uint32_t got = receive(r, peer);
    called += got;
    if (closed && got == 0) {
      peer.closed.store(false, std::memory_order_relaxed);
      peer.gone.store(true, std::memory_order_release);
      events_.peer_down(events_.user, r, peer.why.c_str());
      ++called;
    }
  }
  if (held_peers_ != 0) {
    held_peers_ = 0;
    for (const auto& peer : peers_) {
      if (!peer->held.empty()) called += progress_held(*peer);
      if (!peer->held.empty()) ++held_peers_;
    }
  }
  return called;
}

std::uint32_t Endpoint::test(marrow_network_completion* completions, std::uint32_t n) {
  std::uint32_t count = 0;
  for (; count < n && !completions_.empty(); ++count) {
    completions[count] = completions_.front();
    completions_.pop_front();
  }
  return count;
}

}  // namespace marrow::networks::shm
