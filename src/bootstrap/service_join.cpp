// SPDX-License-Identifier: Apache-2.0
// How ranks come together: set-up around rank 0, and meeting again around the next rank when the root
// died. Who a survivor cannot reach because its listener is gone ("refused") is dead; who does not
// answer is waited for, MARROW_PEER_TIMEOUT at most.
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "base/unix_fds.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

using base::cat;

namespace {

constexpr milliseconds kDialTimeout{3000};  // one address; black holes do not answer
constexpr milliseconds kMaxBackoff{200};
constexpr milliseconds kRefusedMeansGone{2000};
// How long a failed set-up waits for ranks to tell it to.
constexpr milliseconds kRefusingTime{2000};
constexpr milliseconds kProbeAfter{50};  // survivors come by themselves; the rest is looked for

}  // namespace

// --- dialling ---------------------------------------------------------------------------------

void Bootstrap::Service::start_dial(int target, bool probe, milliseconds pause) {
  Clock::time_point now = Clock::now();
  if (!probe) {
    for (Dial& dial : dials_) {
      if (dial.probe || dial.done) continue;
      dial.done = true;
      dial.fd.reset();
    }
  }
  Dial dial;
  dial.target = target;
  dial.probe = probe;
  if (phase_ == Phase::joining) {
    dial.candidates.push_back(std::nullopt);
    if (target == 0)
      for (const IpAddress& ip : id_.addresses) dial.candidates.push_back(TcpAddress{ip, id_.port});
  } else {
    const PeerInfo& info = peers_[static_cast<std::size_t>(target)].info;
    if (info.host_id == self_.host_id) dial.candidates.push_back(std::nullopt);
    for (const IpAddress& ip : info.addresses) {
      dial.candidates.push_back(TcpAddress{ip, info.port});
    }
  }
  dial.retry_at = now + pause;
  dials_.push_back(std::move(dial));
}

void Bootstrap::Service::note_dial_error(Dial& dial, int error) {
  last_dial_error_ = cat(dial.where, ": ", base::errno_text(error));
  const auto& candidate = dial.candidates[dial.next - 1];
  bool local = !candidate.has_value();
  if (error == ECONNREFUSED) {
    // A Unix name nobody listens to proves something only about a peer known to be on this host.
    if (!local || phase_ != Phase::joining) dial.refused = true;
  } else if (candidate && is_loopback(candidate->ip) &&
             (error == ENETUNREACH || error == EADDRNOTAVAIL)) {
    dial.refused = true;  // loopback is down: then there is only the Unix socket, which refused
  }
}

void Bootstrap::Service::try_next(Dial& dial) {
  dial.fd.reset();
  while (dial.next < dial.candidates.size()) {
    const auto& candidate = dial.candidates[dial.next++];
    Connecting started;
    if (candidate) {
      dial.where = to_text(*candidate);
      started = connect_tcp(*candidate);
    } else {
      dial.where = cat("rank ", dial.target, " on this host");
      started = connect_unix(unix_name(id_.credentials, dial.target));
    }
    dial.fd = std::move(started.fd);
    if (started.error == 0) return on_connected(dial);
    if (started.error == EINPROGRESS) {
      dial.attempt_ends = Clock::now() + kDialTimeout;
      return;
    }
    note_dial_error(dial, started.error);
    dial.fd.reset();
  }
  on_round_failed(dial);
}

void Bootstrap::Service::on_connected(Dial& dial) {
  if (!dial.candidates[dial.next - 1]) {
    try {
      base::check_peer_user(dial.fd.get());
    } catch (const Error& error) {
      warn_stranger(dial.where, error.sentence());
      return try_next(dial);
    }
  }
  Clock::time_point now = Clock::now();
  dial.done = true;
  connections_.push_back(
      {Channel(std::move(dial.fd), dial.where, Channel::Role::client, id_.credentials, dial.probe),
       dial.probe ? Connection::Kind::probe : Connection::Kind::root, dial.target, now, now});
  connections_.back().channel.write_some();
}

void Bootstrap::Service::on_round_failed(Dial& dial) {
  Clock::time_point now = Clock::now();
  bool refused = std::exchange(dial.refused, false);
  dial.next = 0;
  dial.retry_at = now + dial.backoff;
  dial.backoff = std::min(dial.backoff * 2, kMaxBackoff);
  if (!refused) {
    dial.refused_since.reset();
    return;
  }
  if (!dial.refused_since) dial.refused_since = now;
  if (phase_ == Phase::joining && options_.replacement) {
    dial.done = true;
    return dial_next_survivor(dial.target);
  }
  if (phase_ == Phase::joining) {
    if (rank_ == 0 || (id_.listener_first && now - *dial.refused_since >= kRefusedMeansGone)) {
      dial.done = true;
      set_broken(rank_ == 0
                     ? Error(Code::invalid_argument,
                             "Rank 0 was made where the listener of its UniqueId is not.",
                             "make rank 0 in the process that called UniqueId::create(), once.")
                     : Error(Code::peer_failed,
                             cat("Rank 0 refuses connections (", last_dial_error_,
                                 "): its process ended, or its set-up failed."),
                             "look for the first error of rank 0."));
    }
    return;
  }
  dial.done = true;
  fail_peer(dial.target, cat(who(dial.target), " refuses connections: its process ended."));
}

// --- joining ----------------------------------------------------------------------------------

void Bootstrap::Service::send_join(Connection& connection) {
  Writer out;
  const JoinKind kind = phase_ != Phase::joining ? JoinKind::again
                        : gave_up_               ? JoinKind::give_up
                        : options_.replacement   ? JoinKind::replace
                                                 : JoinKind::first;
  out.number(static_cast<std::uint8_t>(kind));
  out.number(std::int32_t{rank_}).number(std::int32_t{nranks_});
  if (kind == JoinKind::give_up) {
    write_error(out, *gave_up_);
  } else if (kind == JoinKind::first || kind == JoinKind::replace) {
    self_.write(out);
  } else {
    write_knowledge(out);
  }
  connection.channel.send(FrameType::join, out.view());
  connection.join_sent = true;
}

void Bootstrap::Service::on_join(Connection& connection, std::span<const std::byte> payload) {
  Reader in(payload);
  JoinKind kind{in.number<std::uint8_t>()};
  int rank = in.number<std::int32_t>();
  int nranks = in.number<std::int32_t>();
  if (kind == JoinKind::first) return on_first_join(connection, rank, nranks, in);
  if (kind == JoinKind::give_up) return on_give_up(connection, in);
  if (kind == JoinKind::replace) return on_replacement_join(connection, rank, nranks, in);
  if (rank < 0 || rank >= nranks_ || rank == rank_) throw Malformed("a rank that cannot be");
  on_rejoin(connection, rank, payload);
}

/// A rank tells why it cannot start.
void Bootstrap::Service::on_give_up(Connection& connection, Reader& in) {
  const Error why = read_error(in);
  refuse(connection, why);
  if (phase_ == Phase::joining && am_root_) fail_setup(why);
  if (phase_ == Phase::refusing) ++refused_count_;
}

void Bootstrap::Service::on_first_join(Connection& connection, int rank, int nranks, Reader& in) {
  PeerInfo info = PeerInfo::read(in);
  std::string from =
      cat("process ", info.pid, " on ", info.host, " (", connection.channel.where(), ")");
  std::optional<Error> wrong;
  if (!am_root_ || rank_ != 0) {
    wrong = Error(Code::mismatch, cat("This is rank ", rank_, ", not rank 0."));
  } else if (nranks != nranks_) {
    wrong = Error(Code::mismatch,
                  cat("Rank ", rank, ", ", from, ", was started as one of ", nranks,
                      " ranks, rank 0 as one of ", nranks_, "."),
                  "start all ranks with the same rank count.");
  } else if (rank < 0 || rank >= nranks_) {
    wrong = Error(Code::mismatch,
                  cat(from, " came as rank ", rank, "; ranks are 0 to ", nranks_ - 1, "."),
                  "give each rank a number in that range.");
  } else if (phase_ == Phase::joining && peers_[static_cast<std::size_t>(rank)].joined) {
    const PeerInfo& other = peers_[static_cast<std::size_t>(rank)].info;
    wrong = Error(Code::mismatch,
                  cat("Two processes came as rank ", rank, ": process ", other.pid, " on ",
                      other.host, " and ", from, "."),
                  "give each rank its own number.");
  }
  if (phase_ == Phase::refusing) wrong = refuse_with_;
  if (!wrong && phase_ != Phase::joining) {
    wrong =
        Error(Code::mismatch, cat("Rank ", rank, ", ", from, ", came too late."),
              "a process that takes a failed rank's place calls Communicator::rejoin, while the "
              "survivors call admit().");
  }
  if (wrong) {
    refuse(connection, *wrong);
    if (phase_ == Phase::joining) fail_setup(*wrong);
    if (phase_ == Phase::refusing) ++refused_count_;
    if (phase_ == Phase::up) MARROW_WARN(bootstrap, wrong->what());
    return;
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.info = std::move(info);
  peer.joined = true;
  connection.kind = Connection::Kind::member;
  connection.rank = rank;
  missing_dirty_ = true;
  bool all = std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.joined; });
  if (all) setup_complete();
}

void Bootstrap::Service::setup_complete() {
  remove_rendezvous_file();
  // At a port that the user named, the next communicator of this job must be able to meet.
  if (!id_.listener_first) close_listener(false);
  Writer out;
  out.number(static_cast<std::uint8_t>(JoinKind::first));
  for (const Peer& peer : peers_) peer.info.write(out);
  send_members(FrameType::welcome, out.view());
  for (Connection& connection : connections_) connection.last_heard = Clock::now();
  missing_dirty_ = false;
  phase_ = Phase::up;
  changed_.notify_all();
}

void Bootstrap::Service::remove_rendezvous_file() {
  if (!listener_.rendezvous_file.empty()) ::unlink(listener_.rendezvous_file.c_str());
  listener_.rendezvous_file.clear();
}

void Bootstrap::Service::push_missing() {
  missing_dirty_ = false;
  missing_pushed_ = Clock::now();
  if (phase_ != Phase::joining || !am_root_) return;
  RankSet missing;
  for (const Peer& peer : peers_) missing.push_back(!peer.joined);
  Writer out;
  out.number(std::uint64_t{0}).number(std::uint64_t{0}).ranks(missing);
  send_members(FrameType::status, out.view());
}

void Bootstrap::Service::setup_timed_out() {
  RankSet missing = missing_;
  if (am_root_) {
    missing.clear();
    for (const Peer& peer : peers_) missing.push_back(!peer.joined);
  }
  std::string sentence = cat("Rank ", rank_, " waited in vain for ", list(missing), " of ", nranks_,
                             " ranks to join.");
  Connection* root = find(Connection::Kind::root);
  if (!am_root_ && (root == nullptr || !root->join_sent)) {
    sentence =
        cat("Rank ", rank_, " could not reach rank 0",
            last_dial_error_.empty() ? "" : cat(" (last attempt: ", last_dial_error_, ")"), ".");
  }
  if (!in_range(rank_)) {
    return set_broken(Error(Code::mismatch,
                            cat("There is no rank ", rank_, "; ranks are 0 to ", nranks_ - 1, "."),
                            "give each rank a number in that range."));
  }
  if (options_.replacement) return set_broken(not_admitted());
  Error error(Code::timeout, sentence,
              "see whether those ranks started and can connect to rank 0 "
              "(MARROW_SOCKET_IFNAME), or raise MARROW_BOOTSTRAP_TIMEOUT.");
  if (am_root_) fail_setup(error);
  set_broken(error);
}

/// Rank 0 found out that set-up cannot succeed: tells every rank, also those that come during the next
/// seconds.
void Bootstrap::Service::fail_setup(const Error& error) {
  if (phase_ != Phase::joining || !am_root_) return;
  phase_ = Phase::refusing;
  refuse_with_ = error;
  refuse_until_ = std::min(setup_deadline_.time_point(), Clock::now() + kRefusingTime);
  for (Connection& connection : connections_) {
    if (connection.kind != Connection::Kind::member) continue;
    ++refused_count_;
    if (!connection.drop) refuse(connection, error);
  }
}

void Bootstrap::Service::on_reject(Connection& connection, std::span<const std::byte> payload) {
  Reader in(payload);
  const Error error = read_error(in);
  connection.drop = true;
  // Not the root, or one that is not ready: another survivor may be.
  if (options_.replacement && phase_ == Phase::joining && error.code() == Code::unsupported) {
    last_dial_error_ = error.sentence();
    return dial_next_survivor(connection.rank);
  }
  if (phase_ == Phase::failing_over && !connection.channel.established()) {
    start_dial(root_, false, kMaxBackoff);
    return;
  }
  set_broken(error);
}

void Bootstrap::Service::on_welcome(std::span<const std::byte> payload) {
  Reader in(payload);
  JoinKind kind{in.number<std::uint8_t>()};
  Connection* connection = find(Connection::Kind::root);
  if (kind == JoinKind::replace) {
    welcome_replacement(*connection, in);
  } else if (kind == JoinKind::first) {
    if (phase_ != Phase::joining) throw Malformed("sent a second welcome");
    for (Peer& peer : peers_) {
      peer.info = PeerInfo::read(in);
      peer.joined = true;
    }
    connection->welcomed = true;
    phase_ = Phase::up;
  } else {
    if (phase_ != Phase::failing_over) throw Malformed("sent a welcome that nobody asked for");
    connection->welcomed = true;
    phase_ = Phase::up;
    MARROW_INFO(bootstrap, "rank ", root_, " is the new root");
    read_knowledge(in, root_);
    if (phase_ == Phase::up && agreeing_ && !broken_) send_vote();
  }
  changed_.notify_all();
}

void Bootstrap::Service::on_status(std::span<const std::byte> payload) {
  Reader in(payload);
  in.number<std::uint64_t>();
  in.number<std::uint64_t>();
  RankSet ranks = in.ranks();
  if (ranks.size() != peers_.size()) throw Malformed("sent a rank set of the wrong size");
  if (phase_ == Phase::joining) {
    missing_ = ranks;
  } else {
    status_ = ranks;
    changed_.notify_all();
  }
}

// --- after the root died ----------------------------------------------------------------------

void Bootstrap::Service::start_failover() {
  if (phase_ != Phase::up && phase_ != Phase::failing_over) return;
  for (Connection& connection : connections_) {
    if (connection.kind == Connection::Kind::root) connection.drop = true;
  }
  phase_ = Phase::failing_over;
  failover_since_ = Clock::now();
  last_dial_error_.clear();
  root_ = rank_;
  for (int i = 0; i < rank_; ++i) {
    if (peers_[static_cast<std::size_t>(i)].state != PeerState::failed) {
      root_ = i;
      break;
    }
  }
  if (root_ == rank_) {
    become_root();
  } else {
    start_dial(root_, false);
  }
}

void Bootstrap::Service::become_root() {
  MARROW_INFO(bootstrap, "this rank is the new root");
  am_root_ = true;
  phase_ = Phase::up;
  gathers_.clear();
  votes_.clear();
  probing_ = true;
  probe_at_ = Clock::now() + kProbeAfter;
  for (Dial& dial : dials_) {
    dial.done = true;
    dial.fd.reset();
  }
  if (agreeing_) send_vote();
  for (Connection& connection : connections_) {
    if (connection.kind != Connection::Kind::held || connection.drop) continue;
    Bytes payload = std::move(connection.held_join);
    admit_rejoin(connection, payload);
  }
  check_agreement();
}

void Bootstrap::Service::on_rejoin(Connection& connection, int rank,
                                   std::span<const std::byte> payload) {
  connection.rank = rank;
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.state == PeerState::failed || phase_ == Phase::joining || phase_ == Phase::refusing) {
    refuse(connection,
           Error(Code::aborted,
                 cat("The other ranks declared rank ", rank, " failed: ", peer.sentence),
                 "end this process, or make a new communicator."));
  } else if (am_root_ && phase_ == Phase::up) {
    admit_rejoin(connection, payload);
  } else {
    // It saw the old root die before this rank did, or this rank is not sure yet who is root.
    connection.kind = Connection::Kind::held;
    connection.held_join.assign(payload.begin(), payload.end());
  }
}

void Bootstrap::Service::admit_rejoin(Connection& connection, std::span<const std::byte> payload) {
  Reader in(payload);
  in.take(1 + 4 + 4);
  int rank = connection.rank;
  if (Connection* old = find(Connection::Kind::member, rank)) old->drop = true;
  connection.kind = Connection::Kind::member;
  connection.last_heard = Clock::now();
  Writer out;
  out.number(static_cast<std::uint8_t>(JoinKind::again));
  write_knowledge(out);
  connection.channel.send(FrameType::welcome, out.view());
  set_slowness(rank, false, {});
  read_knowledge(in, rank);
  check_agreement();
}

/// What a rank tells at failover: whom it knows to have failed, the last agreement, a revoke.
void Bootstrap::Service::write_knowledge(Writer& out) const {
  out.ranks(failed_set()).number(decided_).ranks(decided_mask_);
  out.number(std::int32_t{revoked_ ? revoked_->first : -1});
  out.text(revoked_ ? revoked_->second : std::string());
}

void Bootstrap::Service::read_knowledge(Reader& in, int from) {
  RankSet failed = in.ranks();
  auto decided = in.number<std::uint64_t>();
  RankSet mask = in.ranks();
  int revoker = in.number<std::int32_t>();
  std::string sentence = in.text();
  if (failed.size() != peers_.size() || mask.size() != peers_.size()) {
    throw Malformed("sent a rank set of the wrong size");
  }
  if (revoker >= 0) adopt_revoke(revoker, sentence, from);
  // A decision that one survivor has seen binds all.
  if (decided == decided_ + 1) {
    adopt_decision(decided, mask);
    if (am_root_) send_decisions();
  }
  adopt_failed(failed, from);
}

void Bootstrap::Service::set_broken(Error error) {
  if (broken_) return;
  broken_ = std::move(error);
  for (Dial& dial : dials_) {
    dial.done = true;
    dial.fd.reset();
  }
  changed_.notify_all();
}

}  // namespace marrow::bootstrap
