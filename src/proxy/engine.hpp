// SPDX-License-Identifier: Apache-2.0
// One progress thread: drains the rings whose peers it serves, checks what the descriptors name, posts
// to its network, completes out of order and publishes in order, and acts on its peers' messages.
// step() never blocks and takes a lock only when the board changed.
//
// Work to peer p runs on thread p mod threads at both ends, so the network's endpoints pair up and all
// adds to one rank's words are done by one of its threads.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "marrow/device/status.cuh"
#include "proxy/board.hpp"
#include "proxy/device_rings.hpp"
#include "proxy/message.hpp"
#include "proxy/networks.hpp"
#include "proxy/ring_reader.hpp"
#include "proxy/transport.hpp"

namespace marrow::proxy {

class Engine {
 public:
  Engine(int thread, int threads, int rank, int nranks, Board& board, const Hooks& hooks);

  /// The network calls these; `user` is the engine.
  marrow_network_events events();
  /// Before the first step. The link outlives the engine's steps.
  void use(Link& link) { link_ = &link; }

  /// One pass over everything. Whether anything happened.
  bool step();

 private:
  static constexpr std::uint32_t kNoRegion = ~0u;

  /// Operations of one (device, context, peer), in ring order.
  struct Queue {
    struct Entry {
      std::uint64_t index;
      bool done;
    };
    int context = 0;
    int peer = 0;
    ProxyCompletion* completion = nullptr;
    std::deque<Entry> open;          ///< from the oldest incomplete one on
    std::uint64_t first_number = 0;  ///< number of open.front()
    Sending* sending = nullptr;
    std::uint32_t stream = 0;
  };
  struct DeviceState {
    std::shared_ptr<DeviceRings> rings;
    std::vector<RingReader> readers;             ///< [contexts]
    std::vector<std::uint64_t> outstanding;      ///< [contexts] operations drained and not complete
    std::vector<std::unique_ptr<Queue>> queues;  ///< [contexts * nranks], made on first use
    bool removed = false;
    std::uint64_t active = 0;  ///< operations of any context under way
  };
  /// A descriptor under way.
  struct Operation {
    std::uint32_t generation = 1;
    bool active = false;
    bool reply = false;         ///< an answer is awaited
    std::uint32_t network = 0;  ///< network operations queued or posted
    DeviceState* device = nullptr;
    Queue* queue = nullptr;
    std::uint64_t number = 0;
    Status status = Status::ok;
    ProxyOpcode opcode = ProxyOpcode::none;
    std::int32_t counter = -1;
    std::uint32_t region = kNoRegion;
    std::uint32_t result_slot = 0;
    std::uint32_t result_generation = 0;
    std::uint64_t old_value = 0;
  };
  struct Outbox {
    std::vector<marrow_network_operation> operations;
    std::size_t head = 0;
    bool listed = false;
  };

  // engine.cpp: the board, completion, the network
  bool refresh();
  void attach(const std::shared_ptr<DeviceRings>& rings);
  void settle();
  void drop_queued(const DeviceState& device);
  void fail_operations(int peer);
  const Region* find(std::uint32_t id);
  std::uint32_t begin(DeviceState& device, int context, std::uint64_t index,
                      const ProxyOperation& d);
  void finish_if_done(std::uint32_t slot);
  void publish(Queue& queue);
  Operation* of_token(std::uint64_t token);
  std::uint64_t token_of(std::uint32_t slot) const {
    return static_cast<std::uint64_t>(operations_[slot].generation) << 32 | slot;
  }
  bool reap();
  void complete(const marrow_network_completion& completion);
  bool push();
  marrow_network_operation& enqueue(std::uint32_t peer, std::uint32_t kind, std::uint32_t slot);
  void report(int peer, Code code, const std::string& sentence, const std::string& next_step = {});

  // engine_execute.cpp: descriptors
  bool drain();
  bool drain_ring(DeviceState& device, int context);
  void execute(DeviceState& device, int context, std::uint64_t index, const ProxyOperation& d);
  Status start(std::uint32_t slot, Queue& queue, const ProxyOperation& d);
  template <class Each>
  bool move_pieces(std::uint32_t slot, const ProxyOperation& d, std::uint32_t kind, Each&& each);
  Status start_put(std::uint32_t slot, Queue& queue, const ProxyOperation& d);
  Status start_get(std::uint32_t slot, Queue& queue, const ProxyOperation& d);
  Status start_fetch(std::uint32_t slot, Queue& queue, const ProxyOperation& d);
  void start_flush(std::uint32_t slot, Queue& queue);
  Status start_add(std::uint32_t slot, Queue& queue, const ProxyOperation& d, std::uint32_t covers);
  void send(std::uint32_t peer, const Message& message, std::uint32_t slot);
  const Region* window_of(std::uint32_t id, std::uint64_t offset, std::uint64_t bytes);
  const Region* word_of(std::uint32_t id, std::uint64_t offset);

  // engine_receive.cpp: messages and the ends of streams
  void on_message(std::uint32_t peer, const void* data, std::uint32_t bytes);
  void on_immediate(std::uint32_t peer, std::uint32_t immediate);
  void on_peer_down(std::uint32_t peer, const char* sentence);
  void report_down(std::uint32_t peer);
  void act(std::uint32_t peer, const Message& message);
  void answer(std::uint32_t peer, const Message& to, std::uint64_t value, Status status);
  Receiving& receiving(std::uint32_t peer, std::uint32_t stream);
  Sending& sending(std::uint32_t peer, std::uint32_t stream);
  void ask(std::uint32_t peer, std::uint32_t stream, Sending& sending);
  bool all_seen(const DeviceState& device);
  void forget_unseen(std::uint32_t peer);
  bool skip_instead(marrow_network_operation& dropped);

  const int thread_;
  const int threads_;
  const int rank_;
  const int nranks_;
  Board& board_;
  const Hooks& hooks_;
  Link* link_ = nullptr;
  std::shared_ptr<const View> view_;
  std::vector<char> failed_;       ///< [nranks] as acted upon
  std::vector<std::string> down_;  ///< [nranks] what the network said, until it is reported
  std::uint64_t seen_ = 0;         ///< version of the board acted upon
  bool settled_ = true;            ///< that version is acknowledged
  std::vector<std::unique_ptr<DeviceState>> devices_;
  std::vector<Operation> operations_;
  std::vector<std::uint32_t> free_;
  std::vector<Outbox> outboxes_;        ///< [nranks]
  std::vector<std::uint32_t> to_push_;  ///< peers whose outbox is not empty
  /// Ends of streams, made on first use and kept. [stream << 32 | peer]
  std::unordered_map<std::uint64_t, Sending> sending_;
  std::unordered_map<std::uint64_t, Receiving> receiving_;
  std::unordered_map<std::uint32_t, std::uint32_t> first_sequences_;  ///< by DeviceRings::number
  std::vector<std::pair<std::uint32_t, Sending*>>
      full_;  ///< {peer, end}: the peer is too far behind
};

}  // namespace marrow::proxy
