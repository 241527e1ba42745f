// SPDX-License-Identifier: Apache-2.0
// An endpoint of the verbs network: reliable connections (RC) to the peers that somebody posted to.
//
// A put is a WRITE, a get a READ, adds are FETCH_ADD, compare_swap is CMP_SWAP, a message is a SEND of at
// most 64 bytes, a flush is a READ (an acknowledgement alone does not say that data is placed). All of one
// post() go out as one chain with one doorbell, and only the last of a chain asks for a completion: a
// queue pair completes in order.
//
// A message takes a receive at the peer, which may be out of them. So its sender counts: it may send as
// many as the peer has posted, and the peer writes into the sender's memory how many it has posted
// again. That WRITE takes no receive itself, so neither side can wait for ever for the other.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "networks/verbs/connector.hpp"
#include "networks/verbs/queue_pair.hpp"

namespace marrow::networks::rdma {

struct Region {
  marrow::verbs::ibv_mr* region = nullptr;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  bool gpu = false;
};

struct RemoteRegion {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint32_t rkey = 0;
  std::uint32_t peer = 0;  ///< whose memory it is
  bool gpu = false;
};

class Endpoint final : private Connectable {
 public:
  Endpoint(const Options& options, std::uint32_t rank, std::uint32_t nranks,
           const marrow_network_events& events);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  marrow_network_address address() const;
  /// @throws Error  version, mismatch, unsupported: that peer cannot be reached; timeout
  void connect(const marrow_network_address* addresses, std::chrono::milliseconds timeout);

  // Any thread.
  std::unique_ptr<Region> register_memory(const marrow_network_memory& memory, void* key,
                                          std::uint32_t* key_bytes);
  void deregister_memory(Region& region);
  std::unique_ptr<RemoteRegion> import_key(std::uint32_t peer, const void* key,
                                           std::uint32_t key_bytes) const;
  void release_key(const RemoteRegion& remote);
  void abort(std::uint32_t peer);

  // The progress thread.
  std::uint32_t post(const marrow_network_operation* operations, std::uint32_t n);
  std::uint32_t progress();
  std::uint32_t test(marrow_network_completion* completions, std::uint32_t n);

 private:
  static constexpr std::uint32_t kChain = 64;  ///< work requests of one doorbell

  static constexpr std::uint32_t kMostRequests = 3;  ///< of one operation

  /// A send under way.
  struct Slot {
    std::uint64_t token = 0;
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;
    std::uint32_t kind = 0;  ///< of the operation; 0: receives given back
    bool completes = false;  ///< its completion is the operation's
  };
  enum class Stage : std::uint8_t { idle, connecting, joined, ready, broken };
  struct Peer {
    Stage stage = Stage::idle;
    std::unique_ptr<QueuePair> queue;
    std::vector<Slot> slots;
    std::uint32_t posted = 0;
    std::uint32_t completed = 0;
    std::uint64_t messages = 0;            ///< sent: each took a receive of the peer
    std::uint64_t received = 0;            ///< and posted again
    std::uint64_t returned = 0;            ///< of these, told to the peer
    std::vector<const RemoteRegion*> gpu;  ///< GPU memory written since the last flush; gpu_mutex_
    bool gpu_written = false;              ///< something was put there: no need to lock for a look
    bool may_send = false;                 ///< said before the queue pair was here
    bool owes = false;                     ///< in owing_
    bool aborted_here = false;
    std::string end;                  ///< why it is in closing_
    base::Deadline closing_by;        ///< when it is told of, whatever still comes
    std::uint64_t seen = 0;           ///< completions of it
    std::uint64_t seen_before = 0;    ///< of these, when closing_ was last looked at
    std::optional<std::string> down;  ///< to be said in progress()
    base::Deadline drained_by;
    std::atomic<bool> aborted{false};
  };
  /// From the connector's thread.
  struct News {
    enum Kind : std::uint8_t { joined, ready, failed, closed, device } kind;
    std::uint32_t peer = 0;
    std::unique_ptr<QueuePair> queue;
    marrow::verbs::ibv_cq* cq = nullptr;
    bool on_purpose = false;
    std::string sentence;
    marrow::verbs::ibv_async_event event{};
  };

  // Connectable: endpoint.cpp
  End make_end(std::uint32_t peer) override;
  void join(std::uint32_t peer, const End& theirs) override;
  void ready(std::uint32_t peer) override;
  void failed(std::uint32_t peer, const Error& error) override;
  void closed(std::uint32_t peer, bool on_purpose) override;
  void device_event(const marrow::verbs::ibv_async_event& event) override;
  marrow::verbs::ibv_cq* cq_for_one_more(std::uint32_t peer);
  void tell(News news);
  void check(const Address& theirs, std::uint32_t r, std::uint32_t bytes) const;
  void wait_for_all(base::Deadline deadline);

  // endpoint_post.cpp
  const char* wrong(const Peer& peer, const marrow_network_operation& o) const;
  bool fits(Peer& peer, const marrow_network_operation& o, std::uint32_t chained);
  void fill(Peer& peer, const marrow_network_operation& o);
  void fill_read(Peer& peer, std::uint64_t from, std::uint32_t rkey, const Slot& slot);
  void wrote_gpu(Peer& peer, const RemoteRegion& remote);
  bool fill_gpu_read(Peer& peer, const Slot& slot);
  void fill_flush(Peer& peer, const marrow_network_operation& o);
  marrow::verbs::ibv_send_wr& next(Peer& peer, int opcode, const Slot& slot);
  void payload(Peer& peer, marrow::verbs::ibv_send_wr& request, const void* data,
               std::uint32_t bytes);
  void submit(Peer& peer);
  void give_back(Peer& peer);
  void complete(std::uint64_t token, std::uint32_t peer, int status, std::uint64_t value = 0);

  // endpoint_progress.cpp
  void take_news();
  void on_device_event(const marrow::verbs::ibv_async_event& event);
  void poll(marrow::verbs::ibv_cq* cq);
  void on_send(Peer& peer, const marrow::verbs::ibv_wc& wc);
  void on_receive(Peer& peer, const marrow::verbs::ibv_wc& wc);
  void finish(Peer& peer, std::uint32_t upto, int status);
  void fail(std::uint32_t peer, std::string sentence, bool answers = true);
  void look_after_closing();
  void look_after_failed();
  std::string failure_of(std::uint32_t peer, const Slot* slot,
                         const marrow::verbs::ibv_wc& wc) const;

  const Options options_;
  const std::uint32_t rank_;
  const std::uint32_t nranks_;
  const marrow_network_events events_;
  std::shared_ptr<Device> device_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<marrow::verbs::ibv_cq*> polled_;  ///< the progress thread's copy of cqs_
  std::deque<marrow_network_completion> completions_;
  std::vector<std::uint32_t> owing_;    ///< peers with receives to give back and no room for it
  std::vector<std::uint32_t> closing_;  ///< whose last messages may still be in a queue
  std::vector<std::uint32_t> failing_;  ///< with something to say, or operations not flushed yet
  std::uint32_t called_ = 0;
  bool cut_short_ = false;  ///< a queue had more than one pass takes

  // The chain that is put together.
  std::vector<marrow::verbs::ibv_send_wr> requests_;
  std::vector<marrow::verbs::ibv_sge> buffers_;
  std::uint32_t chained_ = 0;

  std::mutex gpu_mutex_;  ///< Peer::gpu: a window may be closed by another thread

  std::mutex mutex_;  ///< news_
  std::vector<News> news_;
  std::atomic<bool> has_news_{false};

  // The connector's thread.
  std::vector<std::unique_ptr<QueuePair>> making_;  ///< [nranks]
  std::vector<marrow::verbs::ibv_cq*> cqs_;
  std::vector<marrow::verbs::ibv_cq*> cq_of_;  ///< [nranks]
  std::uint32_t room_ = 0;                     ///< queue pairs that the last of cqs_ still takes
  std::uint32_t next_room_ = 8;

  std::unique_ptr<Connector> connector_;  ///< last: its thread uses what stands above
};

}  // namespace marrow::networks::rdma
