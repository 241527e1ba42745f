// SPDX-License-Identifier: Apache-2.0
// Messages: what this rank's thread does for its peers. Their contents are checked like descriptors.
#include <cstring>
#include <utility>

#include "base/text.hpp"
#include "proxy/engine.hpp"

namespace marrow::proxy {

namespace {

constexpr std::uint64_t key_of(std::uint32_t peer, std::uint32_t stream) {
  return std::uint64_t{stream} << 32 | peer;
}

/// Device communicators are numbered in steps of their contexts' streams.
std::uint32_t first_of(const std::unordered_map<std::uint32_t, std::uint32_t>& firsts,
                       std::uint32_t stream) {
  const auto found = firsts.find(stream / kDeviceStreams * kDeviceStreams);
  return found == firsts.end() ? 0 : found->second;
}

}  // namespace

Receiving& Engine::receiving(std::uint32_t peer, std::uint32_t stream) {
  stream %= kStreams;
  const auto found = receiving_.find(key_of(peer, stream));
  if (found != receiving_.end()) return found->second;
  return receiving_.try_emplace(key_of(peer, stream), first_of(first_sequences_, stream))
      .first->second;
}

Sending& Engine::sending(std::uint32_t peer, std::uint32_t stream) {
  const auto found = sending_.find(key_of(peer, stream));
  if (found != sending_.end()) return found->second;
  const std::uint32_t first = first_of(first_sequences_, stream);
  return sending_.try_emplace(key_of(peer, stream), Sending{.next = first, .seen = first})
      .first->second;
}

/// Asks the peer, once at a time, what it has acted upon.
void Engine::ask(std::uint32_t peer, std::uint32_t stream, Sending& sending) {
  if (failed_[peer]) return;
  if (sending.asking) return;
  sending.asking = true;
  Message message{};
  message.kind = MessageKind::flush;
  message.stream = static_cast<std::uint16_t>(stream);
  message.sequence = sending.next;
  if (!link_->properties().ordered) {
    message.flags = kSequenced | kStrong;
    ++sending.next;
  }
  send(peer, message);
}

/// Whether the peers have acted upon all that this device communicator sent; asks those that have not.
bool Engine::all_seen(const DeviceState& device) {
  bool all = true;
  for (const auto& ring : device.contexts) {
    for (const auto& queue : ring->queues) {
      if (!queue || queue->sending->unseen() == 0 || failed_[queue->peer]) continue;
      all = false;
      ask(static_cast<std::uint32_t>(queue->peer), queue->stream, *queue->sending);
    }
  }
  return all;
}

void Engine::forget_unseen(std::uint32_t peer) {
  for (auto& [key, sending] : sending_) {
    if (static_cast<std::uint32_t>(key) != peer) continue;
    sending.seen = sending.next;
    sending.asking = false;
  }
}

/// An operation that will not be posted: if the peer waits for its sequence, it becomes a message that
/// says so. @return whether it did
bool Engine::skip_instead(marrow_network_operation& dropped) {
  Message message{};
  if (dropped.has_immediate) {
    const std::uint32_t next = sending(dropped.peer, stream_of(dropped.immediate)).next;
    message.stream = static_cast<std::uint16_t>(stream_of(dropped.immediate));
    message.sequence = next - ((next - dropped.immediate) & kSequenceMask);
  } else if (dropped.kind == MARROW_NETWORK_MESSAGE) {
    std::memcpy(&message, dropped.inline_data, sizeof(message));
    if (!(message.flags & kSequenced)) return false;
  } else {
    return false;
  }
  message.kind = MessageKind::skip;
  message.flags = kSequenced;
  message.covers = message.sequence;
  const std::uint32_t peer = dropped.peer;
  dropped = {};
  dropped.kind = MARROW_NETWORK_MESSAGE;
  dropped.peer = peer;
  dropped.bytes = sizeof(message);
  std::memcpy(dropped.inline_data, &message, sizeof(message));
  return true;
}

void Engine::on_message(std::uint32_t peer, const void* data, std::uint32_t bytes) {
  Message message;
  if (bytes != sizeof(message)) {
    report(static_cast<int>(peer), Code::network,
           base::cat("rank ", peer, " sent a message of ", bytes, " bytes"),
           "run the same version of Marrow on every rank");
    return;
  }
  std::memcpy(&message, data, sizeof(message));
  if (!(message.flags & kSequenced)) {
    act(peer, message);
    return;
  }
  receiving(peer, message.stream).message(message, [&](const Message& due) { act(peer, due); });
}

void Engine::on_immediate(std::uint32_t peer, std::uint32_t immediate) {
  receiving(peer, stream_of(immediate)).immediate(immediate, [&](const Message& due) {
    act(peer, due);
  });
}

/// What peers see, or are told, waits for the copies into our memory before it.
void Engine::act(std::uint32_t peer, const Message& message) {
  if (broken_) [[unlikely]]
    return;
  const bool answers = message.kind == MessageKind::reply || message.kind == MessageKind::credit;
  if (!stage_.landing(peer) || answers) [[likely]]
    return act_now(peer, message);
  switch (message.kind) {
    case MessageKind::staged_put:
    case MessageKind::staged_value:
    case MessageKind::staged_get: return act_now(peer, message);  // copies keep their order
    default: break;
  }
  stage_.land({.ticket = stage_.last_ticket(peer),
               .peer = peer,
               .then = Landing::Then::act,
               .message = message});
}

void Engine::act_now(std::uint32_t peer, const Message& message) {
  switch (message.kind) {
    case MessageKind::add:
    case MessageKind::fetch_add:
    case MessageKind::compare_swap: {
      const Region* window = word_of(message.window, message.offset);
      if (!window) {
        report(static_cast<int>(peer), Code::network,
               base::cat("rank ", peer, " sent an add to offset ", message.offset, " of window ",
                         message.window, ", which is not a word of an open host window here"),
               "windows and device communicators are closed by all ranks together");
        if (message.kind != MessageKind::add) answer(peer, message, 0, Status::invalid);
        return;
      }
      std::atomic_ref word(*reinterpret_cast<std::uint64_t*>(window->block.host + message.offset));
      // The puts this covers have landed: acquired from the network, released here, met by wait_signal.
      if (message.kind == MessageKind::add) {
        word.fetch_add(message.operand, std::memory_order_release);
      } else if (message.kind == MessageKind::fetch_add) {
        answer(peer, message, word.fetch_add(message.operand, std::memory_order_acq_rel),
               Status::ok);
      } else {
        std::uint64_t old = message.compare;
        word.compare_exchange_strong(old, message.operand, std::memory_order_acq_rel);
        answer(peer, message, old, Status::ok);
      }
      return;
    }
    case MessageKind::flush: answer(peer, message, 0, Status::ok); return;
    case MessageKind::skip: return;
    case MessageKind::staged_put:
    case MessageKind::staged_value:
    case MessageKind::staged_get: on_staged(peer, message); return;
    case MessageKind::credit: on_credit(peer, message); return;
    case MessageKind::reply: {
      if (message.flags & kAcknowledges) {
        const auto found = sending_.find(key_of(peer, message.stream));
        if (found != sending_.end()) {
          found->second.saw(message.covers);
          if (message.token == 0) found->second.asking = false;
        }
      }
      Queue* queue = queue_of(message.token);
      if (!queue && message.token != 0 && on_piece_reply(peer, message)) return;
      Operation* op = queue ? queue->find(message.token) : nullptr;
      if (!op || !op->reply || queue->peer != static_cast<int>(peer)) return;  // its user is gone
      op->reply = false;
      if (op->extra != kNone) extra_of(*op).old_value = message.operand;
      op->fail(message.compare <= static_cast<std::uint64_t>(Status::invalid)
                   ? static_cast<Status>(message.compare)
                   : Status::invalid);
      finish_if_done(*queue, *op);
      return;
    }
  }
  report(static_cast<int>(peer), Code::network,
         base::cat("rank ", peer, " sent a message of kind ", static_cast<int>(message.kind)),
         "run the same version of Marrow on every rank");
}

void Engine::answer(std::uint32_t peer, const Message& to, std::uint64_t value, Status status) {
  if (failed_[peer]) return;
  Message message{};
  message.kind = MessageKind::reply;
  message.stream = to.stream;
  message.token = to.token;
  message.operand = value;
  message.compare = static_cast<std::uint64_t>(status);
  if (to.kind == MessageKind::flush) {
    message.flags = kAcknowledges;
    message.covers = to.sequence + (to.flags & kSequenced ? 1 : 0);
  }
  send_at_once(peer, message);
}

void Engine::on_peer_down(std::uint32_t peer, const char* sentence) {
  if (failed_[peer]) return;
  failed_[peer] = 1;
  down_[peer] = sentence;
  bool waited_for = !outboxes_[peer].empty();
  for (Queue* queue : queues_) {
    if (!queue || queue->peer != static_cast<int>(peer)) continue;
    queue->each([&](std::uint64_t, const Operation&) { waited_for = true; });
  }
  fail_operations(static_cast<int>(peer));
  // A peer that leaves after everything is done is no error until somebody wants it again.
  if (waited_for) report_down(peer);
}

void Engine::say_late_downs() {
  for (const auto& [peer, sentence] : std::exchange(late_downs_, {}))
    on_peer_down(peer, sentence.c_str());
}

void Engine::report_down(std::uint32_t peer) {
  if (down_[peer].empty()) return;
  report(static_cast<int>(peer), Code::peer_failed, down_[peer],
         "call agree_failures, and reconnect when that names nobody; or end the job");
  down_[peer].clear();
}

}  // namespace marrow::proxy
