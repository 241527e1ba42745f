// SPDX-License-Identifier: Apache-2.0
// Who lives. The root watches all members, every member watches the root; the root's word about a
// member is final, and so is a member's word that the root is gone: a process that wakes up after it
// was given up finds that word in its socket and withdraws (broken_), so no two groups work on.
//
// Agreement: every survivor votes at the root, which decides once all that live have voted. A decision
// reaches the others before they vote again, so two survivors are never more than one decision apart;
// a new root first hears from every survivor whether it already has a decision, and passes it on.
#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

using base::cat;

std::string Bootstrap::Service::who(int peer) const {
  if (peer < 0 || peer >= nranks_) return cat("a process that came as rank ", peer);
  const PeerInfo& info = peers_[static_cast<std::size_t>(peer)].info;
  if (info.host.empty()) return cat("Rank ", peer);
  return cat("Rank ", peer, " (process ", info.pid, " on ", info.host, ")");
}

RankSet Bootstrap::Service::failed_set() const {
  RankSet out;
  for (const Peer& peer : peers_) out.push_back(peer.state == PeerState::failed);
  return out;
}

void Bootstrap::Service::fail_peer(int peer, const std::string& sentence) {
  Peer& it = peers_[static_cast<std::size_t>(peer)];
  if (it.state == PeerState::failed || phase_ == Phase::closing || phase_ == Phase::ended) return;
  it.state = PeerState::failed;
  it.sentence = sentence;
  events_.push_back({peer, it.state, sentence, false});
  changed_.notify_all();
  MARROW_INFO(bootstrap, sentence);
  if (peer == rank_) {
    set_broken(Error(Code::aborted, sentence, "end this process, or make a new communicator."));
    for (Connection& connection : connections_) connection.drop = true;
    phase_ = Phase::ended;
    return;
  }
  if (Connection* held = find(Connection::Kind::held, peer)) held->drop = true;
  if (am_root_) {
    for (Connection& connection : connections_) {
      if (connection.kind != Connection::Kind::member || connection.drop) continue;
      send_state(connection, peer);
      if (connection.rank == peer) {
        // Should it only have slept, this is what it reads first.
        connection.channel.write_some();
        connection.drop = true;
      }
    }
    check_agreement();
    check_admission();
  } else if (peer == root_) {
    if (Connection* root = root_connection()) {
      send_state(*root, peer);
      root->channel.write_some();
    }
    start_failover();
  }
}

void Bootstrap::Service::send_state(Connection& connection, int peer) {
  const Peer& it = peers_[static_cast<std::size_t>(peer)];
  Writer out;
  out.number(std::int32_t{peer}).number(static_cast<std::uint8_t>(it.state)).text(it.sentence);
  connection.channel.send(FrameType::state, out.view());
}

void Bootstrap::Service::on_state(Connection& connection, std::span<const std::byte> payload) {
  Reader in(payload);
  int peer = in.number<std::int32_t>();
  PeerState state{in.number<std::uint8_t>()};
  std::string sentence = in.text();
  if (peer < 0 || peer >= nranks_) throw Malformed("sent the state of a rank that cannot be");
  // A member may only tell its root that the root itself was given up.
  if (connection.kind == Connection::Kind::member && peer != rank_) return;
  if (state == PeerState::failed) {
    fail_peer(peer, peer == rank_ ? cat("The other ranks declared this rank failed: ", sentence)
                                  : sentence);
  } else {
    set_slowness(peer, state == PeerState::slow, sentence);
  }
}

void Bootstrap::Service::set_slowness(int peer, bool slow, const std::string& sentence) {
  Peer& it = peers_[static_cast<std::size_t>(peer)];
  PeerState wanted = slow ? PeerState::slow : PeerState::alive;
  if (it.state == PeerState::failed || it.state == wanted) return;
  it.state = wanted;
  it.sentence = sentence;
  events_.push_back({peer, wanted, sentence, false});
  if (!am_root_) return;
  for (Connection& connection : connections_) {
    if (connection.kind == Connection::Kind::member && connection.rank != peer &&
        !connection.drop) {
      send_state(connection, peer);
    }
  }
}

void Bootstrap::Service::silence() {
  Clock::time_point now = Clock::now();
  auto judge = [&](int peer, Clock::time_point heard) {
    auto age = std::chrono::duration_cast<milliseconds>(now - heard);
    if (age > peer_timeout_) {
      fail_peer(peer, cat(who(peer), " was silent for ", age.count(),
                          " ms (MARROW_PEER_TIMEOUT is ", peer_timeout_.count(), " ms)."));
    } else if (age > slow_after_) {
      set_slowness(peer, true, cat(who(peer), " has been silent for ", age.count(), " ms."));
    } else {
      set_slowness(peer, false, {});
    }
  };
  if (!am_root_) {
    Connection* root = find(Connection::Kind::root);
    return judge(root_, root != nullptr ? root->last_heard : failover_since_);
  }
  for (int i = 0; i < nranks_ && phase_ == Phase::up; ++i) {
    if (i == rank_ || peers_[static_cast<std::size_t>(i)].state == PeerState::failed) continue;
    Connection* member = find(Connection::Kind::member, i);
    judge(i, member != nullptr ? member->last_heard : failover_since_);
  }
}

void Bootstrap::Service::heartbeat() {
  for (Connection& connection : connections_) {
    bool wanted = connection.kind == Connection::Kind::member ||
                  connection.kind == Connection::Kind::held ||
                  (connection.kind == Connection::Kind::root && connection.welcomed);
    // What is still queued says as much; a stopped peer must not fill this process's memory.
    if (wanted && !connection.drop && !connection.channel.wants_write()) {
      connection.channel.send(FrameType::heartbeat, {});
    }
  }
}

void Bootstrap::Service::adopt_failed(const RankSet& failed, int by) {
  for (int i = 0; i < nranks_; ++i) {
    if (!failed[static_cast<std::size_t>(i)]) continue;
    fail_peer(i, i == rank_
                     ? cat("The other ranks declared this rank failed (told by rank ", by, ").")
                     : cat(who(i), " failed (told by rank ", by, ")."));
  }
}

void Bootstrap::Service::on_leave(Connection& connection, Reader in) {
  Code code{in.number<std::uint32_t>()};
  std::string sentence = in.text();
  int rank = connection.rank;
  using enum Connection::Kind;
  connection.drop = true;
  if (connection.kind == member && (phase_ == Phase::joining || phase_ == Phase::refusing)) {
    if (code == Code::timeout && phase_ == Phase::joining) return setup_timed_out();
    return fail_setup(Error(Code::peer_failed, cat(who(rank), " ", sentence),
                            "look for the first error of that rank."));
  }
  if (connection.kind == root && phase_ == Phase::joining) {
    return set_broken(
        Error(Code::peer_failed, cat("Rank 0 ", sentence), "look for the first error of rank 0."));
  }
  if (connection.kind == member || connection.kind == root) {
    fail_peer(rank, cat(who(rank), " ", sentence));
  }
}

// --- agreement --------------------------------------------------------------------------------

RankSet Bootstrap::Service::agree(MaybeDeadline maybe_deadline) {
  base::Deadline deadline = deadline_or_default(maybe_deadline);
  std::lock_guard calls(call_mutex_);
  std::unique_lock lock(mutex_);
  if (decided_ == consumed_) {
    if (broken_) throw *broken_;
    if (closed_) throw Error(Code::invalid_argument, "agree_failures() after close().");
    std::uint64_t wanted = decided_ + 1;
    agreeing_ = true;
    send_vote();
    wake();
    auto over = [&] { return decided_ >= wanted || broken_; };
    bool in_time = changed_.wait_until(lock, deadline.time_point(), over);
    std::string missing = in_time ? "" : ask_missing(lock, true, {wanted, 0});
    agreeing_ = false;
    if (decided_ < wanted && broken_) throw *broken_;
    if (decided_ < wanted) {
      throw Error(Code::timeout,
                  cat("agree_failures() reached its deadline; ", missing, " did not call it."),
                  "call it on every rank that lives; calling again continues.");
    }
  }
  consumed_ = decided_;
  return decided_mask_;
}

void Bootstrap::Service::send_vote() {
  std::uint64_t wanted = decided_ + 1;
  if (am_root_) {
    votes_[rank_] = wanted;
    check_agreement();
  } else if (Connection* root = root_connection()) {
    Writer out;
    out.number(wanted);
    root->channel.send(FrameType::agree, out.view());
  }  // else: the vote goes out with the next welcome
}

void Bootstrap::Service::on_agree(int from, Reader in) {
  votes_[from] = in.number<std::uint64_t>();
  check_agreement();
}

void Bootstrap::Service::check_agreement() {
  if (!am_root_ || phase_ != Phase::up) return;
  for (int i = 0; i < nranks_; ++i) {
    if (peers_[static_cast<std::size_t>(i)].state == PeerState::failed) continue;
    auto vote = votes_.find(i);
    bool here = i == rank_ || find(Connection::Kind::member, i) != nullptr;
    if (!here || vote == votes_.end() || vote->second != decided_ + 1) return;
  }
  adopt_decision(decided_ + 1, failed_set());
  send_decisions();
}

void Bootstrap::Service::send_decisions() {
  Writer out;
  out.number(decided_).ranks(decided_mask_);
  for (Connection& connection : connections_) {
    if (connection.kind != Connection::Kind::member || connection.drop) continue;
    connection.channel.send(FrameType::decide, out.view());
    if (!options_.after_decision_sent) continue;
    connection.channel.write_some();
    options_.after_decision_sent();
  }
}

void Bootstrap::Service::on_decide(Reader in) {
  auto number = in.number<std::uint64_t>();
  RankSet mask = in.ranks();
  if (mask.size() != peers_.size()) throw Malformed("sent a rank set of the wrong size");
  if (number == decided_ + 1) adopt_decision(number, mask);
}

void Bootstrap::Service::adopt_decision(std::uint64_t number, const RankSet& mask) {
  decided_ = number;
  decided_mask_ = mask;
  // The caller may wake late; until then a change of root must not vote for the next agreement in its name.
  agreeing_ = false;
  sequence_ = 0;
  gathers_.clear();
  admit_votes_.clear();
  for (int i = 0; i < nranks_; ++i) {
    if (!mask[static_cast<std::size_t>(i)]) continue;
    fail_peer(i, cat(i == rank_ ? "This rank" : who(i), " was agreed to have failed."));
    peers_[static_cast<std::size_t>(i)].masked = true;
  }
  changed_.notify_all();
}

// --- revoke -----------------------------------------------------------------------------------

void Bootstrap::Service::revoke(const std::string& sentence) {
  std::lock_guard lock(mutex_);
  adopt_revoke(rank_, sentence, rank_);
  wake();
}

void Bootstrap::Service::on_revoke_frame(Reader in, int from) {
  int by = in.number<std::int32_t>();
  adopt_revoke(by, in.text(), from);
}

void Bootstrap::Service::adopt_revoke(int by, const std::string& sentence, int from) {
  if (revoked_ || phase_ == Phase::closing || phase_ == Phase::ended) return;
  revoked_ = {by, sentence};
  events_.push_back({by, PeerState::alive, sentence, true});
  changed_.notify_all();
  Writer out;
  out.number(std::int32_t{by}).text(sentence);
  send_members(FrameType::revoke, out.view(), from);
  Connection* root = root_connection();
  if (root != nullptr && from != root_) root->channel.send(FrameType::revoke, out.view());
}

}  // namespace marrow::bootstrap
