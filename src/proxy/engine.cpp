// SPDX-License-Identifier: Apache-2.0
#include "proxy/engine.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace marrow::proxy {

Engine::Engine(int thread, int threads, int rank, int nranks, Board& board, const Hooks& hooks)
    : thread_(thread),
      threads_(threads),
      rank_(rank),
      nranks_(nranks),
      board_(board),
      hooks_(hooks),
      view_(board.view()),
      failed_(nranks),
      down_(nranks),
      stage_(nranks) {
  for (int peer = 0; peer < nranks; ++peer) {
    outboxes_.emplace_back(static_cast<std::uint32_t>(peer));
    urgent_.emplace_back(static_cast<std::uint32_t>(peer));
  }
}

void Engine::use(Link& link) {
  link_ = &link;
  ordered_ = link.properties().ordered != 0;
  max_message_ = link.properties().max_message;
}

marrow_network_events Engine::events() {
  return {this,
          [](void* user, std::uint32_t peer, const void* data, std::uint32_t bytes) {
            static_cast<Engine*>(user)->on_message(peer, data, bytes);
          },
          [](void* user, std::uint32_t peer, std::uint32_t immediate) {
            static_cast<Engine*>(user)->on_immediate(peer, immediate);
          },
          [](void* user, std::uint32_t peer, const char* sentence) {
            Engine& engine = *static_cast<Engine*>(user);
            if (engine.posting_) {
              engine.late_downs_.emplace_back(peer, sentence);
            } else {
              engine.on_peer_down(peer, sentence);
            }
          }};
}

bool Engine::step() {
  bool busy = refresh();
  const int delivered = link_->network().progress(link_->endpoint());
  if (delivered < 0) report(-1, Code::network, link_->network().last_error());
  busy |= delivered > 0;
  busy |= drain();
  if (staging_) busy |= move_stage();
  busy |= push();
  busy |= reap();
  publish();
  if (!settled_) settle();
  return busy;
}

void Engine::report(int peer, Code code, const std::string& sentence,
                    const std::string& next_step) {
  if (hooks_.on_error) hooks_.on_error(peer, Error(code, sentence, next_step));
}

// --- the board --------------------------------------------------------------------------------

void Engine::see(std::shared_ptr<const View> view) {
  view_ = std::move(view);
  found_.fill({});
  if (staging_ != view_->staging.get()) see_staging();
}

bool Engine::refresh() {
  if (board_.version() == seen_) return false;
  see(board_.view());
  seen_ = view_->version;
  settled_ = false;
  for (int peer = 0; peer < nranks_; ++peer) {
    if (!view_->failed[peer] || failed_[peer]) continue;
    failed_[peer] = 1;
    link_->network().abort(link_->endpoint(), static_cast<std::uint32_t>(peer));
    fail_operations(peer);
  }
  for (const auto& device : devices_) {
    device->removed = std::find(view_->devices.begin(), view_->devices.end(), device->rings) ==
                      view_->devices.end();
  }
  for (const auto& rings : view_->devices) {
    const bool known = std::any_of(devices_.begin(), devices_.end(),
                                   [&](const auto& d) { return d->rings == rings; });
    if (!known) attach(rings);
  }
  return true;
}

void Engine::attach(const std::shared_ptr<DeviceRings>& rings) {
  auto device = std::make_unique<DeviceState>();
  device->rings = rings;
  for (int c = 0; c < rings->contexts(); ++c) {
    const RingReader reader(rings->slots(c, thread_), rings->log_size(), rings->first_index());
    device->contexts.push_back(std::make_unique<Ring>(*device, reader, c, rings->counters()));
    device->contexts.back()->queues.resize(nranks_);
  }
  devices_.push_back(std::move(device));
  first_sequences_.try_emplace(rings->number(), static_cast<std::uint32_t>(rings->first_index()));
}

/// Acknowledges the version once nothing of the old view is in use.
void Engine::settle() {
  bool clean = true;
  for (auto& device : devices_) {
    if (device->removed) clean &= settle(*device);
  }
  if (clean) std::erase_if(devices_, [](const auto& device) { return device->removed; });
  for (Queue* queue : queues_) {
    if (!queue) continue;
    queue->each([&](std::uint64_t, const Operation& op) {
      if (op.network == 0) return;
      // The handles of both are with the network, or about to be given to it.
      if (op.region != kNone && !view_->find(op.region)) clean = false;
      if (op.window != kNoWindow && !view_->find(op.window)) clean = false;
    });
  }
  if (staging_ && stage_uses_gone_memory()) clean = false;
  if (!clean) return;
  settled_ = true;
  board_.acknowledge(thread_, seen_);
}

/// Ends what is under way of a closed device communicator. @return whether nothing of it is on the network
bool Engine::settle(DeviceState& device) {
  drop_queued(device);
  if (staging_) drop_waiting(device);
  bool clean = true;
  for (const auto& ring : device.contexts) {
    for (const auto& queue : ring->queues) {
      if (!queue) continue;
      queue->each([&](std::uint64_t, Operation& op) {
        if (op.network != 0) {
          clean = false;
          return;
        }
        // Only an answer is awaited: nobody asks for it any more.
        if (op.extra != kNone) free_extras_.push_back(op.extra);
        op.done = true;
      });
    }
  }
  // Its peers' memory may go after this: what is on the way has to land first.
  clean &= all_seen(device);
  if (clean) detach(device);
  return clean;
}

/// Gives the ids of its queues back.
void Engine::detach(DeviceState& device) {
  for (const auto& ring : device.contexts) {
    for (auto& queue : ring->queues) {
      if (!queue) continue;
      next_numbers_[queue->id()] = queue->next_number();
      queues_[queue->id()] = nullptr;
      free_ids_.push_back(queue->id());
      queue.reset();
    }
  }
}

/// Network operations of this device that were not posted yet are not posted any more.
void Engine::drop_queued(const DeviceState& device) {
  for (std::vector<Outbox>* boxes : {&outboxes_, &urgent_}) {
    for (Outbox& box : *boxes) {
      box.filter([&](marrow_network_operation& o) {
        Queue* queue = nullptr;
        Operation* op = operation_of(o.token, &queue);
        if (!op || &queue->ring->device != &device) return true;
        if (!drop_from(box, o)) --op->network;
        return skip_instead(o);
      });
    }
  }
}

void Engine::fail_operations(int peer) {
  forget_unseen(static_cast<std::uint32_t>(peer));
  for (Outbox* box : {&outboxes_[peer], &urgent_[peer]}) {
    box->filter([&](const marrow_network_operation& o) {
      if (drop_from(*box, o)) return false;
      Queue* queue = queue_of(o.token);
      Operation* op = queue ? queue->find(o.token) : nullptr;
      if (op) --op->network;
      return false;
    });
  }
  if (staging_) fail_pieces(static_cast<std::uint32_t>(peer));
  for (Queue* queue : queues_) {
    if (!queue || queue->peer != peer) continue;
    queue->each([&](std::uint64_t, Operation& op) {
      op.fail(Status::peer_failed);
      op.reply = false;
      finish_if_done(*queue, op);
    });
  }
}

const Region* Engine::find_anew(std::uint32_t id) {
  const Region* region = view_->find(id);
  if (!region && board_.version() != view_->version) {
    // Registered after this pass began: whoever named it has seen the registration, so we do too.
    see(board_.view());
    region = view_->find(id);
  }
  if (region) found_[id % kFound] = {id, region};
  return region;
}

// --- completion -------------------------------------------------------------------------------

/// Null: that rank is not served here.
Queue* Engine::make_queue(Ring& ring, std::uint32_t peer) {
  if (peer >= static_cast<std::uint32_t>(nranks_) ||
      peer % static_cast<std::uint32_t>(threads_) != static_cast<std::uint32_t>(thread_))
    return nullptr;
  std::uint64_t id;
  if (free_ids_.empty()) {
    id = queues_.size();
    if (id > Queue::kMaxId) {
      throw Error(Code::internal, base::cat(id, " queues of the proxy path are in use"),
                  "use fewer contexts or device communicators");
    }
    queues_.push_back(nullptr);
    next_numbers_.push_back(0);
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  DeviceRings& rings = *ring.device.rings;
  ring.queues[peer] = std::make_unique<Queue>(id, next_numbers_[id]);
  Queue* queue = queues_[id] = ring.queues[peer].get();
  queue->ring = &ring;
  queue->context = ring.context;
  queue->peer = static_cast<int>(peer);
  queue->completion = &rings.completion(ring.context, static_cast<int>(peer));
  queue->outbox = &outboxes_[peer];
  queue->stream = rings.number() + static_cast<std::uint32_t>(ring.context);
  queue->sending = &sending(peer, queue->stream);
  return queue;
}

Extra& Engine::extra_of(Operation& op) {
  if (op.extra == kNone) {
    if (free_extras_.empty()) {
      op.extra = static_cast<std::uint32_t>(extras_.size());
      extras_.emplace_back();
    } else {
      op.extra = free_extras_.back();
      free_extras_.pop_back();
      extras_[op.extra] = {};
    }
  }
  return extras_[op.extra];
}

void Engine::say_fetched(const Queue& queue, const Extra& extra, const Operation& op) {
  ProxyChunk* result =
      queue.ring->device.rings->results(queue.context, thread_) + extra.result_slot;
  // A slot whose user gave up may have a newer user: then nobody waits for this one.
  const auto last = static_cast<std::uint32_t>(result->high);
  if (static_cast<std::int32_t>(extra.result_generation - last) > 0) {
    store_cell(result, Cell16{extra.old_value, static_cast<std::uint64_t>(op.status) << 32 |
                                                   extra.result_generation});
  }
}

/// What an operation leaves besides its completion.
void Engine::say_result(Queue& queue, Operation& op) {
  DeviceRings& rings = *queue.ring->device.rings;
  if (op.extra != kNone) {
    const Extra extra = extras_[op.extra];
    free_extras_.push_back(op.extra);
    op.extra = kNone;
    if (extra.stage_slot != kNone) free_stage_slot(*queue.ring, extra.stage_slot);
    if (extra.result_slot != kNone) say_fetched(queue, extra, op);
  }
  if (op.status != 0) {
    const std::uint64_t worst = std::max<std::uint64_t>(queue.completion->status, op.status);
    std::atomic_ref(queue.completion->status).store(worst, std::memory_order_relaxed);
  } else if (op.counter >= 0) {
    std::atomic_ref count(*rings.counter(op.counter));
    if (threads_ == 1) {  // nobody else adds to it
      count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    } else {
      count.fetch_add(1, std::memory_order_release);
    }
  }
}

/// Tells kernels what ended in this pass.
void Engine::publish() {
  for (Queue* queue : to_publish_) {
    queue->listed = false;
    const std::uint64_t end = queue->retire();
    if (end == 0) continue;
    // Publishes what the operations wrote here and that their sources were read; meets PathProxy::test.
    std::atomic_ref(queue->completion->completed)
        .store(end | (queue->completion->status != 0 ? kProxyFailed : 0),
               std::memory_order_release);
  }
  to_publish_.clear();
}

bool Engine::reap() {
  bool any = false;
  marrow_network_completion done[kBatch];
  for (;;) {
    const int n = link_->network().test(link_->endpoint(), done, kBatch);
    if (n < 0) report(-1, Code::network, link_->network().last_error());
    if (n <= 0) return any;
    any = true;
    for (int i = 0; i < n;) {
      const std::uint64_t token = done[i].token;
      const int first = i;
      int bits = MARROW_NETWORK_OK;  // of all statuses: something else when one is
      do {
        bits |= done[i].status;
        ++i;
      } while (i < n && done[i].token == token);
      const auto same = static_cast<std::uint32_t>(i - first);
      const auto failure = [&] {
        return std::find_if(
                   done + first, done + i,
                   [](const auto& completion) { return completion.status != MARROW_NETWORK_OK; })
            ->status;
      };
      Queue* queue = queue_of(token);
      if (!queue && token != 0 &&
          piece_completed(token, same, bits == MARROW_NETWORK_OK ? bits : failure()))
        continue;
      Operation* op = queue ? queue->find(token) : nullptr;
      if (!op) continue;  // an answer of ours, or its device communicator is closed
      op->network -= same;
      if (bits != MARROW_NETWORK_OK) [[unlikely]]
        fail(*queue, *op, failure());
      finish_if_done(*queue, *op);
    }
    if (n < static_cast<int>(kBatch)) return any;
  }
}

/// A network operation of that one did not succeed.
void Engine::fail(const Queue& queue, Operation& op, int with) {
  op.fail(Status::peer_failed);
  op.reply = false;
  if (failed_[queue.peer]) return;
  report(queue.peer, with == MARROW_NETWORK_PEER_FAILED ? Code::peer_failed : Code::network,
         base::cat("an operation to rank ", queue.peer, " over network ", link_->network().name,
                   " failed (", with, ")"),
         "look for the first error of that rank");
}

// --- the network ------------------------------------------------------------------------------

bool Engine::push() {
  bool any = false;
  for (std::size_t i = 0; i < to_push_.size();) {
    Outbox& box = *to_push_[i];
    const std::uint32_t n = box.held ? ready_prefix(box) : box.size();
    if (n != 0) {
      const int peer = static_cast<int>(box.first()->peer);
      posting_ = true;
      const int taken = link_->network().post(link_->endpoint(), box.first(), n);
      posting_ = false;
      if (taken < 0) {
        report(peer, Code::network, link_->network().last_error());
        fail_operations(peer);
      } else {
        any |= taken > 0;
        box.taken(static_cast<std::uint32_t>(taken));
      }
    }
    if (box.empty()) {
      box.listed = false;
      to_push_[i] = to_push_.back();
      to_push_.pop_back();
    } else {
      ++i;
    }
  }
  if (!late_downs_.empty()) [[unlikely]]
    say_late_downs();
  return any;
}

}  // namespace marrow::proxy
