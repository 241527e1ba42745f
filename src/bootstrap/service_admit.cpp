// SPDX-License-Identifier: Apache-2.0
// A new process takes the place of a rank that the survivors agreed to have failed. It walks along the
// survivors until it finds the root, which holds it until every survivor has voted for it. The admission
// is a decision like an agreement's: it opens a new epoch of calls, so nothing of the dead process, and
// nothing that survivors had begun before, can be taken for a part of a later collective.
//
// A root that dies in between leaves survivors that know the decision and others that do not; all of them
// fail with the root's death, hear at the next root who counts as failed, and count the replacement among
// them, which withdraws.
#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

using base::cat;

namespace {

constexpr milliseconds kRound{50};  // pause after all survivors were tried

}  // namespace

PeerInfo Bootstrap::Service::info(int peer) const {
  check_peer(peer);
  std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)].info;
}

// --- the replacement's side -------------------------------------------------------------------

void Bootstrap::Service::dial_next_survivor(int after) {
  int target = after + 1;
  milliseconds pause(0);
  if (target == rank_) ++target;
  if (target >= nranks_) {
    target = rank_ == 0 && nranks_ > 1 ? 1 : 0;
    pause = kRound;
  }
  start_dial(target, false, pause);
}

void Bootstrap::Service::abandon(const std::string& sentence) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  stop_thread(sentence);
}

Error Bootstrap::Service::not_admitted() const {
  const auto reached = std::find_if(connections_.begin(), connections_.end(), [](const auto& c) {
    return c.kind == Connection::Kind::root && c.join_sent && !c.drop;
  });
  if (reached != connections_.end()) {
    return Error(Code::timeout,
                 cat("Rank ", rank_, " was not admitted: it reached the survivors' root, rank ",
                     reached->rank, ", but they did not all call admit(", rank_, ") in time."),
                 "call agree_failures() and then admit() on every survivor.");
  }
  return Error(
      Code::timeout,
      cat("Rank ", rank_, " found no survivor's root",
          last_dial_error_.empty() ? "" : cat(" (last attempt: ", last_dial_error_, ")"), "."),
      "start it on a host where a survivor runs, or while rank 0 lives, with the "
      "survivors' UniqueId.");
}

void Bootstrap::Service::welcome_replacement(Connection& connection, Reader& in) {
  if (phase_ != Phase::joining || !options_.replacement) {
    throw Malformed("sent a welcome that nobody asked for");
  }
  const auto decided = in.number<std::uint64_t>();
  const RankSet mask = in.ranks();
  if (mask.size() != peers_.size()) throw Malformed("sent a rank set of the wrong size");
  for (Peer& peer : peers_) {
    peer.info = PeerInfo::read(in);
    peer.joined = true;
  }
  decided_ = consumed_ = decided;
  decided_mask_ = mask;
  for (int i = 0; i < nranks_; ++i) {
    Peer& peer = peers_[static_cast<std::size_t>(i)];
    peer.masked = mask[static_cast<std::size_t>(i)];
    if (!peer.masked) continue;
    peer.state = PeerState::failed;
    peer.sentence = cat(who(i), " had failed before this process came.");
  }
  try {
    listener_.unix_socket = listen_unix(unix_name(id_.credentials, rank_));
    unix_guard_ = ForkGuard(listener_.unix_socket.get());
  } catch (const Error& error) {
    MARROW_INFO(bootstrap, "TCP only: ", error.what());  // the old process is stopped, not dead
  }
  connection.welcomed = true;
  connection.last_heard = Clock::now();
  root_ = connection.rank;
  phase_ = Phase::up;
}

// --- the survivors' side ----------------------------------------------------------------------

void Bootstrap::Service::admit(int rank, MaybeDeadline maybe_deadline) {
  check_peer(rank);
  const base::Deadline deadline = deadline_or_default(maybe_deadline);
  std::lock_guard calls(call_mutex_);
  std::unique_lock lock(mutex_);
  if (std::exchange(admitted_late_, std::nullopt) == rank) return;
  throw_if_unusable(Op::barrier);
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.masked) {
    throw Error(
        Code::invalid_argument,
        cat("admit(", rank, "): ", rank == rank_ ? "this rank" : who(rank), " has not failed."),
        "name a rank that agree_failures() has returned as failed.");
  }
  const std::uint64_t wanted = decided_ + 1;
  admitting_ = rank;
  admit_error_.reset();
  send_admit_vote(wanted, true);
  wake();
  bool in_time = true;
  try {
    in_time = changed_.wait_until(lock, deadline.time_point(), [&] {
      if (decided_ >= wanted || admit_error_) return true;
      throw_if_unusable(Op::barrier);
      return false;
    });
  } catch (...) {
    admitting_.reset();
    throw;
  }
  std::string missing;
  if (!in_time) {
    missing = ask_missing(lock, true, {wanted, static_cast<std::uint64_t>(rank) + 1});
    if (decided_ < wanted) send_admit_vote(wanted, false);
  }
  admitting_.reset();
  if (decided_ >= wanted) {
    admitted_late_.reset();
    return;
  }
  if (admit_error_) throw *std::exchange(admit_error_, std::nullopt);
  throw Error(Code::timeout,
              cat("admit(", rank, ") reached its deadline; ",
                  missing == "no rank" ? cat("no process came to take rank ", rank, "'s place.")
                                       : cat(missing, " did not call it.")),
              missing == "no rank"
                  ? "start the replacement with Communicator::rejoin; calling again "
                    "continues, nothing has changed."
                  : "call it on every survivor; nothing has changed.");
}

void Bootstrap::Service::send_admit_vote(std::uint64_t number, bool standing) {
  if (am_root_) {
    admit_votes_[rank_] = {number, *admitting_, standing};
    check_admission();
  } else if (Connection* root = root_connection()) {
    Writer out;
    out.number(number).number(std::int32_t{*admitting_}).number(std::uint8_t{standing});
    root->channel.send(FrameType::admit, out.view());
  }
}

void Bootstrap::Service::on_admit(int from, Reader in) {
  const auto number = in.number<std::uint64_t>();
  const int whom = in.number<std::int32_t>();
  if (!in_range(whom)) throw Malformed("votes for a rank that cannot be");
  admit_votes_[from] = {number, whom, in.number<std::uint8_t>() != 0};
  check_admission();
}

void Bootstrap::Service::on_replacement_join(Connection& connection, int rank, int nranks,
                                             Reader& in) {
  const PeerInfo info = PeerInfo::read(in);
  const std::string from = cat("process ", info.pid, " on ", info.host);
  std::optional<Error> wrong;
  if (revoked_) {
    wrong = Error(Code::aborted, cat("Rank ", revoked_->first, " revoked: ", revoked_->second));
  } else if (phase_ != Phase::up || !am_root_) {
    wrong =
        Error(Code::unsupported, cat("Rank ", rank_, " is not the root now; rank ", root_, " is."));
  } else if (nranks != nranks_ || !in_range(rank)) {
    wrong = Error(Code::mismatch,
                  cat(from, " came to take the place of rank ", rank, " of ", nranks,
                      "; there are ", nranks_, " ranks."),
                  "give it the failed rank's number and the communicator's rank count.");
  } else if (rank == rank_) {
    wrong = Error(Code::mismatch, cat(who(rank), " is alive: ", from, " cannot take its place."),
                  "give it the failed rank's number.");
  } else if (find(Connection::Kind::candidate, rank) != nullptr) {
    wrong = Error(
        Code::mismatch,
        cat("Two processes came to take the place of rank ", rank, "; ", from, " is the second."),
        "start one replacement.");
  }
  connection.rank = rank;
  if (wrong) {
    refuse(connection, *wrong);
    return;
  }
  connection.kind = Connection::Kind::candidate;
  Writer held;
  info.write(held);
  connection.held_join = held.take();
  check_admission();
}

/// A replacement may be quicker than the news of the death, but not by much.
void Bootstrap::Service::refuse_candidates_of_the_living() {
  const Clock::time_point now = Clock::now();
  for (Connection& connection : connections_) {
    if (connection.kind != Connection::Kind::candidate || connection.drop) continue;
    if (now < connection.opened + kGrace) continue;
    const int rank = connection.rank;
    if (peers_[static_cast<std::size_t>(rank)].state == PeerState::failed) continue;
    refuse(connection, Error(Code::mismatch,
                             cat(who(rank), " is alive: another process cannot take its place."),
                             "give it the failed rank's number, or end that process first."));
  }
}

void Bootstrap::Service::check_admission() {
  if (!am_root_ || phase_ != Phase::up) return;
  std::optional<std::pair<int, int>> first;  // (voter, whom)
  for (int i = 0; i < nranks_; ++i) {
    const Peer& peer = peers_[static_cast<std::size_t>(i)];
    if (peer.masked) continue;
    const auto vote = admit_votes_.find(i);
    if (peer.state == PeerState::failed || vote == admit_votes_.end() ||
        vote->second.number != decided_ + 1 || !vote->second.standing) {
      return;
    }
    if (!first) first = {i, vote->second.whom};
    if (first->second == vote->second.whom) continue;
    Writer out;
    out.number(decided_ + 1);
    write_error(out, Error(Code::mismatch,
                           cat("Rank ", first->first, " admits rank ", first->second, ", rank ", i,
                               " admits rank ", vote->second.whom, "."),
                           "admit failed ranks one by one, in the same order on every survivor."));
    admit_votes_.clear();
    send_members(FrameType::admitted, out.view());
    return on_admitted(Reader(out.view()));
  }
  if (!first || !peers_[static_cast<std::size_t>(first->second)].masked) return;
  const int rank = first->second;
  Connection* candidate = find(Connection::Kind::candidate, rank);
  if (candidate == nullptr) return;
  Reader held(candidate->held_join);
  const PeerInfo info = PeerInfo::read(held);
  Writer out;
  out.number(decided_ + 1).number(static_cast<std::uint32_t>(Code::ok));
  out.number(std::int32_t{rank});
  info.write(out);
  send_members(FrameType::admitted, out.view());
  adopt_admission(decided_ + 1, rank, info);
  candidate->kind = Connection::Kind::member;
  candidate->last_heard = Clock::now();
  Writer welcome;
  welcome.number(static_cast<std::uint8_t>(JoinKind::replace))
      .number(decided_)
      .ranks(decided_mask_);
  for (const Peer& peer : peers_) peer.info.write(welcome);
  candidate->channel.send(FrameType::welcome, welcome.view());
}

void Bootstrap::Service::on_admitted(Reader in) {
  const auto number = in.number<std::uint64_t>();
  Reader peek = in;
  if (Code{peek.number<std::uint32_t>()} != Code::ok) {
    if (admitting_) admit_error_ = read_error(in);
    changed_.notify_all();
    return;
  }
  in.number<std::uint32_t>();
  const int rank = in.number<std::int32_t>();
  if (!in_range(rank)) throw Malformed("admits a rank that cannot be");
  PeerInfo info = PeerInfo::read(in);
  if (number == decided_ + 1) adopt_admission(number, rank, std::move(info));
}

void Bootstrap::Service::adopt_admission(std::uint64_t number, int rank, PeerInfo info) {
  decided_ = consumed_ = number;
  decided_mask_[static_cast<std::size_t>(rank)] = false;
  sequence_ = 0;
  gathers_.clear();
  votes_.clear();
  admit_votes_.clear();
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.info = std::move(info);
  peer.state = PeerState::alive;
  peer.masked = false;
  peer.sentence.clear();
  events_.push_back({rank, PeerState::alive, {}, false});
  if (!admitting_) admitted_late_ = rank;
  MARROW_INFO(bootstrap, who(rank), " takes the place of the failed rank ", rank);
  changed_.notify_all();
}

}  // namespace marrow::bootstrap
