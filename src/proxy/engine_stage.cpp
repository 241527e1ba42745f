// SPDX-License-Identifier: Apache-2.0
// Memory that the network cannot reach (staging.hpp). A staged put becomes pieces of at most a slot. Each is
// copied into its slot here, if our side is staged; is put by the network to its place or, if the peer's
// side is staged, into the slot there, with a message that names the place. The peer's thread copies it
// from the slot and gives the slot back with a credit. What the peer is told after that message waits
// there until the copy is done (act), so every promise about puts holds for staged ones.
//
// A get of the peer's staged memory asks for a copy into the slot there and then reads it from there.
// Here the pieces of puts stand in the outbox in their place, held until they are ready; gets, answers
// and credits promise no order and pass them (urgent_), since what is held may wait for them.
#include <cstring>

#include "base/text.hpp"
#include "proxy/engine.hpp"

namespace marrow::proxy {
namespace {

constexpr std::uint64_t kValueOffset = (std::uint64_t{1} << 56) - 1;

std::uint64_t slot_word(int slot, std::uint32_t generation) {
  return std::uint64_t{generation} << 32 | static_cast<std::uint32_t>(slot);
}

}  // namespace

void Engine::see_staging() {
  staging_ = view_->staging.get();
  CopyEngine* out = staging_ ? staging_->out[thread_] : nullptr;
  CopyEngine* in = staging_ ? staging_->in[thread_] : nullptr;
  if (out && out != out_) out->attach_thread();
  if (in && in != in_) in->attach_thread();
  out_ = out;
  in_ = in;
}

// --- sending ------------------------------------------------------------------------------------

/// Sequences that a descriptor takes at most.
std::uint64_t Engine::staged_sequences(ProxyFields f) const {
  const bool moves = f.opcode() == ProxyOpcode::put || f.opcode() == ProxyOpcode::get;
  return moves && f.bytes() != 0 ? (f.bytes() - 1) / std::min(staging_->chunk, max_message_) * 2 + 2
                                 : 0;
}

/// What move_pieces does when one side is staged. Its checks are made.
bool Engine::move_staged(Handle on, ProxyFields f, std::uint32_t kind, const Region& mine,
                         const Region& window) {
  const auto peer = static_cast<std::uint32_t>(on.queue.peer);
  const bool here = !mine.local[thread_];
  const bool there = !window.remote[peer];
  if (!staging_ || (here && !mine.staged) || (there && !staging_->remote[peer])) return false;
  const std::uint64_t bytes = f.bytes();
  const std::uint64_t chunk = std::min(staging_->chunk, max_message_);
  if (staged_sequences(f) >= kMaxUnseen) return false;
  on.op.region = f.region();
  on.op.window = f.window();
  for (std::uint64_t done = 0; done != bytes;) {
    const std::uint32_t id = stage_.add();
    Piece& piece = stage_.at(id);
    piece.state = Piece::State::waiting;
    piece.get = kind == MARROW_NETWORK_GET;
    piece.there = there;
    piece.peer = peer;
    piece.window = f.window();
    piece.token = on.token;
    piece.address = here ? mine.block.device + f.source_offset() + done : nullptr;
    piece.local = mine.local[thread_];
    piece.local_offset = f.source_offset() + done;
    piece.remote = window.remote[peer];
    piece.remote_offset = f.offset() + done;
    piece.bytes = std::min(chunk, bytes - done);
    ++on.op.network;
    stage_.channel(peer).waiting.push_back(id);
    done += piece.bytes;
    if (piece.get) continue;
    // In their place among the operations to that peer; ready_prefix fills in what is not known yet.
    piece.network = there ? 2 : 1;
    Outbox& box = listed(*on.queue.outbox);
    marrow_network_operation& put = box.add(MARROW_NETWORK_PUT, stage_.token(id));
    put.bytes = piece.bytes;
    put.compare = kHeld;
    ++box.held;
    const std::uint32_t sequence = on.queue.sending->next;
    number(on.queue, put);
    if (!there) continue;
    Message message{};
    message.kind = MessageKind::staged_put;
    message.stream = static_cast<std::uint16_t>(on.queue.stream);
    message.window = piece.window;
    message.offset = piece.remote_offset;
    message.operand = piece.bytes;
    if (!ordered_) {
      message.flags = kSequenced;
      message.covers = sequence;
    }
    message.sequence = on.queue.sending->next++;
    write(box.add(MARROW_NETWORK_MESSAGE, stage_.token(id)), message);
  }
  assign_slots(peer);
  return true;
}

void Engine::send_staged_value(Handle on, ProxyFields f) {
  Message message{};
  message.kind = MessageKind::staged_value;
  message.stream = static_cast<std::uint16_t>(on.queue.stream);
  message.window = f.window();
  message.offset = f.value_offset() | f.value_bytes() << 56;
  message.operand = f.value(0);
  message.compare = f.value(1);
  message.token = f.value(2);
  message.sequence = on.queue.sending->next++;
  if (!ordered_) {
    message.flags = kSequenced;
    message.covers = message.sequence;
  }
  write(enqueue(on, MARROW_NETWORK_MESSAGE), message);
}

/// Gives slots to those that wait for one, and starts them.
void Engine::assign_slots(std::uint32_t peer) {
  for (;;) {
    const std::uint32_t id = stage_.take_slot(peer);
    if (id == kNone) return;
    Piece& piece = stage_.at(id);
    if (piece.get) {
      if (piece.there) {
        ask_for(piece, id);
      } else {
        fetch_piece(piece, id);
      }
      continue;
    }
    piece.state = Piece::State::copying;
    if (!piece.address) continue;
    piece.ticket = out_->copy(staging_->block.host + staging_->out_offset(peer, piece.slot),
                              piece.address, piece.bytes);
    ++stage_.copies_out;
  }
}

/// Whether what a put's piece needs here is done.
bool Engine::copied(const Piece& piece) {
  return piece.state == Piece::State::copying && (piece.ticket == 0 || out_->done(piece.ticket));
}

/// How many of its operations may be posted; fills in those that became ready.
std::uint32_t Engine::ready_prefix(Outbox& box) {
  marrow_network_operation* const o = box.first();
  const std::uint32_t n = box.size();
  for (std::uint32_t i = 0; i < n && box.held != 0; ++i) {
    if (o[i].kind != MARROW_NETWORK_PUT || o[i].compare != kHeld) continue;
    Piece& piece = stage_.at(stage_.find(o[i].token));
    if (!copied(piece)) return i;
    o[i].compare = 0;
    --box.held;
    o[i].local = piece.address ? staging_->local[thread_] : piece.local;
    o[i].local_offset =
        piece.address ? staging_->out_offset(piece.peer, piece.slot) : piece.local_offset;
    o[i].remote = piece.there ? staging_->remote[piece.peer] : piece.remote;
    o[i].remote_offset = piece.there
                             ? staging_->in_offset(static_cast<std::uint32_t>(rank_), piece.slot)
                             : piece.remote_offset;
    if (piece.there) {  // its message stands behind it
      Message message;
      std::memcpy(&message, o[i + 1].inline_data, sizeof(message));
      message.compare = slot_word(piece.slot, stage_.channel(piece.peer).generation[piece.slot]);
      write(o[i + 1], message);
    }
    if (piece.ticket != 0) --stage_.copies_out;
    piece.state = Piece::State::sending;
  }
  return n;
}

void Engine::ask_for(Piece& piece, std::uint32_t id) {
  const std::uint64_t token = stage_.token(id);
  Message message{};
  message.kind = MessageKind::staged_get;
  message.window = piece.window;
  message.offset = piece.remote_offset;
  message.operand = piece.bytes;
  message.compare = slot_word(piece.slot, stage_.channel(piece.peer).generation[piece.slot]);
  message.token = token;
  piece.state = Piece::State::asking;
  piece.network = 1;
  send_at_once(piece.peer, message, token);
}

void Engine::fetch_piece(Piece& piece, std::uint32_t id) {
  piece.state = Piece::State::fetching;
  piece.network = 1;
  marrow_network_operation& get =
      listed(urgent_[piece.peer]).add(MARROW_NETWORK_GET, stage_.token(id));
  get.local = piece.address ? staging_->local[thread_] : piece.local;
  get.local_offset =
      piece.address ? staging_->out_offset(piece.peer, piece.slot) : piece.local_offset;
  get.remote = piece.there ? staging_->remote[piece.peer] : piece.remote;
  get.remote_offset = piece.there
                          ? staging_->in_offset(static_cast<std::uint32_t>(rank_), piece.slot)
                          : piece.remote_offset;
  get.bytes = piece.bytes;
}

// --- completion -----------------------------------------------------------------------------------

Operation* Engine::operation_of(std::uint64_t token, Queue** queue) {
  const std::uint32_t id = stage_.find(token);
  if (id != kNone) token = stage_.at(id).token;
  *queue = queue_of(token);
  return *queue ? (*queue)->find(token) : nullptr;
}

/// The operation's share in that piece ends.
void Engine::end_part(Piece& piece, int failure) {
  Queue* queue = queue_of(piece.token);
  Operation* op = queue ? queue->find(piece.token) : nullptr;
  piece.token = 0;
  if (!op) return;
  --op->network;
  if (failure == MARROW_NETWORK_INVALID) {
    op->fail(Status::invalid);  // the peer has said what is wrong
  } else if (failure != MARROW_NETWORK_OK) {
    fail(*queue, *op, failure);
  }
  finish_if_done(*queue, *op);
}

/// @return whether the token is a piece's
bool Engine::piece_completed(std::uint64_t token, std::uint32_t count, int failure) {
  const std::uint32_t id = stage_.find(token);
  if (id == kNone) return false;
  stage_.at(id).network -= count;
  advance(id, failure);
  return true;
}

/// Something that the piece waited for has come.
void Engine::advance(std::uint32_t id, int failure) {
  Piece& piece = stage_.at(id);
  if (failure != MARROW_NETWORK_OK) {
    piece.no_credit = true;
    if (piece.token != 0) end_part(piece, failure);
  }
  if (piece.network != 0) return;
  switch (piece.state) {
    case Piece::State::sending:
    case Piece::State::copying:  // dropped before it was ready
    case Piece::State::waiting:
      if (piece.token != 0) end_part(piece, MARROW_NETWORK_OK);
      if (!piece.there || piece.no_credit || piece.credited) break;
      piece.state = Piece::State::landing;
      return;
    case Piece::State::asking:
      if (piece.token == 0) break;
      if (piece.credited) fetch_piece(piece, id);
      return;
    case Piece::State::fetching:
      if (!piece.address || piece.token == 0) {
        if (piece.token != 0) end_part(piece, MARROW_NETWORK_OK);
        break;
      }
      piece.state = Piece::State::storing;
      piece.ticket = in_->copy(piece.address,
                               staging_->block.host + staging_->out_offset(piece.peer, piece.slot),
                               piece.bytes);
      stage_.storing.push_back(id);
      return;
    default: return;
  }
  stage_.release(id);
}

void Engine::on_credit(std::uint32_t peer, const Message& message) {
  const auto slot = static_cast<std::uint32_t>(message.compare);
  Channel& channel = stage_.channel(peer);
  if (slot >= static_cast<std::uint32_t>(kStageSlots) || (channel.free >> slot & 1) != 0 ||
      channel.generation[slot] != message.compare >> 32)
    return;  // said twice
  const std::uint32_t id = channel.owner[slot];
  Piece& piece = stage_.at(id);
  if (piece.state == Piece::State::landing) {
    stage_.release(id);
  } else {
    piece.credited = true;
  }
}

/// The peer has copied what a get asked for. @return whether the answer was to a piece
bool Engine::on_piece_reply(std::uint32_t peer, const Message& message) {
  const std::uint32_t id = stage_.find(message.token);
  if (id == kNone) return false;
  Piece& piece = stage_.at(id);
  if (piece.state != Piece::State::asking || piece.peer != peer) return true;
  if (message.compare != 0) {
    advance(id, MARROW_NETWORK_INVALID);
    return true;
  }
  piece.credited = true;  // the request's own completion may be late
  if (piece.network == 0) fetch_piece(piece, id);
  return true;
}

// --- receiving --------------------------------------------------------------------------------------

/// Starts a copy between a slot of ours and a window. Its end is noticed in move_stage.
void Engine::on_staged(std::uint32_t peer, const Message& message) {
  const bool value = message.kind == MessageKind::staged_value;
  const std::uint64_t offset = value ? message.offset & kValueOffset : message.offset;
  const std::uint64_t bytes = value ? message.offset >> 56 : message.operand;
  const auto slot = static_cast<std::uint32_t>(message.compare);
  const Region* window = window_of(message.window, offset, bytes);
  const bool slot_ok = value || slot < static_cast<std::uint32_t>(kStageSlots);
  if (!staging_ || !window || !window->staged || !slot_ok ||
      bytes > (value ? kProxyMaxInline : staging_->chunk)) {
    report(static_cast<int>(peer), Code::network,
           base::cat("rank ", peer, " sent ", bytes, " bytes for offset ", offset, " of window ",
                     message.window, ", which is not staged memory of an open window here"),
           "windows are closed by all ranks together; compare MARROW_PROXY_STAGE of the ranks");
    if (message.kind == MessageKind::staged_put) give_credit(peer, message, Status::invalid);
    if (message.kind == MessageKind::staged_get) answer(peer, message, 0, Status::invalid);
    return;
  }
  if (!value && !stage_.serve(peer, slot, static_cast<std::uint32_t>(message.compare >> 32)))
    return;
  Landing landing{.peer = peer, .region = message.window, .message = message};
  std::byte* const place = window->block.device + offset;
  try {
    if (value) {
      const std::uint64_t words[3] = {message.operand, message.compare, message.token};
      landing.ticket = in_->copy(place, words, bytes);
    } else {
      std::byte* const in_slot =
          staging_->block.host + staging_->in_offset(peer, static_cast<int>(slot));
      const bool get = message.kind == MessageKind::staged_get;
      landing.ticket = in_->copy(get ? in_slot : place, get ? place : in_slot, bytes);
      landing.then = get ? Landing::Then::answer : Landing::Then::credit;
    }
  } catch (...) {
    broken_ = std::current_exception();  // the network called us: thrown after it
    return;
  }
  stage_.land(landing);
}

void Engine::give_credit(std::uint32_t peer, const Message& of, Status status) {
  if (failed_[peer]) return;
  Message message{};
  message.kind = MessageKind::credit;
  message.compare = of.compare;
  message.operand = static_cast<std::uint64_t>(status);
  send_at_once(peer, message);
}

/// A pass over all that waits for copies or slots. @return whether anything is under way
bool Engine::move_stage() {
  if (broken_) std::rethrow_exception(broken_);
  const bool busy = !stage_.landings().empty() || !stage_.storing.empty() || stage_.copies_out != 0;
  while (!stage_.landings().empty() && in_->done(stage_.landings().front().ticket)) {
    const Landing landed = stage_.take_landing();
    switch (landed.then) {
      case Landing::Then::nothing: break;
      case Landing::Then::credit: give_credit(landed.peer, landed.message, Status::ok); break;
      case Landing::Then::answer: answer(landed.peer, landed.message, 0, Status::ok); break;
      case Landing::Then::act: act_now(landed.peer, landed.message); break;
    }
  }
  while (!stage_.storing.empty()) {
    const std::uint32_t id = stage_.storing.front();
    Piece& piece = stage_.at(id);
    if (!in_->done(piece.ticket)) break;
    stage_.storing.pop_front();
    if (piece.token != 0) end_part(piece, MARROW_NETWORK_OK);
    stage_.release(id);
  }
  if (stage_.has_peers_with_room()) {
    for (const std::uint32_t peer : stage_.take_peers_with_room()) assign_slots(peer);
  }
  return free_unused_slots() || busy;
}

// --- slots that kernels write -----------------------------------------------------------------------

/// The put's end will give its slot back.
void Engine::name_stage_slot(Queue& queue, Operation& op, ProxyFields f) {
  const DeviceRings& rings = *queue.ring->device.rings;
  if (rings.stage().bytes == 0 || f.region() != rings.stage_region()) return;
  const std::uint64_t slot =
      (f.source_offset() >> rings.stage_log_slot()) - rings.stage_first(queue.context, thread_);
  if (slot >> rings.stage_log_size() == 0)
    extra_of(op).stage_slot = static_cast<std::uint32_t>(slot);
}

void Engine::free_stage_slot(Ring& ring, std::uint32_t slot) {
  if (ring.stage_done.empty())
    ring.stage_done.resize(std::size_t{1} << ring.device.rings->stage_log_size());
  ring.stage_done[slot] = 1;
  say_free(ring);
}

/// Kernels take slots in order and get them back in order.
bool Engine::say_free(Ring& ring) {
  const DeviceRings& rings = *ring.device.rings;
  const std::uint64_t mask = (std::uint64_t{1} << rings.stage_log_size()) - 1;
  const std::uint64_t* unused = rings.stage_unused(ring.context, thread_);
  const std::uint64_t before = ring.stage_tail;
  for (;; ++ring.stage_tail) {
    const std::uint64_t slot = ring.stage_tail & mask;
    // Meets the release of a kernel that could not post: it is done with the slot.
    const std::atomic_ref given_back(const_cast<std::uint64_t&>(unused[slot]));
    if (!ring.stage_done.empty() && ring.stage_done[slot]) {
      ring.stage_done[slot] = 0;
    } else if (given_back.load(std::memory_order_acquire) != ring.stage_tail + 1) {
      break;
    }
  }
  if (ring.stage_tail == before) return false;
  std::atomic_ref(*rings.stage_consumed(ring.context, thread_))
      .store(ring.stage_tail, std::memory_order_release);
  return true;
}

bool Engine::free_unused_slots() {
  bool any = false;
  for (const auto& device : devices_) {
    if (device->removed || device->rings->stage().bytes == 0) continue;
    for (const auto& ring : device->contexts) any |= say_free(*ring);
  }
  return any;
}

// --- the end of things ------------------------------------------------------------------------------

/// A piece's operation leaves the outbox without having been posted. @return whether it was a piece's
bool Engine::drop_from(Outbox& box, const marrow_network_operation& o) {
  const std::uint32_t id = stage_.find(o.token);
  if (id == kNone) return false;
  Piece& piece = stage_.at(id);
  if (o.kind == MARROW_NETWORK_PUT && o.compare == kHeld) {
    --box.held;
    if (piece.ticket != 0) {
      --stage_.copies_out;
      stage_.dropped = std::max(stage_.dropped, piece.ticket);
    }
  }
  piece.no_credit = true;
  if (--piece.network != 0) return true;
  if (piece.token != 0) {  // as end_part, without ending the operation: whoever drops it does that
    Queue* queue = nullptr;
    if (Operation* op = operation_of(o.token, &queue)) --op->network;
    piece.token = 0;
  }
  advance(id, MARROW_NETWORK_OK);
  return true;
}

/// Gets of a closed device communicator that wait for a slot.
void Engine::drop_waiting(const DeviceState& device) {
  for (std::uint32_t id = 0; id < stage_.size(); ++id) {
    Piece& piece = stage_.at(id);
    if (piece.state != Piece::State::waiting || !piece.get) continue;
    Queue* queue = queue_of(piece.token);
    Operation* op = queue && &queue->ring->device == &device ? queue->find(piece.token) : nullptr;
    if (!op) continue;
    --op->network;
    stage_.release(id);
  }
}

/// The peer will neither answer nor give slots back. What the network has comes back by itself.
void Engine::fail_pieces(std::uint32_t peer) {
  for (std::uint32_t id = 0; id < stage_.size(); ++id) {
    Piece& piece = stage_.at(id);
    if (piece.state == Piece::State::free || piece.peer != peer) continue;
    piece.no_credit = true;
    if (piece.network != 0 || piece.state == Piece::State::storing) continue;
    if (piece.token != 0) {
      Queue* queue = nullptr;
      if (Operation* op = operation_of(stage_.token(id), &queue)) --op->network;
      piece.token = 0;
    }
    stage_.release(id);
  }
}

/// Whether copies are under way to or from memory that is no region of the view any more.
bool Engine::stage_uses_gone_memory() {
  for (const Landing& landing : stage_.landings()) {
    if (landing.region != kNone && !view_->find(landing.region)) return true;
  }
  return stage_.dropped != 0 && !out_->done(stage_.dropped);
}

}  // namespace marrow::proxy
