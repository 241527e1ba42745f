// SPDX-License-Identifier: Apache-2.0
// Completions, messages, and what goes wrong.
#include <arpa/inet.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "networks/verbs/endpoint.hpp"
#include "networks/verbs/words.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;
namespace v = marrow::verbs;

constexpr int kPolled = 32;
constexpr std::uint32_t kMostAtOnce = 256;  // of one queue, before others get their turn
/// A stopped queue pair flushes what it has within microseconds; a dead NIC never does.
constexpr std::chrono::milliseconds kFlushTime{1000};
/// Nor does what a peer sent before it ended take longer: it lies in our queue, `credits` messages at most.
constexpr std::chrono::milliseconds kLastTime{100};

}  // namespace

std::uint32_t Endpoint::progress() {
  called_ = 0;
  cut_short_ = false;
  if (has_news_.load(std::memory_order_acquire)) take_news();
  for (std::size_t i = 0; i < polled_.size(); ++i) poll(polled_[i]);  // news may add one
  if (!owing_.empty()) {
    std::vector<std::uint32_t> now;
    now.swap(owing_);
    for (const std::uint32_t r : now) {
      peers_[r]->owes = false;
      if (peers_[r]->stage != Stage::broken) give_back(*peers_[r]);
    }
  }
  if (!closing_.empty()) look_after_closing();
  if (!failing_.empty()) look_after_failed();
  return called_;
}

std::uint32_t Endpoint::test(marrow_network_completion* completions, std::uint32_t n) {
  std::uint32_t count = 0;
  for (; count < n && !completions_.empty(); ++count) {
    completions[count] = completions_.front();
    completions_.pop_front();
  }
  return count;
}

void Endpoint::take_news() {
  // Acquire: whoever set the flag that is cleared here stored its peer's `aborted` before (abort, tell).
  has_news_.exchange(false, std::memory_order_acq_rel);
  std::vector<News> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(news_);
  }
  for (News& news : all) {
    Peer& peer = *peers_[news.peer];
    switch (news.kind) {
      case News::joined:
        peer.queue = std::move(news.queue);
        peer.slots.resize(peer.queue->depth() + kReserve);
        if (std::find(polled_.begin(), polled_.end(), news.cq) == polled_.end())
          polled_.push_back(news.cq);
        if (peer.stage == Stage::broken) {
          peer.queue->stop();
        } else {
          peer.stage = Stage::joined;
        }
        break;
      case News::ready:
        if (peer.stage == Stage::joined) peer.stage = Stage::ready;
        break;
      case News::failed: fail(news.peer, std::move(news.sentence)); break;
      case News::closed:
        if (peer.stage == Stage::broken) break;
        peer.end =
            cat("rank ", news.peer, news.on_purpose ? " closed its endpoint" : "'s process ended",
                "; look for the first error of that rank");
        peer.closing_by = base::Deadline::after(kLastTime);
        peer.seen_before = peer.seen - 1;  // in the pass after this one at the earliest
        closing_.push_back(news.peer);
        break;
      case News::device: on_device_event(news.event); break;
    }
  }
  for (std::uint32_t r = 0; r < nranks_; ++r) {
    Peer& peer = *peers_[r];
    if (!peer.aborted.load(std::memory_order_acquire) || peer.aborted_here) continue;
    peer.aborted_here = true;
    fail(r, {});
    peer.down.reset();  // who aborts knows it
  }
}

void Endpoint::on_device_event(const v::ibv_async_event& event) {
  const std::string text = event_text(event.event_type);
  const auto of_device = [&](const std::string& what) {
    for (std::uint32_t r = 0; r < nranks_; ++r) {
      if (peers_[r]->stage == Stage::idle) continue;
      fail(r, cat("rank ", r, " is out of reach: ", device_->name(), ": ", what), false);
    }
  };
  switch (event.event_type) {
    case v::IBV_EVENT_DEVICE_FATAL:
      of_device(text + "; look at the kernel's log, the NIC needs a reset");
      return;
    case v::IBV_EVENT_CQ_ERR:
      for (std::uint32_t r = 0; r < nranks_; ++r) {
        const Peer& peer = *peers_[r];
        if (peer.queue && peer.queue->qp()->send_cq == event.element.cq)
          fail(r, cat("rank ", r, " is out of reach: ", device_->name(), ": ", text,
                      "; report it: this queue is sized for all that can be under way"));
      }
      return;
    case v::IBV_EVENT_QP_FATAL:
    case v::IBV_EVENT_QP_REQ_ERR:
    case v::IBV_EVENT_QP_ACCESS_ERR:
      for (std::uint32_t r = 0; r < nranks_; ++r) {
        const Peer& peer = *peers_[r];
        if (peer.queue && peer.queue->qp() == event.element.qp)
          fail(r, cat("the connection to rank ", r, " over ", device_->name(), " stopped: ", text,
                      "; look at the kernel's log and at that rank's"));
      }
      return;
    case v::IBV_EVENT_PORT_ERR:
      if (event.element.port_num != device_->port().number) return;
      MARROW_WARN(net, "verbs: ", device_->name(), " ", v::describe(device_->port()), ": ", text,
                  ". Peers are given up when they have not answered for about ",
                  options_.patience_seconds(),
                  " s (MARROW_VERBS_TIMEOUT); check the cable and `ip link`");
      return;
    case v::IBV_EVENT_PORT_ACTIVE:
      if (event.element.port_num != device_->port().number) return;
      MARROW_WARN(net, "verbs: ", device_->name(), " ", v::describe(device_->port()), ": ", text,
                  " again");
      return;
    default: MARROW_INFO(net, "verbs: ", device_->name(), ": ", text);
  }
}

void Endpoint::poll(v::ibv_cq* cq) {
  v::ibv_wc wc[kPolled];
  std::uint32_t all = 0;
  while (all < kMostAtOnce) {
    const int n = cq->context->ops.poll_cq(cq, kPolled, wc);
    if (n < 0) {
      const int error = n == -1 && errno != 0 ? errno : -n;
      for (std::uint32_t r = 0; r < nranks_; ++r) {
        const Peer& peer = *peers_[r];
        if (peer.queue && peer.queue->qp()->send_cq == cq)
          fail(r,
               cat("rank ", r, " is out of reach: completions of ", device_->name(),
                   " cannot be read: ", v::last_failure(device_->table(), error),
                   "; look at the kernel's log"),
               false);
      }
      return;
    }
    for (int i = 0; i < n; ++i) {
      const std::uint32_t r = peer_of(wc[i].wr_id);
      if (r >= nranks_) continue;  // no request of ours
      // A peer may send as soon as it is told of our queue pair; the news of it came before.
      if (!peers_[r]->queue && has_news_.load(std::memory_order_acquire)) take_news();
      Peer& peer = *peers_[r];
      if (!peer.queue) continue;
      ++peer.seen;
      if (wc[i].wr_id & kReceiveBit) {
        on_receive(peer, wc[i]);
      } else {
        on_send(peer, wc[i]);
      }
    }
    all += static_cast<std::uint32_t>(n);
    if (n < kPolled) return;
  }
  cut_short_ = true;
}

/// Completes all sends up to number `upto`: those before it went well, since a queue pair is in order.
void Endpoint::finish(Peer& peer, std::uint32_t upto, int status) {
  for (;;) {
    const std::uint32_t number = peer.completed++;
    const Slot& slot = peer.slots[number % peer.slots.size()];
    const bool last = number == upto;
    if (slot.completes) {
      const bool fetched =
          slot.kind == MARROW_NETWORK_FETCH_ADD || slot.kind == MARROW_NETWORK_COMPARE_SWAP;
      complete(slot.token, peer.queue->peer(), last ? status : MARROW_NETWORK_OK,
               fetched ? *peer.queue->result(number) : 0);
    }
    if (last) return;
  }
}

std::string Endpoint::failure_of(std::uint32_t peer, const Slot* slot, const v::ibv_wc& wc) const {
  std::string what = "a receive from";
  if (slot) {
    what = cat(operation_text(slot->kind), " of ", slot->bytes, " bytes ",
               slot->kind == MARROW_NETWORK_MESSAGE || slot->kind == MARROW_NETWORK_FLUSH
                   ? std::string()
                   : cat("at offset ", slot->offset, " "),
               "to");
  }
  const std::string port = device_->port_trouble();
  return cat(what, " rank ", peer, " over ", device_->name(), " failed: ", status_text(wc.status),
             wc.vendor_err ? cat(", vendor code ", wc.vendor_err) : "",
             port.empty() ? "" : cat(", and ", port), "; ",
             port.empty() ? status_advice(wc.status, options_)
                          : std::string("check the cable, `ip link` and `rdma link`"));
}

void Endpoint::on_send(Peer& peer, const v::ibv_wc& wc) {
  const auto number = static_cast<std::uint32_t>(wc.wr_id);
  if (number - peer.completed >= peer.posted - peer.completed) return;  // given up before
  const std::uint32_t who = peer.queue->peer();
  if (wc.status == v::IBV_WC_SUCCESS) return finish(peer, number, MARROW_NETWORK_OK);
  const Slot slot = peer.slots[number % peer.slots.size()];
  finish(peer, number,
         means_peer_gone(wc.status) || peer.stage == Stage::broken ? MARROW_NETWORK_PEER_FAILED
                                                                   : MARROW_NETWORK_ERROR);
  if (peer.stage != Stage::broken) fail(who, failure_of(who, &slot, wc));
}

void Endpoint::on_receive(Peer& peer, const v::ibv_wc& wc) {
  if (peer.stage == Stage::broken) return;
  const std::uint32_t who = peer.queue->peer();
  if (wc.status != v::IBV_WC_SUCCESS) return fail(who, failure_of(who, nullptr, wc));
  const auto slot = static_cast<std::uint32_t>(wc.wr_id) % options_.credits;
  if (wc.opcode == v::IBV_WC_RECV_RDMA_WITH_IMM) {
    events_.immediate(events_.user, who, ntohl(wc.imm_data));
  } else {
    events_.message(events_.user, who, peer.queue->receive_buffer(slot),
                    std::min(wc.byte_len, kSlotBytes));
  }
  ++called_;
  if (const int error = peer.queue->post_receive(slot)) {
    return fail(who, cat("a receive for rank ", who, " could not be posted to ", device_->name(),
                         ": ", base::errno_text(error), "; look at the kernel's log"));
  }
  ++peer.received;
  // At half: the sender sees new ones before it is out of them.
  if (peer.received - peer.returned >= (options_.credits + 1) / 2 && peer.stage != Stage::broken)
    give_back(peer);
}

/// Ends the connection. @param answers  whether the NIC still flushes what is posted
void Endpoint::fail(std::uint32_t r, std::string sentence, bool answers) {
  Peer& peer = *peers_[r];
  if (peer.stage == Stage::broken) return;
  peer.stage = Stage::broken;
  peer.down = std::move(sentence);
  peer.drained_by = base::Deadline::after(kFlushTime);
  if (peer.queue && (!peer.queue->stop() || !answers)) peer.drained_by = base::Deadline();
  failing_.push_back(r);
}

/// Peers that ended are told of when a pass found nothing more of theirs; other peers' traffic does not count.
void Endpoint::look_after_closing() {
  std::vector<std::uint32_t> now;
  now.swap(closing_);
  for (const std::uint32_t r : now) {
    Peer& peer = *peers_[r];
    const bool quiet = !cut_short_ && peer.seen == peer.seen_before;
    if (quiet || peer.closing_by.expired()) {
      fail(r, std::move(peer.end));  // unless an operation has told of it already
    } else {
      peer.seen_before = peer.seen;
      closing_.push_back(r);
    }
  }
}

void Endpoint::look_after_failed() {
  std::vector<std::uint32_t> now;
  now.swap(failing_);
  for (const std::uint32_t r : now) {
    Peer& peer = *peers_[r];
    if (peer.down) {
      const std::string sentence = std::move(*peer.down);
      peer.down.reset();
      if (!peer.aborted_here) {
        events_.peer_down(events_.user, r, sentence.c_str());
        ++called_;
      }
    }
    if (peer.posted == peer.completed) continue;
    if (!peer.drained_by.expired()) {
      failing_.push_back(r);
      continue;
    }
    for (; peer.completed != peer.posted; ++peer.completed) {
      const Slot& slot = peer.slots[peer.completed % peer.slots.size()];
      if (slot.completes) complete(slot.token, r, MARROW_NETWORK_PEER_FAILED);
    }
    ++called_;  // there are completions: who sleeps should look
  }
}

}  // namespace marrow::networks::rdma
