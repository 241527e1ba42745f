// SPDX-License-Identifier: Apache-2.0
// The service thread: one poll over listeners, connections and dials, then timers. Idle it wakes twice
// a second for the heartbeat.
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/unix_fds.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

using base::cat;

namespace {

constexpr std::size_t kMaxStrangers = 256;  // connections that have not said who they are
constexpr int kMaxStrangerWarnings = 100;
constexpr milliseconds kDescriptorPause{100};
constexpr milliseconds kRedialPause{20};

}  // namespace

void Bootstrap::Service::run() {
  const base::log::ThreadRank named(rank_);
  std::unique_lock lock(mutex_);
  next_heartbeat_ = Clock::now() + heartbeat_every_;
  if (am_root_) {
    missing_dirty_ = true;
    if (nranks_ == 1 && !gave_up_) setup_complete();
  } else if (options_.replacement) {
    dial_next_survivor(-1);
  } else {
    start_dial(0, false);
  }
  bool leaving = false;
  for (;;) {
    if (gave_up_ && broken_ && !stop_) {
      stop_ = true;
      stop_by_ = Clock::now() + milliseconds(500);
    }
    if (stop_ && !leaving) {
      leaving = true;
      dials_.clear();
      Writer leave;
      leave.number(static_cast<std::uint32_t>(broken_ ? broken_->code() : Code::ok));
      leave.text(leave_sentence_);
      for (Connection& connection : connections_) {
        bool tell = connection.kind == Connection::Kind::member ||
                    (connection.kind == Connection::Kind::root && connection.join_sent);
        if (tell && phase_ != Phase::closing && phase_ != Phase::ended) {
          connection.channel.send(FrameType::leave, leave.view());
        }
        if (connection.kind == Connection::Kind::incoming && !connection.channel.established() &&
            !connection.channel.probe()) {
          warn_stranger(connection.channel.where(), "never said who it is");
        }
        connection.kind = Connection::Kind::draining;
        connection.drop = !connection.channel.wants_write();
      }
      sweep();
    }
    if (leaving && (connections_.empty() || Clock::now() >= stop_by_)) break;
    poll_once(lock);
    if (!leaving) timers();
    sweep();
    run_callbacks(lock);
  }
  connections_.clear();
  if (phase_ == Phase::joining || phase_ == Phase::refusing) remove_rendezvous_file();
  phase_ = Phase::ended;
  close_listener(true);
  changed_.notify_all();
}

void Bootstrap::Service::close_listener(bool unix_too) {
  tcp_guard_.release();
  listener_.tcp.reset();
  if (!unix_too) return;
  unix_guard_.release();
  listener_.unix_socket.reset();
}

void Bootstrap::Service::poll_once(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> polled;
  Clock::time_point before = Clock::now();
  // A process that was stopped, or a machine that slept, has not heard its peers for reasons of its
  // own: their silence counts from now.
  auto forgive = [this](Clock::time_point now) {
    for (Connection& connection : connections_) connection.last_heard = now;
    failover_since_ = now;
  };
  if (before - last_awake_ > slow_after_ && last_awake_ != Clock::time_point{}) forgive(before);
  polled.push_back({wake_fd_.get(), POLLIN, 0});
  bool accepting = !stop_ && before >= accept_again_;
  polled.push_back({accepting ? listener_.tcp.get() : -1, POLLIN, 0});
  polled.push_back({accepting ? listener_.unix_socket.get() : -1, POLLIN, 0});
  std::vector<Connection*> order;
  for (Connection& connection : connections_) {
    short events = connection.channel.wants_write() ? POLLIN | POLLOUT : POLLIN;
    polled.push_back({connection.channel.fd(), events, 0});
    order.push_back(&connection);
  }
  std::vector<Dial*> dialled;
  for (Dial& dial : dials_) {
    polled.push_back({dial.fd.get(), POLLOUT, 0});  // -1 is skipped by poll
    dialled.push_back(&dial);
  }
  Clock::time_point until = next_timer();
  int timeout = base::Deadline::at(until).poll_timeout();
  lock.unlock();
  ::poll(polled.data(), polled.size(), timeout);
  lock.lock();
  Clock::time_point after = Clock::now();
  if (after - std::max(until, before) > slow_after_) forgive(after);
  last_awake_ = after;

  if (polled[0].revents != 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] ssize_t ignored = ::read(wake_fd_.get(), &count, sizeof(count));
  }
  // Elements are only added and marked here, never removed: the pointers stay good.
  for (std::size_t i = 0; i < order.size(); ++i) {
    short events = polled[3 + i].revents;
    if (!order[i]->drop) serve(*order[i], events);
  }
  for (std::size_t i = 0; i < dialled.size(); ++i) {
    Dial& dial = *dialled[i];
    if (polled[3 + order.size() + i].revents == 0 || dial.done || !dial.fd) continue;
    int error = connect_error(dial.fd.get());
    if (error == 0) {
      on_connected(dial);
    } else {
      note_dial_error(dial, error);
      try_next(dial);
    }
  }
  if (polled[1].revents != 0) accept_from(listener_.tcp.get());
  if (polled[2].revents != 0) accept_from(listener_.unix_socket.get());
}

void Bootstrap::Service::accept_from(int listener) {
  bool local = listener == listener_.unix_socket.get();
  for (int i = 0; i < 64; ++i) {
    base::Fd fd;
    try {
      fd = accept_one(listener);
    } catch (const Error& error) {
      MARROW_WARN(bootstrap, error.what());
      accept_again_ = Clock::now() + kDescriptorPause;
      return;
    }
    if (!fd) return;
    std::string where = peer_text(fd.get());
    if (local) {
      try {
        base::check_peer_user(fd.get());
      } catch (const Error& error) {
        warn_stranger(where, error.sentence());
        continue;
      }
    }
    std::size_t strangers = 0;
    Connection* oldest = nullptr;
    for (Connection& connection : connections_) {
      if (connection.kind != Connection::Kind::incoming || connection.drop) continue;
      ++strangers;
      if (oldest == nullptr || connection.opened < oldest->opened) oldest = &connection;
    }
    if (strangers >= kMaxStrangers + static_cast<std::size_t>(nranks_)) {
      warn_stranger(oldest->channel.where(), "made room for newer connections");
      oldest->drop = true;
    }
    Clock::time_point now = Clock::now();
    connections_.push_back({Channel(std::move(fd), where, Channel::Role::server, id_.credentials),
                            Connection::Kind::incoming, -1, now, now});
  }
}

void Bootstrap::Service::serve(Connection& connection, short events) {
  if (connection.channel.wants_write() && !connection.channel.write_some()) {
    // Fall through to reading: the other side's last words may explain.
    events |= POLLIN;
  }
  if ((events & (POLLIN | POLLHUP | POLLERR)) == 0) return;
  std::vector<Frame> frames;
  bool open = true;
  std::optional<std::pair<Code, std::string>> bad;
  std::size_t heard = connection.channel.bytes_received();
  try {
    open = connection.channel.read_some(frames);
  } catch (const ChannelError& error) {
    bad = {error.code, error.what()};
  } catch (const Malformed& error) {
    bad = {Code::network, error.what()};
  }
  if (connection.channel.bytes_received() != heard) connection.last_heard = Clock::now();
  if (connection.kind == Connection::Kind::draining) {
    connection.drop = connection.drop || !open || bad;
    return;
  }
  for (Frame& frame : frames) {
    if (connection.drop || connection.kind == Connection::Kind::draining) return;
    try {
      on_frame(connection, frame);
    } catch (const Malformed& error) {
      bad = {Code::network, error.what()};
      break;
    }
  }
  if (connection.drop || connection.kind == Connection::Kind::draining) return;
  if (bad) {
    on_bad_connection(connection, bad->first, bad->second);
  } else if (!open) {
    on_lost(connection, "closed its connection: its process exited or was killed");
  } else if (connection.channel.established()) {
    if (connection.channel.probe()) {
      connection.drop = true;
    } else if (connection.kind == Connection::Kind::root && !connection.join_sent) {
      send_join(connection);
    }
  }
  if (!connection.drop && connection.channel.wants_write()) connection.channel.write_some();
}

void Bootstrap::Service::on_frame(Connection& connection, Frame& frame) {
  using enum FrameType;
  bool from_member = connection.kind == Connection::Kind::member;
  bool from_root = connection.kind == Connection::Kind::root;
  Reader in(frame.payload);
  switch (frame.type) {
    case join:
      if (connection.kind == Connection::Kind::incoming) return on_join(connection, frame.payload);
      break;
    case heartbeat: return;
    case leave: return on_leave(connection, in);
    case goodbye: connection.goodbye = true; return;
    case revoke:
      if (from_member || from_root) return on_revoke_frame(in, connection.rank);
      break;
    case contribute:
      if (from_member) {
        CallNumber number{in.number<std::uint64_t>(), 0};
        number.second = in.number<std::uint64_t>();
        Op op{in.number<std::uint8_t>()};
        auto root = in.number<std::int32_t>();
        auto bytes = in.bytes();
        return add_contribution(connection.rank, number, op, root,
                                Bytes(bytes.begin(), bytes.end()));
      }
      break;
    case query:
      if (from_member) return on_query(connection, in);
      break;
    case agree:
      if (from_member) return on_agree(connection.rank, in);
      break;
    case admit:
      if (from_member) return on_admit(connection.rank, in);
      break;
    case admitted:
      if (from_root) return on_admitted(in);
      break;
    case welcome:
      if (from_root) return on_welcome(frame.payload);
      break;
    case reject:
      if (from_root) return on_reject(connection, frame.payload);
      break;
    case result:
      if (from_root) return deliver(frame.payload);
      break;
    case status:
      if (from_root) return on_status(frame.payload);
      break;
    case state:
      if (from_root || from_member) return on_state(connection, frame.payload);
      break;
    case decide:
      if (from_root) return on_decide(in);
      break;
    case hello: break;
  }
  // A held peer may only wait; everything else is a frame in the wrong place.
  throw Malformed(cat("sent frame type ", static_cast<int>(frame.type), " where it has no place"));
}

void Bootstrap::Service::on_bad_connection(Connection& connection, Code code,
                                           const std::string& why) {
  if (connection.kind == Connection::Kind::incoming) {
    warn_stranger(connection.channel.where(), why);
    // Tell a rank of this job with the wrong secret or version; tell nothing to noise.
    if (code == Code::authentication || code == Code::version) {
      connection.channel.send_unauthenticated_reject(
          code, code == Code::version
                    ? cat(who(rank_), " speaks version ", kProtocolVersion,
                          " of the bootstrap protocol and refused this one.")
                    : cat("Rank ", rank_, " at ", self_.host,
                          " refused this rank's secret: its id is of another job."));
      connection.channel.write_some();
      connection.kind = Connection::Kind::draining;
      connection.drop = !connection.channel.wants_write();
    } else {
      connection.drop = true;
    }
    return;
  }
  if (connection.kind == Connection::Kind::probe) {
    connection.drop = true;
    return;
  }
  if (connection.kind == Connection::Kind::root && phase_ == Phase::joining &&
      !connection.join_sent && code != Code::network) {
    connection.drop = true;
    set_broken(Error(
        code, cat("Rank ", connection.rank, " at ", connection.channel.where(), " ", why, "."),
        code == Code::version ? "use one version of Marrow on all ranks."
                              : "give all ranks the UniqueId that rank 0 made."));
    return;
  }
  warn_stranger(connection.channel.where(), cat("(", who(connection.rank), ") ", why));
  on_lost(connection, cat("sent bytes that cannot be trusted (", why, ")"));
}

void Bootstrap::Service::warn_stranger(const std::string& where, const std::string& why) {
  if (++strangers_ > kMaxStrangerWarnings) return;
  MARROW_WARN(bootstrap, "dropped a connection from ", where, ": it ", why,
              strangers_ == kMaxStrangerWarnings ? "; further ones are not reported" : "");
}

void Bootstrap::Service::on_lost(Connection& connection, const std::string& why) {
  using enum Connection::Kind;
  connection.drop = true;
  int rank = connection.rank;
  switch (connection.kind) {
    case incoming:
      if (!connection.channel.established() && !stop_) {
        warn_stranger(connection.channel.where(), "closed before it said who it is");
      }
      return;
    case held:
    case candidate:
    case probe:
    case draining: return;
    case member:
      if (phase_ == Phase::joining || phase_ == Phase::refusing) {
        fail_setup(Error(Code::peer_failed, cat(who(rank), " ", why, " during set-up."),
                         "look for the first error of that rank."));
      } else if (phase_ != Phase::closing) {
        fail_peer(rank, cat(who(rank), " ", why, "."));
      }
      return;
    case root:
      if (phase_ == Phase::joining && options_.replacement) {
        last_dial_error_ = cat(connection.channel.where(), " closed the connection");
        dial_next_survivor(rank);
      } else if (phase_ == Phase::joining) {
        if (connection.join_sent) {
          set_broken(Error(Code::peer_failed, cat("Rank 0 ", why, " during set-up."),
                           "look for the first error of rank 0."));
        } else {
          last_dial_error_ = cat(connection.channel.where(), " closed the connection at once");
          start_dial(0, false, kRedialPause);
        }
      } else if (phase_ == Phase::up) {
        fail_peer(rank, cat(who(rank), " ", why, "."));
      } else if (phase_ == Phase::failing_over) {
        start_dial(root_, false, kRedialPause);  // refused if it is gone
      }
      return;
  }
}

void Bootstrap::Service::refuse(Connection& connection, const Error& error) {
  Writer payload;
  write_error(payload, error);
  connection.channel.send(FrameType::reject, payload.view());
  connection.channel.write_some();
  connection.kind = Connection::Kind::draining;
}

Bootstrap::Service::Connection* Bootstrap::Service::find(Connection::Kind kind, int rank) {
  for (Connection& connection : connections_) {
    if (connection.kind == kind && !connection.drop && (rank < 0 || connection.rank == rank)) {
      return &connection;
    }
  }
  return nullptr;
}

Bootstrap::Service::Connection* Bootstrap::Service::root_connection() {
  Connection* connection = find(Connection::Kind::root);
  return connection != nullptr && connection->welcomed ? connection : nullptr;
}

void Bootstrap::Service::send_members(FrameType type, std::span<const std::byte> payload,
                                      int except) {
  for (Connection& connection : connections_) {
    if (connection.kind == Connection::Kind::member && !connection.drop &&
        connection.rank != except) {
      connection.channel.send(type, payload);
    }
  }
}

void Bootstrap::Service::sweep() {
  for (Connection& connection : connections_) {
    if (connection.kind == Connection::Kind::draining && !connection.channel.wants_write() &&
        !connection.drop) {
      connection.drop = true;
    }
    bool said_goodbye =
        phase_ == Phase::closing && connection.goodbye && !connection.channel.wants_write() &&
        (connection.kind == Connection::Kind::member || connection.kind == Connection::Kind::root);
    if (said_goodbye) connection.drop = true;
  }
  std::erase_if(connections_, [](const Connection& connection) { return connection.drop; });
  std::erase_if(dials_, [](const Dial& dial) { return dial.done; });
  if (phase_ == Phase::closing && find(Connection::Kind::member) == nullptr &&
      find(Connection::Kind::root) == nullptr) {
    phase_ = Phase::ended;
    changed_.notify_all();
  }
}

Clock::time_point Bootstrap::Service::next_timer() const {
  Clock::time_point next = next_heartbeat_;
  auto sooner = [&next](Clock::time_point candidate) { next = std::min(next, candidate); };
  if (phase_ == Phase::joining) sooner(setup_deadline_.time_point());
  if (phase_ == Phase::refusing) sooner(refuse_until_);
  if (missing_dirty_) sooner(missing_pushed_ + milliseconds(100));
  if (probing_) sooner(probe_at_);
  if (stop_) sooner(stop_by_);
  for (const Connection& connection : connections_) {
    if (connection.kind == Connection::Kind::incoming ||
        connection.kind == Connection::Kind::probe) {
      sooner(connection.opened + options_.handshake_timeout);
    }
    if (connection.kind == Connection::Kind::candidate) sooner(connection.opened + kGrace);
  }
  for (const Dial& dial : dials_) sooner(dial.fd ? dial.attempt_ends : dial.retry_at);
  return next;
}

void Bootstrap::Service::timers() {
  Clock::time_point now = Clock::now();
  if (phase_ == Phase::joining && now >= setup_deadline_.time_point()) setup_timed_out();
  if (phase_ == Phase::refusing && (now >= refuse_until_ || refused_count_ >= nranks_ - 1)) {
    set_broken(*refuse_with_);
  }
  if (missing_dirty_ && now >= missing_pushed_ + milliseconds(100)) push_missing();
  if (probing_ && now >= probe_at_) {
    probing_ = false;
    for (int i = 0; i < nranks_; ++i) {
      bool gone = peers_[static_cast<std::size_t>(i)].state == PeerState::failed;
      if (i != rank_ && !gone && find(Connection::Kind::member, i) == nullptr) start_dial(i, true);
    }
  }
  for (Connection& connection : connections_) {
    bool unproven =
        connection.kind == Connection::Kind::incoming || connection.kind == Connection::Kind::probe;
    if (!unproven || connection.drop || now < connection.opened + options_.handshake_timeout) {
      continue;
    }
    connection.drop = true;
    if (connection.kind == Connection::Kind::incoming) {
      warn_stranger(connection.channel.where(), cat("did not say who it is within ",
                                                    options_.handshake_timeout.count(), " ms"));
    }
  }
  refuse_candidates_of_the_living();
  for (Dial& dial : dials_) {
    if (dial.done) continue;
    if (dial.fd && now >= dial.attempt_ends) {
      note_dial_error(dial, ETIMEDOUT);
      try_next(dial);
    } else if (!dial.fd && now >= dial.retry_at) {
      try_next(dial);
    }
  }
  if (now >= next_heartbeat_) {
    next_heartbeat_ = now + heartbeat_every_;
    if (phase_ == Phase::up || phase_ == Phase::failing_over) {
      silence();
      heartbeat();
    }
  }
  for (Connection& connection : connections_) {
    if (!connection.drop && connection.channel.wants_write()) connection.channel.write_some();
  }
}

}  // namespace marrow::bootstrap
