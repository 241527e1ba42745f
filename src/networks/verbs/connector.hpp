// SPDX-License-Identifier: Apache-2.0
// Makes two queue pairs know each other, over a socket, when the first operation asks for it: one thread
// an endpoint, asleep in poll. The socket then stays open, since its end is how a dead process shows at
// once, long before a NIC's retries are over. The same thread waits for the device's asynchronous events.
//
// Both ranks of a pair may start at once: then the attempt of the lower rank stands, and the other
// gives its own up.
#pragma once

#include <poll.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "marrow/error.hpp"
#include "networks/verbs/device.hpp"
#include "networks/verbs/wire.hpp"

namespace marrow::networks::rdma {

/// What the connector calls, on its own thread. make and join throw Error.
class Connectable {
 public:
  /// Our end for a peer; made at the first call.
  virtual End make_end(std::uint32_t peer) = 0;
  /// The queue pair is to be connected with that end.
  virtual void join(std::uint32_t peer, const End& theirs) = 0;
  /// The peer can receive from now on.
  virtual void ready(std::uint32_t peer) = 0;
  virtual void failed(std::uint32_t peer, const Error& error) = 0;
  virtual void closed(std::uint32_t peer, bool on_purpose) = 0;
  virtual void device_event(const marrow::verbs::ibv_async_event& event) = 0;

 protected:
  ~Connectable() = default;
};

class Connector {
 public:
  /// Listens at once: on a Unix socket for ranks of this host, and on TCP if `reach_others`.
  /// @param near  address of the NIC's port to listen on; empty: as MARROW_SOCKET_IFNAME says
  Connector(Connectable& owner, std::uint32_t rank, const Options& options, bool reach_others,
            const std::string& near_ip);
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  /// How to reach us; the caller adds the port's address.
  const Address& address() const { return mine_; }
  /// Starts the thread. `patience` bounds each connection's set-up.
  void start(std::vector<Address> peers, std::shared_ptr<Device> device,
             std::chrono::milliseconds patience);
  /// Any thread: the peer is wanted. Its outcome is a call of ready or failed; once the thread has ended
  /// for want of something, failed is called from here.
  void want(std::uint32_t peer);
  /// Says goodbye to all and ends the thread. Idempotent.
  void stop();

 private:
  enum class Stage : std::uint8_t {
    pauses,  ///< no descriptor; to be dialled again
    connecting,
    awaits_answer,
    awaits_hello,
    awaits_ready,
    open
  };
  struct Line {
    base::Fd fd;
    Stage stage;
    std::int64_t peer = -1;  ///< -1: not said yet
    bool ours = false;       ///< we connected
    std::size_t tries = 0;   ///< addresses of the peer tried so far
    base::Deadline deadline;
    base::Deadline again;  ///< of pauses: when
    std::vector<std::byte> received;
    bool goodbye = false;
    bool dead = false;
  };
  /// What is between us and a peer.
  enum class Tie : std::uint8_t { none, starting, waits_for_theirs, joined, standing, over };

  void run();
  void step(std::vector<pollfd>& polled);
  void ended(const char* why);
  bool listens();
  template <typename Work>
  bool guard(const std::int64_t& peer, const Work& work);
  void begin(std::uint32_t peer);
  void dial(std::uint32_t peer, std::size_t tries, base::Deadline deadline);
  void accept(int listener);
  void advance(Line& line, short events);
  void connected(Line& line);
  void read(Line& line);
  void consume(Line& line);
  void on_hello(Line& line, const Frame& frame);
  void on_answer(Line& line, const Frame& frame);
  void refuse(Line& line, const Frame& hello, Refusal why, const std::string& text);
  void settle(Line& line);
  void lost(Line& line);
  void give_up(std::uint32_t peer, const Error& error);
  void expire();
  void dial_again();
  void read_device_events();
  bool send(Line& line, const void* data, std::size_t bytes);
  bool valid(const Frame& frame, std::uint32_t magic, std::uint32_t keyed_by) const;
  Frame frame_to(std::uint32_t peer, std::uint32_t magic, std::uint32_t keyed_by, const End& end,
                 Refusal refused, const std::string& why) const;
  std::string where(std::uint32_t peer, std::size_t tries) const;
  void wake();

  Connectable& owner_;
  const std::uint32_t rank_;
  const Options& options_;
  Address mine_{};
  base::Fd unix_;
  base::Fd tcp_;
  base::Fd wake_;
  std::vector<Address> peers_;
  std::shared_ptr<Device> device_;
  std::chrono::milliseconds patience_{0};

  std::mutex mutex_;  ///< wanted_, over_
  std::vector<std::uint32_t> wanted_;
  std::string over_;  ///< why the thread has ended before stop()
  std::atomic<bool> stop_{false};

  // The thread's own.
  std::vector<Tie> ties_;
  std::map<std::uint32_t, base::Deadline> theirs_due_;  ///< of waits_for_theirs
  std::deque<std::unique_ptr<Line>> lines_;
  base::Deadline accept_again_;  ///< after a failure
  bool accept_failed_ = false;   ///< said once
  std::thread thread_;
};

}  // namespace marrow::networks::rdma
