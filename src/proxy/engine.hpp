// SPDX-License-Identifier: Apache-2.0
// One progress thread: drains the rings whose peers it serves, checks what the descriptors name, posts
// to its network, completes out of order and publishes in order, and acts on its peers' messages.
// step() never blocks and takes a lock only when the board changed.
//
// Work to peer p runs on thread p mod threads at both ends, so the network's endpoints pair up and all
// adds to one rank's words are done by one of its threads.
//
// A descriptor has about 10 ns here (docs/proxy-performance.md): a pass copies a batch of them out of the
// ring, gives the slots back, then posts the batch with one call a peer; what is published to kernels is
// stored once a pass.
#pragma once

#include <array>
#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "marrow/device/platform.cuh"
#include "proxy/board.hpp"
#include "proxy/device_rings.hpp"
#include "proxy/message.hpp"
#include "proxy/networks.hpp"
#include "proxy/operation_queue.hpp"
#include "proxy/ring_reader.hpp"
#include "proxy/stage_table.hpp"
#include "proxy/transport.hpp"

// What every descriptor runs through is one function: as calls they would cost more than they do.
#define MARROW_HOT [[gnu::always_inline]] inline

namespace marrow::proxy {

struct DeviceState;

/// This thread's ring of one context.
struct Ring {
  Ring(DeviceState& of, RingReader from, int number, int counted)
      : device(of), reader(from), context(number), counters(counted), told(from.index()) {}

  DeviceState& device;
  RingReader reader;
  int context;
  int counters;                   ///< of the device communicator
  bool deep = false;              ///< in this pass: far more wait than it takes
  std::uint64_t told = 0;         ///< index up to which producers know that slots are free
  std::uint64_t outstanding = 0;  ///< operations drained and not complete
  std::vector<std::unique_ptr<Queue>> queues;  ///< [nranks], made on first use
  // Staging slots of kernels.
  std::uint64_t stage_tail = 0;  ///< all taken before it are free again
  std::vector<char> stage_done;  ///< [slots] free, but not yet said
};

struct DeviceState {
  std::shared_ptr<DeviceRings> rings;
  std::vector<std::unique_ptr<Ring>> contexts;
  bool removed = false;
};

class Engine {
 public:
  Engine(int thread, int threads, int rank, int nranks, Board& board, const Hooks& hooks);

  /// The network calls these; `user` is the engine.
  marrow_network_events events();
  /// Before the first step. The link outlives the engine's steps.
  void use(Link& link);

  /// One pass over everything. Whether anything happened.
  bool step();

 private:
  static constexpr std::uint32_t kBatch =
      128;  ///< descriptors of one ring before others get their turn
  /// Descriptors that one Operation stands for, at most, and how large each may be: the first is not complete
  /// before the last is.
  static constexpr std::uint32_t kRun = 32;
  static constexpr std::uint64_t kSmall = 4096;
  static constexpr std::size_t kFound = 64;

  /// An operation, its queue and what completions of its network operations carry.
  struct Handle {
    Queue& queue;
    Operation& op;
    std::uint64_t token;
  };

  // engine.cpp: the board, completion, the network
  bool refresh();
  void see(std::shared_ptr<const View> view);
  void attach(const std::shared_ptr<DeviceRings>& rings);
  void settle();
  bool settle(DeviceState& device);
  void detach(DeviceState& device);
  void drop_queued(const DeviceState& device);
  void fail_operations(int peer);
  const Region* find(std::uint32_t id) {
    const Found& last = found_[id % kFound];
    return last.id == id ? last.region : find_anew(id);
  }
  [[gnu::noinline]] const Region* find_anew(std::uint32_t id);
  [[gnu::cold]] Queue* make_queue(Ring& ring, std::uint32_t peer);
  Queue* queue_of(std::uint64_t token) {
    const std::uint64_t id = token >> Queue::kNumberBits;
    return id < queues_.size() ? queues_[id] : nullptr;
  }
  [[gnu::noinline]] Extra& extra_of(Operation& op);
  void finish_if_done(Queue& queue, Operation& op) {
    if (op.network != 0 || op.reply) return;
    if ((op.extra & static_cast<std::uint32_t>(op.counter)) != kNone || op.status != 0)
      say_result(queue, op);
    op.done = true;
    queue.ring->outstanding -= op.count;
    if (queue.listed) return;
    queue.listed = true;
    to_publish_.push_back(&queue);
  }
  [[gnu::noinline]] void say_result(Queue& queue, Operation& op);
  void say_fetched(const Queue& queue, const Extra& extra, const Operation& op);
  void publish();
  bool reap();
  [[gnu::cold]] void fail(const Queue& queue, Operation& op, int with);
  bool push();
  Outbox& listed(Outbox& box) {
    if (!box.listed) {
      box.listed = true;
      to_push_.push_back(&box);
    }
    return box;
  }
  /// A network operation of that one, to be filled in; goes out with this pass's push.
  marrow_network_operation& enqueue(Handle of, std::uint32_t kind) {
    ++of.op.network;
    return listed(*of.queue.outbox).add(kind, of.token);
  }
  void report(int peer, Code code, const std::string& sentence, const std::string& next_step = {});

  // engine_execute.cpp: descriptors
  bool drain();
  bool drain_ring(Ring& ring);
  MARROW_HOT bool must_wait(Ring& ring, ProxyFields f);
  template <bool kValue>
  std::uint32_t drain_run(Ring& ring, std::uint64_t head, std::uint32_t most);
  MARROW_HOT void execute(Ring& ring, std::uint64_t index, const ProxyDescriptor& d);
  [[gnu::cold]] void refuse_rank(Ring& ring, std::uint64_t index, std::uint32_t peer);
  [[gnu::cold]] void refuse(Queue& queue, Operation& op, const ProxyDescriptor& d, Status status);
  MARROW_HOT Status start(Handle on, ProxyFields f);
  MARROW_HOT bool move_pieces(Handle on, ProxyFields f, std::uint32_t kind);
  MARROW_HOT bool put_inline(Handle on, ProxyFields f);
  template <bool kValue>
  MARROW_HOT Status start_put(Handle on, ProxyFields f);
  [[gnu::noinline]] Status start_get(Handle on, ProxyFields f);
  [[gnu::noinline]] Status start_fetch(Handle on, ProxyFields f);
  void name_result(Operation& op, ProxyFields f);
  [[gnu::noinline]] void name_stage_slot(Queue& queue, Operation& op, ProxyFields f);
  [[gnu::noinline]] void start_flush(Handle on);
  void number(Queue& queue, marrow_network_operation& o) {
    if (ordered_) return;
    o.has_immediate = 1;
    o.immediate = make_immediate(queue.stream, queue.sending->next++);
  }
  MARROW_HOT void send_add(Handle on, std::uint32_t window, std::uint64_t offset, std::uint64_t n,
                           bool strong, std::uint32_t covers);
  static void write(marrow_network_operation& o, const Message& message);
  /// A window that holds the range, or null.
  const Region* window_of(std::uint32_t id, std::uint64_t offset, std::uint64_t bytes) {
    const Region* window = find(id);
    return window && window->window && window->holds(offset, bytes) ? window : nullptr;
  }
  const Region* word_of(std::uint32_t id, std::uint64_t offset);

  // engine_receive.cpp: messages and the ends of streams
  void on_message(std::uint32_t peer, const void* data, std::uint32_t bytes);
  void on_immediate(std::uint32_t peer, std::uint32_t immediate);
  void on_peer_down(std::uint32_t peer, const char* sentence);
  void say_late_downs();
  void report_down(std::uint32_t peer);
  void act(std::uint32_t peer, const Message& message);
  void answer(std::uint32_t peer, const Message& to, std::uint64_t value, Status status);
  void act_now(std::uint32_t peer, const Message& message);
  /// A message that is part of no operation, behind all operations to that peer; or past them.
  void send(std::uint32_t peer, const Message& message) {
    write(listed(outboxes_[peer]).add(MARROW_NETWORK_MESSAGE, 0), message);
  }
  void send_at_once(std::uint32_t peer, const Message& message, std::uint64_t token = 0) {
    write(listed(urgent_[peer]).add(MARROW_NETWORK_MESSAGE, token), message);
  }
  Receiving& receiving(std::uint32_t peer, std::uint32_t stream);
  Sending& sending(std::uint32_t peer, std::uint32_t stream);
  [[gnu::cold]] void ask(std::uint32_t peer, std::uint32_t stream, Sending& sending);
  bool all_seen(const DeviceState& device);
  void forget_unseen(std::uint32_t peer);
  bool skip_instead(marrow_network_operation& dropped);

  // engine_stage.cpp: memory that the network cannot reach
  void see_staging();
  [[gnu::noinline]] bool move_staged(Handle on, ProxyFields f, std::uint32_t kind,
                                     const Region& mine, const Region& window);
  [[gnu::noinline]] void send_staged_value(Handle on, ProxyFields f);
  std::uint64_t staged_sequences(ProxyFields f) const;
  bool move_stage();
  void assign_slots(std::uint32_t peer);
  void ask_for(Piece& piece, std::uint32_t id);
  void fetch_piece(Piece& piece, std::uint32_t id);
  bool copied(const Piece& piece);
  std::uint32_t ready_prefix(Outbox& box);
  bool piece_completed(std::uint64_t token, std::uint32_t count, int failure);
  void advance(std::uint32_t id, int failure);
  void end_part(Piece& piece, int failure);
  void on_credit(std::uint32_t peer, const Message& message);
  bool on_piece_reply(std::uint32_t peer, const Message& message);
  void on_staged(std::uint32_t peer, const Message& message);
  void give_credit(std::uint32_t peer, const Message& of, Status status);
  bool drop_from(Outbox& box, const marrow_network_operation& o);
  Operation* operation_of(std::uint64_t token, Queue** queue);
  void drop_waiting(const DeviceState& device);
  void fail_pieces(std::uint32_t peer);
  bool stage_uses_gone_memory();
  void free_stage_slot(Ring& ring, std::uint32_t slot);
  bool free_unused_slots();
  bool say_free(Ring& ring);

  const int thread_;
  const int threads_;
  const int rank_;
  const int nranks_;
  Board& board_;
  const Hooks& hooks_;
  Link* link_ = nullptr;
  bool ordered_ = true;            ///< of the link's properties
  std::uint64_t max_message_ = 0;  ///< likewise
  std::shared_ptr<const View> view_;
  struct Found {
    std::uint32_t id = kNone;
    const Region* region = nullptr;
  };
  std::array<Found, kFound> found_;  ///< regions of view_ that were named lately
  std::vector<char> failed_;         ///< [nranks] as acted upon
  std::vector<std::string> down_;    ///< [nranks] what the network said, until it is reported
  /// What a network said inside post(), where no callback may be: acted upon after it.
  std::vector<std::pair<std::uint32_t, std::string>> late_downs_;
  bool posting_ = false;
  std::uint64_t seen_ = 0;  ///< version of the board acted upon
  bool settled_ = true;     ///< that version is acknowledged
  std::vector<std::unique_ptr<DeviceState>> devices_;
  std::vector<Queue*> queues_{nullptr};         ///< by id; null: free
  std::vector<std::uint64_t> next_numbers_{0};  ///< by id, of free ones
  std::vector<std::uint64_t> free_ids_;
  std::vector<Extra> extras_;
  std::vector<std::uint32_t> free_extras_;
  std::vector<Queue*> to_publish_;  ///< queues with operations that ended in this pass
  std::vector<Outbox> outboxes_;    ///< [nranks]
  /// [nranks] Answers and credits, which pass what is held in outboxes_: those wait for the peer's.
  std::vector<Outbox> urgent_;
  std::vector<Outbox*> to_push_;      ///< those that are not empty
  const Staging* staging_ = nullptr;  ///< of view_
  CopyEngine* out_ = nullptr;         ///< of staging_, this thread's
  CopyEngine* in_ = nullptr;          ///< likewise
  StageTable stage_;
  std::exception_ptr broken_;  ///< a copy into our memory did not start: nothing may follow it
  /// Ends of streams, made on first use and kept. [stream << 32 | peer]
  std::unordered_map<std::uint64_t, Sending> sending_;
  std::unordered_map<std::uint64_t, Receiving> receiving_;
  std::unordered_map<std::uint32_t, std::uint32_t> first_sequences_;  ///< by DeviceRings::number
};

}  // namespace marrow::proxy
