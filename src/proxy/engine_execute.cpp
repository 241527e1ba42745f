// SPDX-License-Identifier: Apache-2.0
// Descriptors: what a kernel claims is checked against the board's tables before anything is touched.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "base/text.hpp"
#include "proxy/engine.hpp"

namespace marrow::proxy {

bool Engine::drain() {
  bool any = false;
  for (const auto& device : devices_) {
    if (device->removed) continue;
    for (const auto& ring : device->contexts) any |= drain_ring(*ring);
  }
  return any;
}

bool Engine::drain_ring(Ring& ring) {
  // What is under way is bounded by the ring's size, else one slow peer would fill our tables.
  const std::uint64_t size = ring.reader.size();
  if (ring.outstanding >= size) return false;
  const std::uint64_t first = ring.reader.index();
  auto left = static_cast<std::uint32_t>(std::min<std::uint64_t>(kBatch, size - ring.outstanding));
  // What stands between opcode and peer, and the counter: alone when the opcode is.
  constexpr std::uint64_t kKind =
      ~std::uint64_t{0} << 56 & ~kProxyLapBit & ~(std::uint64_t{1} << 57);
  constexpr std::uint64_t kCounter = std::uint64_t{kProxyMaxCounters} << 23;
  constexpr auto of = [](ProxyOpcode opcode) { return static_cast<std::uint64_t>(opcode) << 58; };
  // An empty ring, which is what an idle thread looks at, costs one line and not two.
  const bool some =
      !((RingReader::high(ring.reader.place()->chunk[0]) ^ ring.reader.lap()) & kProxyLapBit);
  ring.deep = some && ring.reader.deep();
  while (left != 0) {
    const std::uint64_t word = RingReader::high(ring.reader.place()->chunk[0]);
    if ((word ^ ring.reader.lap()) & kProxyLapBit) break;
    const std::uint64_t head = word & ~kProxyLapBit;
    std::uint32_t taken = 0;
    if (ordered_ && (head & kCounter) == 0) {
      const std::uint32_t most = std::min(left, kRun);
      if ((head & kKind) == of(ProxyOpcode::put_value)) taken = drain_run<true>(ring, head, most);
      if ((head & kKind) == of(ProxyOpcode::put)) taken = drain_run<false>(ring, head, most);
    }
    if (taken == 0) {
      ProxyDescriptor descriptor;
      if (!ring.reader.next(&descriptor)) break;
      if (must_wait(ring, ProxyFields(descriptor))) [[unlikely]] {
        ring.reader.put_back();
        break;
      }
      ++ring.outstanding;
      execute(ring, ring.reader.index() - 1, descriptor);
      taken = 1;
    }
    left -= taken;
  }
  // The slots were read: producers may reuse them. While there is more than a pass takes, not at each pass: the
  // word comes back from the GPU's side every time.
  const std::uint64_t index = ring.reader.index();
  if (index != first) ring.reader.look_deep();
  if (index - ring.told >= (left == 0 ? std::min<std::uint64_t>(size / 8, 1024) : 1)) {
    ring.told = index;
    std::atomic_ref(*ring.device.rings->consumed(ring.context, thread_))
        .store(index, std::memory_order_release);
  }
  return index != first;
}

/// Whether its peer is so far behind on this stream that sequences could be confused. Then the ring waits, and no
/// other does. Asked before the descriptor is numbered, since one alone may take kMaxUnseen.
inline bool Engine::must_wait(Ring& ring, ProxyFields f) {
  const std::uint32_t peer = f.peer();
  const Queue* queue =
      peer < static_cast<std::uint32_t>(nranks_) ? ring.queues[peer].get() : nullptr;
  if (!queue || queue->sending->unseen() == 0) return false;
  std::uint64_t needed = 2;  // a message, and a question of ask()
  if (!ordered_ && f.opcode() == ProxyOpcode::put && f.bytes() > max_message_)
    needed += (f.bytes() - 1) / max_message_;
  if (staging_) needed += staged_sequences(f);
  if (queue->sending->unseen() + needed <= kMaxUnseen) return false;
  ask(peer, queue->stream, *queue->sending);
  return true;
}

/// Small puts in a row that differ in offsets and values only, the bulk of what a GPU sends: what they name is
/// looked up once, and they are one operation here. @return how many were posted; 0: they are for execute()
template <bool kValue>
std::uint32_t Engine::drain_run(Ring& ring, std::uint64_t head, std::uint32_t most) {
  RingReader& reader = ring.reader;
  const ProxyDescriptor* d = reader.place();
  const ProxyDescriptor like{{{0, head}, {0, RingReader::high(d->chunk[1]) & ~kProxyLapBit}}};
  const ProxyFields f(like);
  const std::uint32_t peer = f.peer();
  if (peer >= static_cast<std::uint32_t>(nranks_) || failed_[peer]) return 0;
  Queue* queue = ring.queues[peer].get();
  const Region* window = find(f.window());
  const Region* mine = kValue ? window : find(f.region());
  if (!queue || !window || !window->window || !mine || f.add_window() != 0) return 0;
  if (!kValue && f.region() >= kProxyStageRegions) return 0;  // each gives a slot back
  const std::uint64_t end = window->block.bytes, my_end = mine->block.bytes;
  const std::uint64_t largest =
      kValue ? kProxyMaxInline : std::min({kSmall, max_message_, end, my_end});
  if (end < largest) return 0;
  if (!window->remote[peer] || (!kValue && !mine->local[thread_])) return 0;  // staged
  // Members that are alike in all, two at a time: the loop is bound by its instructions where another thread works on
  // the same core.
  using Pair [[gnu::vector_size(16)]] = std::uint64_t;
  static_assert(offsetof(marrow_network_operation, token) == 8 &&
                offsetof(marrow_network_operation, remote) == 24 &&
                offsetof(marrow_network_operation, operand) + 8 ==
                    offsetof(marrow_network_operation, compare));
  const auto word = [](const void* p) {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(p));
  };
  Operation& op = queue->add(reader.index(), f.opcode(), -1);
  const std::uint32_t kind = kValue ? MARROW_NETWORK_PUT_VALUE : MARROW_NETWORK_PUT;
  const Pair who{std::bit_cast<std::uint64_t>(std::array{kind, peer}), queue->token_of_last()};
  // Networks look at `local` whatever the kind.
  const Pair where{kValue ? 0 : word(mine->local[thread_]), word(window->remote[peer])};
  const Pair nothing{};
  Outbox& box = *queue->outbox;
  most = static_cast<std::uint32_t>(std::min<std::uint64_t>(most, reader.until_end()));
  marrow_network_operation* const begin = box.room(most);
  marrow_network_operation* const last = begin + most;
  marrow_network_operation* o = begin;
  const std::uint64_t lap = reader.lap(), first = head | lap, second = like.chunk[1].high | lap;
  // The lines come from a cache that the GPU wrote to, one every 6 ns if they are asked for when they are read. So
  // they are asked for long before, into L2; but not while the GPU has yet to write them: its stores would
  // then wait for us.
  const std::uint64_t ahead = ring.deep ? RingReader::kAhead : 0;
  for (; o != last; ++o, ++d) {
    __builtin_prefetch(d + ahead, 0, 2);
    if ((RingReader::high(d->chunk[0]) ^ first) | (RingReader::high(d->chunk[1]) ^ second) |
        (RingReader::high(d->chunk[2]) ^ lap) | (RingReader::high(d->chunk[3]) ^ lap))
      break;
    const ProxyFields g(*d);
    const std::uint64_t bytes = kValue ? g.value_bytes() : g.bytes();
    const std::uint64_t offset = kValue ? g.value_offset() : g.offset();
    if (bytes - 1 >= largest || offset > end - bytes) break;
    if (!kValue && g.source_offset() > my_end - bytes) break;
    std::memcpy(&o->kind, &who, sizeof(who));
    std::memcpy(&o->local, &where, sizeof(where));
    o->local_offset = kValue ? 0 : g.source_offset();
    o->remote_offset = offset;
    o->bytes = bytes;
    std::memcpy(&o->operand, &nothing, sizeof(nothing));
    o->immediate = o->has_immediate = 0;
    if (kValue) {
      const Pair front{g.value(0), g.value(1)};
      const std::uint64_t last_word = g.value(2);
      std::memcpy(o->inline_data, &front, sizeof(front));
      std::memcpy(o->inline_data + sizeof(front), &last_word, sizeof(last_word));
    }
  }
  const auto n = static_cast<std::uint32_t>(o - begin);
  if (n == 0) {
    queue->undo_add();
    return 0;
  }
  reader.taken(n);
  op.count = n & 0xff;  // at most kRun
  op.network = n;
  op.window = f.window();
  if (!kValue) op.region = f.region();
  ring.outstanding += n;
  box.added(n);
  listed(box);
  return n;
}

inline void Engine::execute(Ring& ring, std::uint64_t index, const ProxyDescriptor& d) {
  const ProxyFields f(d);
  const std::uint32_t peer = f.peer();
  Queue* queue = peer < static_cast<std::uint32_t>(nranks_) ? ring.queues[peer].get() : nullptr;
  if (!queue) [[unlikely]] {
    queue = make_queue(ring, peer);
    if (!queue) return refuse_rank(ring, index, peer);
  }
  Operation& op = queue->add(index, f.opcode(), f.counter());
  if (f.opcode() == ProxyOpcode::put && f.region() >= kProxyStageRegions) [[unlikely]]
    name_stage_slot(*queue, op, f);
  Status status = failed_[peer] ? Status::peer_failed : Status::invalid;
  if (!failed_[peer] && op.counter < ring.counters)
    status = start({*queue, op, queue->token_of_last()}, f);
  if (status != Status::ok) [[unlikely]]
    refuse(*queue, op, d, status);
  // With nothing on the network it has ended.
  if (op.network == 0) [[unlikely]]
    finish_if_done(*queue, op);
  if (queue->sending->unseen() >= kAskAfter) [[unlikely]]
    ask(peer, queue->stream, *queue->sending);
}

void Engine::refuse_rank(Ring& ring, std::uint64_t index, std::uint32_t peer) {
  --ring.outstanding;
  report(-1, Code::internal,
         base::cat("descriptor ", index, " of context ", ring.context, " names rank ", peer,
                   ", which its ring does not serve"),
         "kernel memory is corrupt, or the kernel was built against other headers");
}

void Engine::refuse(Queue& queue, Operation& op, const ProxyDescriptor& descriptor, Status status) {
  op.fail(status);
  if (status == Status::peer_failed) report_down(static_cast<std::uint32_t>(queue.peer));
  const ProxyFields f(descriptor);
  if (f.is_fetch() && f.result_slot() < kProxyFetchSlots) name_result(op, f);
  if (op.counter >= queue.ring->counters) op.counter = -1;
  if (status != Status::invalid) return;
  const ProxyOperation d = proxy_decode(descriptor);
  report(d.peer, Code::invalid_argument,
         base::cat("a kernel's operation ", static_cast<int>(d.opcode), " to rank ", d.peer,
                   " on context ", queue.context, " was refused: window ", d.window, " offset ",
                   d.offset, ", region ", d.region, " offset ", d.source_offset, ", ", d.bytes,
                   " bytes, counter ", d.counter, d.has_add ? ", add to window " : "",
                   d.has_add ? base::cat(d.add_window, " offset ", d.add_offset) : ""),
         "compare with the windows' sizes; a MARROW_CHECKED kernel says file and line");
}

inline Status Engine::start(Handle on, ProxyFields f) {
  switch (f.opcode()) {
    case ProxyOpcode::put_value: return start_put<true>(on, f);
    case ProxyOpcode::put:
    case ProxyOpcode::add: return start_put<false>(on, f);
    case ProxyOpcode::get: return start_get(on, f);
    case ProxyOpcode::fetch_add:
    case ProxyOpcode::compare_swap: return start_fetch(on, f);
    case ProxyOpcode::flush_remote: start_flush(on); return Status::ok;
    case ProxyOpcode::none: break;
  }
  return Status::invalid;
}

/// A window with an aligned 64-bit word there that a CPU thread can add to, or null. Windows are
/// symmetric: what holds for ours holds for the peer's.
const Region* Engine::word_of(std::uint32_t id, std::uint64_t offset) {
  const Region* window = window_of(id, offset, 8);
  return window && window->block.host && offset % 8 == 0 ? window : nullptr;
}

/// Posts what moves bytes between a region of ours and the peer's window, in messages that the network
/// can take. @return false when a range is not inside: nothing was posted
inline bool Engine::move_pieces(Handle on, ProxyFields f, std::uint32_t kind) {
  const std::uint64_t bytes = f.bytes();
  const Region* mine = find(f.region());
  const Region* window = window_of(f.window(), f.offset(), bytes);
  if (!mine || !window || !mine->holds(f.source_offset(), bytes)) return false;
  if (!mine->local[thread_] || !window->remote[on.queue.peer]) [[unlikely]]
    return move_staged(on, f, kind, *mine, *window);
  if ((bytes - 1) / max_message_ >= kMaxUnseen) [[unlikely]]
    return false;
  on.op.region = f.region();
  on.op.window = f.window();
  std::uint64_t done = 0;
  do {
    marrow_network_operation& o = enqueue(on, kind);
    o.local = mine->local[thread_];
    o.remote = window->remote[on.queue.peer];
    o.local_offset = f.source_offset() + done;
    o.remote_offset = f.offset() + done;
    o.bytes = std::min(max_message_, bytes - done);
    if (kind == MARROW_NETWORK_PUT) number(on.queue, o);
    done += o.bytes;
  } while (done != bytes);
  return true;
}

inline bool Engine::put_inline(Handle on, ProxyFields f) {
  const Region* window = window_of(f.window(), f.value_offset(), f.value_bytes());
  if (!window || f.value_bytes() - 1 >= kProxyMaxInline) return false;
  on.op.window = f.window();
  if (!window->remote[on.queue.peer]) [[unlikely]] {
    send_staged_value(on, f);
    return true;
  }
  marrow_network_operation& o = enqueue(on, MARROW_NETWORK_PUT_VALUE);
  o.remote = window->remote[on.queue.peer];
  o.remote_offset = f.value_offset();
  o.bytes = f.value_bytes();
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t word = f.value(i);
    std::memcpy(o.inline_data + 8 * i, &word, 8);
  }
  number(on.queue, o);
  return true;
}

/// put, put_value, add
template <bool kValue>
Status Engine::start_put(Handle on, ProxyFields f) {
  if (f.has_add() && !word_of(f.add_window(), f.add_offset())) return Status::invalid;
  const std::uint32_t first_sequence = on.queue.sending->next;
  if (kValue) {
    if (!put_inline(on, f)) return Status::invalid;
  } else if (f.opcode() == ProxyOpcode::put && f.bytes() != 0) {
    if (!move_pieces(on, f, MARROW_NETWORK_PUT)) return Status::invalid;
  }
  if (f.has_add())
    send_add(on, f.add_window(), f.add_offset(), f.add_n(), f.strong(), first_sequence);
  return Status::ok;
}

inline void Engine::send_add(Handle on, std::uint32_t window, std::uint64_t offset, std::uint64_t n,
                             bool strong, std::uint32_t covers) {
  Message message{};
  message.kind = MessageKind::add;
  message.stream = static_cast<std::uint16_t>(on.queue.stream);
  message.window = window;
  message.offset = offset;
  message.operand = n;
  if (!ordered_) {
    message.flags = static_cast<std::uint8_t>(kSequenced | (strong ? kStrong : 0));
    message.covers = covers;
  }
  message.sequence = on.queue.sending->next++;
  write(enqueue(on, MARROW_NETWORK_MESSAGE), message);
}

Status Engine::start_get(Handle on, ProxyFields f) {
  if (f.bytes() == 0) return Status::ok;
  return move_pieces(on, f, MARROW_NETWORK_GET) ? Status::ok : Status::invalid;
}

Status Engine::start_fetch(Handle on, ProxyFields f) {
  if (f.result_slot() >= kProxyFetchSlots) return Status::invalid;
  if (!word_of(f.window(), f.fetch_offset())) return Status::invalid;
  Message message{};
  message.kind =
      f.opcode() == ProxyOpcode::fetch_add ? MessageKind::fetch_add : MessageKind::compare_swap;
  message.stream = static_cast<std::uint16_t>(on.queue.stream);
  message.window = f.window();
  message.offset = f.fetch_offset();
  message.operand = f.operand();
  message.compare = f.compare();
  message.token = on.token;
  if (!ordered_) {  // weak and covers nothing: done at once, and once only
    message.flags = kSequenced;
    message.sequence = message.covers = on.queue.sending->next++;
  }
  name_result(on.op, f);
  on.op.reply = true;
  write(enqueue(on, MARROW_NETWORK_MESSAGE), message);
  return Status::ok;
}

/// Whose wait the operation's end answers.
void Engine::name_result(Operation& op, ProxyFields f) {
  Extra& extra = extra_of(op);
  extra.result_slot = f.result_slot();
  extra.result_generation = f.generation();
}

/// Adds are done by the peer's thread, so it has to answer; without any under way the network can say
/// by itself that puts have landed, if it orders.
void Engine::start_flush(Handle on) {
  if (ordered_ && on.queue.sending->unseen() == 0) {
    enqueue(on, MARROW_NETWORK_FLUSH);
    return;
  }
  Message message{};
  message.kind = MessageKind::flush;
  message.stream = static_cast<std::uint16_t>(on.queue.stream);
  message.token = on.token;
  if (!ordered_) {
    message.flags = kSequenced | kStrong;
    message.sequence = on.queue.sending->next++;
  } else {
    message.sequence = on.queue.sending->next;
  }
  on.op.reply = true;
  write(enqueue(on, MARROW_NETWORK_MESSAGE), message);
}

void Engine::write(marrow_network_operation& o, const Message& message) {
  o.bytes = sizeof(message);
  std::memcpy(o.inline_data, &message, sizeof(message));
}

}  // namespace marrow::proxy
