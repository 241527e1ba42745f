// SPDX-License-Identifier: Apache-2.0
// Collectives: every rank sends its part to the root under the call's number (epoch of the last
// agreement, count within it); when all parts are there the root sends the result to all. A rank that
// dies fails the call at every rank by itself: the news of the death ends the wait. So a collective
// needs no replay when the root dies.
#include <algorithm>
#include <limits>

#include "base/log.hpp"
#include "base/text.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

using base::cat;

namespace {

constexpr std::uint64_t kCloseNumber = std::numeric_limits<std::uint64_t>::max();
constexpr milliseconds kAskTime{250};  // how long past its deadline a call may ask who is missing

std::string describe(Op op, int root) {
  return op == Op::broadcast ? cat("broadcast from rank ", root) : std::string(name(op));
}

struct ResultHead {
  std::uint64_t epoch;
  std::uint64_t count;
  Op op;
  Code code;
};

ResultHead read_head(Reader& in) {
  ResultHead head{};
  head.epoch = in.number<std::uint64_t>();
  head.count = in.number<std::uint64_t>();
  head.op = Op{in.number<std::uint8_t>()};
  head.code = Code{in.number<std::uint32_t>()};
  return head;
}

}  // namespace

void Bootstrap::Service::throw_if_unusable(Op op) const {
  if (broken_) throw *broken_;
  if (closed_ || phase_ == Phase::ended) {
    throw Error(Code::invalid_argument, cat(name(op), " after close()."),
                "make a new communicator.");
  }
  if (mismatch_) throw *mismatch_;
  if (revoked_ && op != Op::close) {
    throw Error(Code::aborted, cat("Rank ", revoked_->first, " revoked: ", revoked_->second),
                "call agree_failures() or make a new communicator.");
  }
  for (int i = 0; i < nranks_; ++i) {
    const Peer& peer = peers_[static_cast<std::size_t>(i)];
    if (peer.state != PeerState::failed || peer.masked) continue;
    throw Error(Code::peer_failed, peer.sentence,
                "call agree_failures() on the survivors to go on without it.");
  }
}

void Bootstrap::Service::check_usable() {
  std::lock_guard lock(mutex_);
  throw_if_unusable(Op::barrier);
}

std::vector<Bytes> Bootstrap::Service::collective(Op op, int root, std::span<const std::byte> mine,
                                                  MaybeDeadline maybe_deadline) {
  base::Deadline deadline = deadline_or_default(maybe_deadline);
  if (mine.size() > kMaxPayload / 2) {
    throw Error(
        Code::invalid_argument,
        cat(name(op), " of ", mine.size(), " bytes; a rank may give ", kMaxPayload / 2, "."),
        "move bulk data through windows.");
  }
  std::lock_guard calls(call_mutex_);
  std::unique_lock lock(mutex_);
  throw_if_unusable(op);
  if (op == Op::broadcast && peers_[static_cast<std::size_t>(root)].masked) {
    throw Error(Code::peer_failed, peers_[static_cast<std::size_t>(root)].sentence,
                "broadcast from a rank that lives.");
  }
  // close has a number of its own: after a revoke the ranks' counts may differ.
  CallNumber number{decided_, op == Op::close ? kCloseNumber : ++sequence_};
  waiting_for_ = number;
  result_.reset();
  if (am_root_) {
    add_contribution(rank_, number, op, root, Bytes(mine.begin(), mine.end()));
  } else if (Connection* connection = root_connection()) {
    Writer out;
    out.number(number.first).number(number.second).number(static_cast<std::uint8_t>(op));
    out.number(std::int32_t{root}).bytes(mine);
    connection->channel.send(FrameType::contribute, out.view());
  }
  wake();
  auto over = [&] {
    if (result_) return true;
    throw_if_unusable(op);
    return false;
  };
  bool in_time = changed_.wait_until(lock, deadline.time_point(), over);
  std::string missing = in_time ? "" : ask_missing(lock, false, number);
  waiting_for_ = {0, 0};
  if (!result_) {
    throw Error(Code::timeout,
                cat(name(op), " number ", number.second, " reached its deadline at rank ", rank_,
                    "; ", missing, " did not call it."),
                "see what those ranks do, or raise MARROW_BOOTSTRAP_TIMEOUT.");
  }
  Reader in(*result_);
  ResultHead head = read_head(in);
  if (head.code != Code::ok) {
    std::string sentence = in.text();
    throw Error(head.code, sentence, in.text());
  }
  std::vector<Bytes> parts(peers_.size());
  auto count = in.number<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) {
    auto rank = in.number<std::uint32_t>();
    auto bytes = in.bytes();
    if (rank < parts.size()) parts[rank].assign(bytes.begin(), bytes.end());
  }
  return parts;
}

void Bootstrap::Service::add_contribution(int from, CallNumber number, Op op, int root,
                                          Bytes bytes) {
  if (number.first != decided_) return;  // of before an agreement; its caller has failed already
  Gather& gather = gathers_[number];
  if (gather.parts.empty()) {
    gather.parts.resize(peers_.size());
    gather.op = op;
    gather.root = root;
    gather.first = from;
  } else if (gather.op != op || gather.root != root) {
    mismatch(number, gather, describe(op, root), from);
  }
  gather.parts[static_cast<std::size_t>(from)] = std::move(bytes);
  check_close();
  finish_gather(number, gather);
}

/// A rank that closes without having been in a collective that others wait for will never join it.
void Bootstrap::Service::check_close() {
  auto close = gathers_.find({decided_, kCloseNumber});
  if (revoked_ || close == gathers_.end()) return;
  for (auto& [number, gather] : gathers_) {
    if (gather.op == Op::close) continue;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (!close->second.parts[i] || gather.parts[i]) continue;
      mismatch(number, gather, "close", static_cast<int>(i));
      mismatch(close->first, close->second, describe(gather.op, gather.root), gather.first);
    }
  }
}

void Bootstrap::Service::mismatch(CallNumber number, Gather& gather, const std::string& other,
                                  int rank) {
  if (gather.result) return;
  Writer out;
  out.number(number.first).number(number.second).number(static_cast<std::uint8_t>(gather.op));
  out.number(static_cast<std::uint32_t>(Code::mismatch));
  out.text(cat("Ranks call different collectives: ", describe(gather.op, gather.root), " at rank ",
               gather.first, ", ", other, " at rank ", rank, "."));
  out.text("call the same collectives in the same order on every rank.");
  gather.result = out.take();
  send_members(FrameType::result, *gather.result);
  deliver(*gather.result);
}

void Bootstrap::Service::finish_gather(CallNumber number, Gather& gather) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].masked) continue;
    if (!gather.parts[i]) {
      // Early mismatch: whoever comes later must hear of it, too.
      if (gather.result) send_members(FrameType::result, *gather.result);
      return;
    }
    total += gather.parts[i]->size();
  }
  if (!gather.result) {
    Writer out;
    out.number(number.first).number(number.second).number(static_cast<std::uint8_t>(gather.op));
    if (total > kMaxPayload - (peers_.size() + 1) * 64) {
      out.number(static_cast<std::uint32_t>(Code::invalid_argument));
      out.text(cat(name(gather.op), " of ", total, " bytes in sum; at most ", kMaxPayload, "."));
      out.text("move bulk data through windows.");
    } else {
      out.number(static_cast<std::uint32_t>(Code::ok));
      bool all = gather.op == Op::allgather;
      bool one = gather.op == Op::broadcast;
      out.number(static_cast<std::uint32_t>(all ? peers_.size() : one ? 1 : 0));
      for (std::size_t i = 0; i < peers_.size(); ++i) {
        if (!all && !(one && i == static_cast<std::size_t>(gather.root))) continue;
        out.number(static_cast<std::uint32_t>(i));
        out.bytes(gather.parts[i] ? std::span<const std::byte>(*gather.parts[i])
                                  : std::span<const std::byte>());
      }
    }
    gather.result = out.take();
  }
  send_members(FrameType::result, *gather.result);
  Bytes result = std::move(*gather.result);
  gathers_.erase(number);
  deliver(result);
}

void Bootstrap::Service::deliver(std::span<const std::byte> payload) {
  Reader in(payload);
  ResultHead head = read_head(in);
  if (head.code == Code::mismatch && !mismatch_) {
    // Ranks that have not called yet must hear of it even if the others are gone by then.
    std::string sentence = in.text();
    mismatch_ = Error(head.code, sentence, in.text());
    changed_.notify_all();
  }
  if (CallNumber{head.epoch, head.count} != waiting_for_) return;  // its caller gave up
  result_ = Bytes(payload.begin(), payload.end());
  if (head.op == Op::close && head.code == Code::ok) goodbye();
  changed_.notify_all();
}

/// The close collective completed here: from now on an end of stream is no failure.
void Bootstrap::Service::goodbye() {
  phase_ = Phase::closing;
  for (Connection& connection : connections_) {
    if (connection.drop) continue;
    if (connection.kind == Connection::Kind::member || connection.kind == Connection::Kind::root) {
      connection.channel.send(FrameType::goodbye, {});
    }
  }
}

RankSet Bootstrap::Service::missing_in(bool agreement, CallNumber number) const {
  RankSet missing(peers_.size());
  auto gather = gathers_.find(number);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].masked || peers_[i].state == PeerState::failed) continue;
    if (agreement && number.second > 0) {  // an admission of rank number.second - 1
      auto vote = admit_votes_.find(static_cast<int>(i));
      missing[i] = vote == admit_votes_.end() || vote->second.number < number.first;
    } else if (agreement) {
      auto vote = votes_.find(static_cast<int>(i));
      missing[i] = vote == votes_.end() || vote->second < number.first;
    } else {
      missing[i] = gather != gathers_.end() && !gather->second.parts[i];
    }
  }
  return missing;
}

void Bootstrap::Service::on_query(Connection& connection, Reader in) {
  bool agreement = in.number<std::uint8_t>() != 0;
  CallNumber number{in.number<std::uint64_t>(), 0};
  number.second = in.number<std::uint64_t>();
  Writer out;
  out.number(number.first).number(number.second).ranks(missing_in(agreement, number));
  connection.channel.send(FrameType::status, out.view());
}

/// Names the ranks a call waits for; asks the root, briefly.
std::string Bootstrap::Service::ask_missing(std::unique_lock<std::mutex>& lock, bool agreement,
                                            CallNumber number) {
  if (am_root_) return list(missing_in(agreement, number));
  Connection* root = root_connection();
  if (root == nullptr) return cat("rank ", root_, " (the root)");
  Writer out;
  out.number(static_cast<std::uint8_t>(agreement)).number(number.first).number(number.second);
  status_.reset();
  if (agreement) result_.reset();  // of the last collective: nobody waits for it now
  root->channel.send(FrameType::query, out.view());
  wake();
  changed_.wait_for(lock, kAskTime, [&] { return status_ || broken_ || result_; });
  if (!status_) return cat("rank ", root_, " (the root, which does not answer)");
  return list(*status_);
}

std::string Bootstrap::Service::list(const RankSet& ranks) const {
  std::string out;
  int count = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!ranks[i]) continue;
    if (++count <= 16) out += cat(count == 1 ? "" : ", ", i);
  }
  if (count > 16) out += cat(" and ", count - 16, " more");
  if (count == 0) return "no rank";
  return cat(count == 1 ? "rank " : "ranks ", out);
}

void Bootstrap::Service::close(MaybeDeadline maybe_deadline) {
  base::Deadline deadline = deadline_or_default(maybe_deadline);
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
  }
  std::optional<Error> problem;
  try {
    collective(Op::close, 0, {}, deadline);
  } catch (const Error& error) {
    problem = error;
  }
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    base::Deadline polite =
        base::Deadline::earliest(deadline, base::Deadline::after(milliseconds(2000)));
    if (!problem) {
      wake();
      changed_.wait_until(lock, polite.time_point(), [&] { return phase_ == Phase::ended; });
    }
  }
  stop_thread(cat("left: ", problem ? problem->sentence() : "closed."));
  if (problem) throw *problem;
}

}  // namespace marrow::bootstrap
