// SPDX-License-Identifier: Apache-2.0
// Messages: what this rank's thread does for its peers. Their contents are checked like descriptors.
#include <cstring>

#include "base/text.hpp"
#include "proxy/engine.hpp"

namespace marrow::proxy {

Stream& Engine::stream(std::uint32_t peer, std::uint32_t number) {
  auto& of_peer = streams_[peer];
  if (of_peer.empty()) of_peer.resize(kStreams);
  if (!of_peer[number]) of_peer[number] = std::make_unique<Stream>();
  return *of_peer[number];
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
  Stream& from = stream(peer, message.stream % kStreams);
  from.waiting.push_back(message);
  act_on_waiting(peer, from);
}

void Engine::on_immediate(std::uint32_t peer, std::uint32_t immediate) {
  Stream& from = stream(peer, stream_of(immediate));
  if (!from.arrivals.add(from.arrivals.expand(immediate))) return;  // delivered twice
  if (!from.waiting.empty()) act_on_waiting(peer, from);
}

bool Engine::may_act(const Stream& stream, const Message& message) const {
  const Arrivals& arrivals = stream.arrivals;
  if (message.flags & kStrong)
    return static_cast<std::int32_t>(message.sequence - arrivals.next()) <= 0;
  return arrivals.has_all(message.covers, message.sequence);
}

void Engine::act_on_waiting(std::uint32_t peer, Stream& stream) {
  for (std::size_t i = 0; i < stream.waiting.size();) {
    const Message message = stream.waiting[i];
    if (!may_act(stream, message)) {
      ++i;
      continue;
    }
    stream.waiting.erase(stream.waiting.begin() + static_cast<std::ptrdiff_t>(i));
    if (stream.arrivals.add(message.sequence)) act(peer, message);
    i = 0;  // it may be what an earlier one waited for
  }
}

void Engine::act(std::uint32_t peer, const Message& message) {
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
    case MessageKind::reply: {
      Operation* op = of_token(message.token);
      if (!op || !op->reply || op->queue->peer != static_cast<int>(peer))
        return;  // its user is gone
      op->reply = false;
      op->old_value = message.operand;
      op->status = worse(op->status, message.compare <= static_cast<std::uint64_t>(Status::invalid)
                                         ? static_cast<Status>(message.compare)
                                         : Status::invalid);
      if (op->opcode == ProxyOpcode::flush_remote && op->status == Status::ok) {
        op->queue->adds_seen = std::max(op->queue->adds_seen, op->adds_covered);
      }
      finish_if_done(static_cast<std::uint32_t>(message.token));
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
  send(peer, message, kNoRegion);
}

void Engine::on_peer_down(std::uint32_t peer, const char* sentence) {
  if (failed_[peer]) return;
  failed_[peer] = 1;
  down_[peer] = sentence;
  bool waited_for = outboxes_[peer].head != outboxes_[peer].operations.size();
  for (const Operation& op : operations_)
    waited_for |= op.active && op.queue->peer == static_cast<int>(peer);
  fail_operations(static_cast<int>(peer));
  // A peer that leaves after everything is done is no error until somebody wants it again.
  if (waited_for) report_down(peer);
}

void Engine::report_down(std::uint32_t peer) {
  if (down_[peer].empty()) return;
  report(static_cast<int>(peer), Code::peer_failed, down_[peer],
         "call agree_failures, or end the job");
  down_[peer].clear();
}

}  // namespace marrow::proxy
