// SPDX-License-Identifier: Apache-2.0
// Descriptors: what a kernel claims is checked against the board's tables before anything is touched.
#include <algorithm>
#include <cstring>

#include "base/text.hpp"
#include "proxy/engine.hpp"

namespace marrow::proxy {
namespace {

constexpr int kBatch = 128;  // descriptors of one ring before others get their turn

}  // namespace

bool Engine::drain() {
  if (!full_.empty()) {  // a peer is so far behind that sequences could be confused
    std::erase_if(full_, [](const auto& end) { return end.second->unseen() < kMaxUnseen; });
    if (!full_.empty()) return false;
  }
  bool any = false;
  for (const auto& device : devices_) {
    if (device->removed) continue;
    for (int c = 0; c < device->rings->contexts(); ++c) any |= drain_ring(*device, c);
  }
  return any;
}

bool Engine::drain_ring(DeviceState& device, int context) {
  RingReader& reader = device.readers[context];
  const std::uint64_t first = reader.index();
  ProxyDescriptor descriptor;
  for (int i = 0; i < kBatch; ++i) {
    // What is under way is bounded by the ring's size, else one slow peer would fill our tables.
    if (device.outstanding[context] >> device.rings->log_size()) break;
    const std::uint64_t index = reader.index();
    if (!reader.next(&descriptor)) break;
    execute(device, context, index, proxy_decode(descriptor));
  }
  if (reader.index() == first) return false;
  // The slots were read: producers may reuse them.
  std::atomic_ref(*device.rings->consumed(context, thread_))
      .store(reader.index(), std::memory_order_release);
  return true;
}

void Engine::execute(DeviceState& device, int context, std::uint64_t index,
                     const ProxyOperation& d) {
  if (d.peer >= nranks_ || d.peer % threads_ != thread_) {
    report(-1, Code::internal,
           base::cat("descriptor ", index, " of context ", context, " names rank ", d.peer,
                     ", which its ring does not serve"),
           "kernel memory is corrupt, or the kernel was built against other headers");
    return;
  }
  const std::uint32_t slot = begin(device, context, index, d);
  Queue& queue = *operations_[slot].queue;
  Status status = Status::invalid;
  if (failed_[d.peer]) {
    status = Status::peer_failed;
    report_down(d.peer);
  } else if (d.counter < device.rings->counters()) {
    status = start(slot, queue, d);
  }
  if (status != Status::ok) {
    operations_[slot].status = status;
    if (operations_[slot].counter >= device.rings->counters()) operations_[slot].counter = -1;
    if (status == Status::invalid) {
      report(d.peer, Code::invalid_argument,
             base::cat("a kernel's operation ", static_cast<int>(d.opcode), " to rank ", d.peer,
                       " on context ", context, " was refused: window ", d.window, " offset ",
                       d.offset, ", region ", d.region, " offset ", d.source_offset, ", ", d.bytes,
                       " bytes, counter ", d.counter, d.has_add ? ", add to window " : "",
                       d.has_add ? base::cat(d.add_window, " offset ", d.add_offset) : ""),
             "compare with the windows' sizes; a MARROW_CHECKED kernel says file and line");
    }
  }
  finish_if_done(slot);
  if (queue.sending->unseen() >= kAskAfter) ask(d.peer, queue.stream, *queue.sending);
}

Status Engine::start(std::uint32_t slot, Queue& queue, const ProxyOperation& d) {
  switch (d.opcode) {
    case ProxyOpcode::put:
    case ProxyOpcode::put_value:
    case ProxyOpcode::add: return start_put(slot, queue, d);
    case ProxyOpcode::get: return start_get(slot, queue, d);
    case ProxyOpcode::fetch_add:
    case ProxyOpcode::compare_swap: return start_fetch(slot, queue, d);
    case ProxyOpcode::flush_remote: start_flush(slot, queue); return Status::ok;
    case ProxyOpcode::none: break;
  }
  return Status::invalid;
}

/// A window that holds the range, or null.
const Region* Engine::window_of(std::uint32_t id, std::uint64_t offset, std::uint64_t bytes) {
  const Region* window = find(id);
  return window && window->window && window->holds(offset, bytes) ? window : nullptr;
}

/// A window with an aligned 64-bit word there that a CPU thread can add to, or null. Windows are
/// symmetric: what holds for ours holds for the peer's.
const Region* Engine::word_of(std::uint32_t id, std::uint64_t offset) {
  const Region* window = window_of(id, offset, 8);
  return window && window->block.host && offset % 8 == 0 ? window : nullptr;
}

/// Posts what moves d.bytes between a region of ours and the peer's window, in messages that the network
/// can take; `each` sees every one. @return false when a range is not inside: nothing was posted
template <class Each>
bool Engine::move_pieces(std::uint32_t slot, const ProxyOperation& d, std::uint32_t kind,
                         Each&& each) {
  if (d.bytes == 0) return true;
  const Region* mine = find(d.region);
  const Region* window = window_of(d.window, d.offset, d.bytes);
  if (!mine || !window || !mine->holds(d.source_offset, d.bytes)) return false;
  const std::uint64_t piece = link_->properties().max_message;
  if ((d.bytes - 1) / piece >= kMaxUnseen) return false;
  operations_[slot].region = d.region;
  for (std::uint64_t done = 0; done < d.bytes; done += piece) {
    marrow_network_operation& o = enqueue(d.peer, kind, slot);
    o.local = mine->local[thread_];
    o.remote = window->remote[d.peer];
    o.local_offset = d.source_offset + done;
    o.remote_offset = d.offset + done;
    o.bytes = std::min(piece, d.bytes - done);
    each(o);
  }
  return true;
}

Status Engine::start_put(std::uint32_t slot, Queue& queue, const ProxyOperation& d) {
  if (d.has_add && !word_of(d.add_window, d.add_offset)) return Status::invalid;
  const std::uint32_t first = queue.sending->next;
  const bool sequenced = !link_->properties().ordered;
  const auto number = [&](marrow_network_operation& o) {
    if (!sequenced) return;
    o.has_immediate = 1;
    o.immediate = make_immediate(queue.stream, queue.sending->next++);
  };
  if (d.opcode == ProxyOpcode::put) {
    if (!move_pieces(slot, d, MARROW_NETWORK_PUT, number)) return Status::invalid;
  } else if (d.opcode == ProxyOpcode::put_value) {
    const Region* window = window_of(d.window, d.offset, d.bytes);
    if (!window || d.bytes == 0 || d.bytes > kProxyMaxInline) return Status::invalid;
    marrow_network_operation& o = enqueue(d.peer, MARROW_NETWORK_PUT_VALUE, slot);
    o.remote = window->remote[d.peer];
    o.remote_offset = d.offset;
    o.bytes = d.bytes;
    std::memcpy(o.inline_data, d.value, d.bytes);
    number(o);
  }
  return d.has_add ? start_add(slot, queue, d, first) : Status::ok;
}

Status Engine::start_add(std::uint32_t slot, Queue& queue, const ProxyOperation& d,
                         std::uint32_t covers) {
  Message message{};
  message.kind = MessageKind::add;
  message.stream = static_cast<std::uint16_t>(queue.stream);
  message.window = d.add_window;
  message.offset = d.add_offset;
  message.operand = d.add_n;
  if (!link_->properties().ordered) {
    message.flags = static_cast<std::uint8_t>(kSequenced | (d.strong ? kStrong : 0));
    message.covers = covers;
  }
  message.sequence = queue.sending->next++;
  send(d.peer, message, slot);
  return Status::ok;
}

Status Engine::start_get(std::uint32_t slot, Queue&, const ProxyOperation& d) {
  const auto unnumbered = [](marrow_network_operation&) {};
  return move_pieces(slot, d, MARROW_NETWORK_GET, unnumbered) ? Status::ok : Status::invalid;
}

Status Engine::start_fetch(std::uint32_t slot, Queue& queue, const ProxyOperation& d) {
  if (d.result_slot >= kProxyFetchSlots || !word_of(d.window, d.offset)) return Status::invalid;
  Message message{};
  message.kind =
      d.opcode == ProxyOpcode::fetch_add ? MessageKind::fetch_add : MessageKind::compare_swap;
  message.stream = static_cast<std::uint16_t>(queue.stream);
  message.window = d.window;
  message.offset = d.offset;
  message.operand = d.operand;
  message.compare = d.compare;
  message.token = token_of(slot);
  if (!link_->properties().ordered) {  // weak and covers nothing: done at once, and once only
    message.flags = kSequenced;
    message.sequence = message.covers = queue.sending->next++;
  }
  operations_[slot].reply = true;
  send(d.peer, message, slot);
  return Status::ok;
}

/// Adds are done by the peer's thread, so it has to answer; without any under way the network can say
/// by itself that puts have landed, if it orders.
void Engine::start_flush(std::uint32_t slot, Queue& queue) {
  const bool ordered = link_->properties().ordered != 0;
  if (ordered && queue.sending->unseen() == 0) {
    enqueue(static_cast<std::uint32_t>(queue.peer), MARROW_NETWORK_FLUSH, slot);
    return;
  }
  Message message{};
  message.kind = MessageKind::flush;
  message.stream = static_cast<std::uint16_t>(queue.stream);
  message.token = token_of(slot);
  if (!ordered) {
    message.flags = kSequenced | kStrong;
    message.sequence = queue.sending->next++;
  } else {
    message.sequence = queue.sending->next;
  }
  operations_[slot].reply = true;
  send(static_cast<std::uint32_t>(queue.peer), message, slot);
}

void Engine::send(std::uint32_t peer, const Message& message, std::uint32_t slot) {
  marrow_network_operation& o = enqueue(peer, MARROW_NETWORK_MESSAGE, slot);
  o.bytes = sizeof(message);
  std::memcpy(o.inline_data, &message, sizeof(message));
}

}  // namespace marrow::proxy
