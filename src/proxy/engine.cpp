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
      outboxes_(nranks) {}

marrow_network_events Engine::events() {
  return {this,
          [](void* user, std::uint32_t peer, const void* data, std::uint32_t bytes) {
            static_cast<Engine*>(user)->on_message(peer, data, bytes);
          },
          [](void* user, std::uint32_t peer, std::uint32_t immediate) {
            static_cast<Engine*>(user)->on_immediate(peer, immediate);
          },
          [](void* user, std::uint32_t peer, const char* sentence) {
            static_cast<Engine*>(user)->on_peer_down(peer, sentence);
          }};
}

bool Engine::step() {
  bool busy = refresh();
  const int delivered = link_->network().progress(link_->endpoint());
  if (delivered < 0) report(-1, Code::network, link_->network().last_error());
  busy |= delivered > 0;
  busy |= drain();
  busy |= push();
  busy |= reap();
  if (!settled_) settle();
  return busy;
}

void Engine::report(int peer, Code code, const std::string& sentence,
                    const std::string& next_step) {
  if (hooks_.on_error) hooks_.on_error(peer, Error(code, sentence, next_step));
}

// --- the board --------------------------------------------------------------------------------

bool Engine::refresh() {
  if (board_.version() == seen_) return false;
  view_ = board_.view();
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
    device->readers.emplace_back(rings->slots(c, thread_), rings->log_size(), rings->first_index());
  }
  device->outstanding.resize(rings->contexts());
  device->queues.resize(static_cast<std::size_t>(rings->contexts()) * nranks_);
  devices_.push_back(std::move(device));
  first_sequences_.try_emplace(rings->number(), static_cast<std::uint32_t>(rings->first_index()));
}

/// Acknowledges the version once nothing of the old view is in use.
void Engine::settle() {
  bool clean = true;
  for (auto& device : devices_) {
    if (!device->removed) continue;
    drop_queued(*device);
    for (std::uint32_t slot = 0; slot < operations_.size(); ++slot) {
      Operation& op = operations_[slot];
      if (!op.active || op.device != device.get()) continue;
      if (op.network != 0) {
        clean = false;
        continue;
      }
      op.active = false;  // only an answer is awaited: nobody asks for it any more
      ++op.generation;
      --device->active;
      free_.push_back(slot);
    }
    // Its peers' memory may go after this: what is on the way has to land first.
    clean &= all_seen(*device);
  }
  if (clean) std::erase_if(devices_, [](const auto& d) { return d->removed && d->active == 0; });
  for (const Operation& op : operations_) {
    if (op.active && op.network != 0 && op.region != kNoRegion && !view_->find(op.region))
      clean = false;
  }
  if (!clean) return;
  settled_ = true;
  board_.acknowledge(thread_, seen_);
}

/// Network operations of this device that were not posted yet are not posted any more.
void Engine::drop_queued(const DeviceState& device) {
  for (Outbox& box : outboxes_) {
    const auto queued = box.operations.begin() + static_cast<std::ptrdiff_t>(box.head);
    const auto kept =
        std::remove_if(queued, box.operations.end(), [&](marrow_network_operation& o) {
          Operation* op = of_token(o.token);
          if (!op || op->device != &device) return false;
          --op->network;
          return !skip_instead(o);
        });
    box.operations.erase(kept, box.operations.end());
  }
}

void Engine::fail_operations(int peer) {
  forget_unseen(static_cast<std::uint32_t>(peer));
  Outbox& box = outboxes_[peer];
  for (std::size_t i = box.head; i < box.operations.size(); ++i) {
    if (Operation* op = of_token(box.operations[i].token)) --op->network;
  }
  box.operations.clear();
  box.head = 0;
  for (std::uint32_t slot = 0; slot < operations_.size(); ++slot) {
    Operation& op = operations_[slot];
    if (!op.active || op.queue->peer != peer) continue;
    op.status = worse(op.status, Status::peer_failed);
    op.reply = false;
    finish_if_done(slot);
  }
}

const Region* Engine::find(std::uint32_t id) {
  if (const Region* region = view_->find(id)) return region;
  // Registered after this pass began: whoever named it has seen the registration, so we do too.
  if (board_.version() == view_->version) return nullptr;
  view_ = board_.view();
  return view_->find(id);
}

// --- completion -------------------------------------------------------------------------------

std::uint32_t Engine::begin(DeviceState& device, int context, std::uint64_t index,
                            const ProxyOperation& d) {
  auto& made = device.queues[static_cast<std::size_t>(context) * nranks_ + d.peer];
  if (!made) {
    made = std::make_unique<Queue>();
    made->context = context;
    made->peer = d.peer;
    made->completion = &device.rings->completion(context, d.peer);
    made->stream = device.rings->number() + static_cast<std::uint32_t>(context);
    made->sending = &sending(d.peer, made->stream);
  }
  Queue& queue = *made;
  std::uint32_t slot;
  if (free_.empty()) {
    slot = static_cast<std::uint32_t>(operations_.size());
    operations_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  Operation& op = operations_[slot];
  op = Operation{.generation = op.generation, .active = true};
  op.device = &device;
  op.queue = &queue;
  op.number = queue.first_number + queue.open.size();
  op.opcode = d.opcode;
  op.counter = d.counter;
  op.result_slot = d.result_slot;
  op.result_generation = d.generation;
  queue.open.push_back({index, false});
  ++device.active;
  ++device.outstanding[context];
  return slot;
}

Engine::Operation* Engine::of_token(std::uint64_t token) {
  const auto slot = static_cast<std::uint32_t>(token);
  if (token == 0 || slot >= operations_.size()) return nullptr;
  Operation& op = operations_[slot];
  return op.active && op.generation == token >> 32 ? &op : nullptr;
}

void Engine::finish_if_done(std::uint32_t slot) {
  Operation& op = operations_[slot];
  if (op.network != 0 || op.reply) return;
  Queue& queue = *op.queue;
  DeviceState& device = *op.device;
  const bool fetch = op.opcode == ProxyOpcode::fetch_add || op.opcode == ProxyOpcode::compare_swap;
  if (fetch && op.result_slot < kProxyFetchSlots) {
    ProxyChunk* result = device.rings->results(queue.context, thread_) + op.result_slot;
    // A slot whose user gave up may have a newer user: then nobody waits for this one.
    const auto last = static_cast<std::uint32_t>(result->high);
    if (static_cast<std::int32_t>(op.result_generation - last) > 0) {
      store_cell(result, Cell16{op.old_value, static_cast<std::uint64_t>(op.status) << 32 |
                                                  op.result_generation});
    }
  }
  if (op.status != Status::ok) {
    const std::uint64_t worst =
        std::max<std::uint64_t>(queue.completion->status, static_cast<std::uint64_t>(op.status));
    std::atomic_ref(queue.completion->status).store(worst, std::memory_order_relaxed);
  } else if (op.counter >= 0) {
    std::atomic_ref(*device.rings->counter(op.counter)).fetch_add(1, std::memory_order_release);
  }
  queue.open[op.number - queue.first_number].done = true;
  op.active = false;
  ++op.generation;
  free_.push_back(slot);
  --device.active;
  --device.outstanding[queue.context];
  publish(queue);
}

void Engine::publish(Queue& queue) {
  if (!queue.open.front().done) return;
  std::uint64_t end = 0;
  while (!queue.open.empty() && queue.open.front().done) {
    end = queue.open.front().index + 1;
    queue.open.pop_front();
    ++queue.first_number;
  }
  // Publishes what the operations wrote here and that their sources were read; meets PathProxy::test.
  std::atomic_ref(queue.completion->completed).store(end, std::memory_order_release);
}

bool Engine::reap() {
  bool any = false;
  marrow_network_completion done[64];
  for (;;) {
    const int n = link_->network().test(link_->endpoint(), done, 64);
    if (n < 0) report(-1, Code::network, link_->network().last_error());
    if (n <= 0) return any;
    any = true;
    for (int i = 0; i < n; ++i) complete(done[i]);
  }
}

void Engine::complete(const marrow_network_completion& completion) {
  Operation* op = of_token(completion.token);
  if (!op) return;  // an answer of ours, or its device communicator is closed
  --op->network;
  if (completion.status != MARROW_NETWORK_OK) {
    op->status = worse(op->status, Status::peer_failed);
    op->reply = false;
    if (!failed_[op->queue->peer]) {
      const int peer = op->queue->peer;
      report(peer,
             completion.status == MARROW_NETWORK_PEER_FAILED ? Code::peer_failed : Code::network,
             base::cat("an operation to rank ", peer, " over network ", link_->network().name,
                       " failed (", completion.status, ")"),
             "look for the first error of that rank");
    }
  }
  finish_if_done(static_cast<std::uint32_t>(completion.token));
}

// --- the network ------------------------------------------------------------------------------

/// A network operation for the peer, to be filled in; goes out with this pass's push.
/// @param slot  whose completion it is part of; kNoRegion: nobody's
marrow_network_operation& Engine::enqueue(std::uint32_t peer, std::uint32_t kind,
                                          std::uint32_t slot) {
  Outbox& box = outboxes_[peer];
  if (!box.listed) {
    box.listed = true;
    to_push_.push_back(peer);
  }
  marrow_network_operation& o = box.operations.emplace_back();
  o.kind = kind;
  o.peer = peer;
  if (slot != kNoRegion) {
    o.token = token_of(slot);
    ++operations_[slot].network;
  }
  return o;
}

bool Engine::push() {
  bool any = false;
  for (std::size_t i = 0; i < to_push_.size();) {
    const std::uint32_t peer = to_push_[i];
    Outbox& box = outboxes_[peer];
    const std::size_t left = box.operations.size() - box.head;
    if (left != 0) {
      const int taken = link_->network().post(link_->endpoint(), box.operations.data() + box.head,
                                              static_cast<std::uint32_t>(left));
      if (taken < 0) {
        report(static_cast<int>(peer), Code::network, link_->network().last_error());
        fail_operations(static_cast<int>(peer));
      } else {
        any |= taken > 0;
        box.head += static_cast<std::size_t>(taken);
      }
    }
    if (box.head == box.operations.size()) {
      box.operations.clear();
      box.head = 0;
      box.listed = false;
      to_push_[i] = to_push_.back();
      to_push_.pop_back();
    } else {
      if (box.head > 1024 && box.head > box.operations.size() / 2) {
        // A queue that is never empty may not grow for ever.
        box.operations.erase(box.operations.begin(),
                             box.operations.begin() + static_cast<std::ptrdiff_t>(box.head));
        box.head = 0;
      }
      ++i;
    }
  }
  return any;
}

}  // namespace marrow::proxy
