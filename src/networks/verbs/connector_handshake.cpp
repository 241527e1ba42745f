// SPDX-License-Identifier: Apache-2.0
// Who says what: hello with our end, answer with theirs, one byte when the first can receive too. After
// the hello the second's queue pair can receive, after the byte the first's: nobody sends before that.
#include <algorithm>
#include <cstring>
#include <span>

#include "base/log.hpp"
#include "base/sha256.hpp"
#include "base/text.hpp"
#include "networks/guarded.hpp"
#include "networks/verbs/connector.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;

std::span<const std::byte> signed_part(const Frame& frame) {
  return std::as_bytes(std::span(&frame, 1)).first(offsetof(Frame, mac));
}

}  // namespace

bool Connector::valid(const Frame& frame, std::uint32_t magic, std::uint32_t keyed_by) const {
  if (frame.magic != magic || frame.protocol != kProtocol || frame.from >= peers_.size() ||
      frame.to != rank_)
    return false;
  const base::Digest mac =
      base::hmac_sha256(std::as_bytes(std::span(peers_[keyed_by].token)), {signed_part(frame)});
  return base::constant_time_equal(mac, std::as_bytes(std::span(frame.mac)));
}

Frame Connector::frame_to(std::uint32_t peer, std::uint32_t magic, std::uint32_t keyed_by,
                          const End& end, Refusal refused, const std::string& why) const {
  Frame frame{};
  frame.magic = magic;
  frame.protocol = kProtocol;
  frame.refused = refused;
  frame.from = rank_;
  frame.to = peer;
  frame.end = end;
  why.copy(frame.why, sizeof frame.why - 1);
  const base::Digest mac =
      base::hmac_sha256(std::as_bytes(std::span(peers_[keyed_by].token)), {signed_part(frame)});
  std::memcpy(frame.mac, mac.data(), sizeof frame.mac);
  return frame;
}

void Connector::begin(std::uint32_t peer) {
  if (ties_[peer] != Tie::none) return;  // the peer was faster
  ties_[peer] = Tie::starting;
  if (peer != rank_) return dial(peer, 0, base::Deadline::after(patience_));
  try {  // ourselves: a queue pair connected to itself
    owner_.join(peer, owner_.make_end(peer));
    ties_[peer] = Tie::standing;
    owner_.ready(peer);
  } catch (const Error& error) {
    give_up(peer, error);
  }
}

void Connector::connected(Line& line) {
  const auto peer = static_cast<std::uint32_t>(line.peer);
  if (ties_[peer] != Tie::starting) {
    line.dead = true;
    return;
  }
  try {
    const Frame hello = frame_to(peer, kHelloMagic, peer, owner_.make_end(peer), kTaken, {});
    line.stage = Stage::awaits_answer;
    if (!send(line, &hello, sizeof hello)) lost(line);
  } catch (const Error& error) {
    give_up(peer, error);
  }
}

void Connector::consume(Line& line) {
  if (line.stage == Stage::awaits_hello || line.stage == Stage::awaits_answer) {
    if (line.received.size() < sizeof(Frame)) return;
    Frame frame;
    std::memcpy(&frame, line.received.data(), sizeof frame);
    line.received.erase(line.received.begin(), line.received.begin() + sizeof frame);
    frame.why[sizeof frame.why - 1] = 0;
    line.stage == Stage::awaits_hello ? on_hello(line, frame) : on_answer(line, frame);
    if (line.dead) return;
  }
  if (line.stage == Stage::awaits_ready && !line.received.empty()) {
    const auto said = static_cast<char>(line.received.front());
    line.received.erase(line.received.begin());
    if (said != kReady) return lost(line);
    const auto peer = static_cast<std::uint32_t>(line.peer);
    line.stage = Stage::open;
    ties_[peer] = Tie::standing;
    owner_.ready(peer);
  }
  if (line.stage == Stage::open && !line.received.empty()) {
    line.goodbye |= static_cast<char>(line.received.front()) == kGoodbye;
    line.received.clear();
  }
}

void Connector::refuse(Line& line, const Frame& hello, Refusal why, const std::string& text) {
  const Frame answer = frame_to(hello.from, kAnswerMagic, rank_, End{}, why, text);
  send(line, &answer, sizeof answer);
  line.dead = true;
}

void Connector::on_hello(Line& line, const Frame& frame) {
  if (!valid(frame, kHelloMagic, rank_) || frame.from == rank_) {
    MARROW_WARN(net, "verbs: a connection without this job's token was refused");
    line.dead = true;
    return;
  }
  const std::uint32_t peer = frame.from;
  switch (ties_[peer]) {
    case Tie::starting:
      // Ours may be refused there the same moment; this rule lets one of the two stand.
      if (rank_ < peer) return refuse(line, frame, kOursStands, {});
      for (const auto& other : lines_) {
        if (other->peer == peer) other->dead = true;
      }
      break;
    case Tie::none:
    case Tie::waits_for_theirs: break;
    default: return refuse(line, frame, kCannot, "it is connected, or has failed, already");
  }
  theirs_due_.erase(peer);
  line.peer = peer;
  line.stage = Stage::awaits_ready;
  ties_[peer] = Tie::joined;
  try {
    const End ours = owner_.make_end(peer);
    owner_.join(peer, frame.end);
    const Frame answer = frame_to(peer, kAnswerMagic, rank_, ours, kTaken, {});
    if (!send(line, &answer, sizeof answer)) lost(line);
  } catch (const Error& error) {
    refuse(line, frame, kCannot, error.sentence());
    give_up(peer, error);
  }
}

void Connector::on_answer(Line& line, const Frame& frame) {
  const auto peer = static_cast<std::uint32_t>(line.peer);
  if (!valid(frame, kAnswerMagic, peer) || frame.from != peer) {
    return give_up(peer, Error(Code::authentication,
                               cat("rank ", peer, " at ", where(peer, line.tries),
                                   " does not answer as the rank whose address this is"),
                               "another program may have taken its port: start the job again"));
  }
  if (frame.refused == kOursStands) {
    line.dead = true;
    if (ties_[peer] != Tie::starting) return;
    ties_[peer] = Tie::waits_for_theirs;
    theirs_due_.insert_or_assign(peer, base::Deadline::after(patience_));
    return;
  }
  if (frame.refused != kTaken) {
    if (ties_[peer] != Tie::starting) {  // their attempt was accepted meanwhile
      line.dead = true;
      return;
    }
    return give_up(peer,
                   Error(Code::network, cat("rank ", peer, " refused the connection: ", frame.why),
                         "see that rank's error"));
  }
  if (ties_[peer] != Tie::starting) {
    line.dead = true;
    return;
  }
  try {
    owner_.join(peer, frame.end);
    line.stage = Stage::open;
    ties_[peer] = Tie::standing;
    if (!send(line, &kReady, 1)) return lost(line);
    owner_.ready(peer);
  } catch (const Error& error) {
    give_up(peer, error);
  }
}

void Connector::lost(Line& line) {
  line.dead = true;
  if (line.peer < 0) return;
  const auto peer = static_cast<std::uint32_t>(line.peer);
  if (line.stage == Stage::open) {
    if (ties_[peer] == Tie::over) return;
    ties_[peer] = Tie::over;
    owner_.closed(peer, line.goodbye);
    return;
  }
  const bool counts = line.ours ? ties_[peer] == Tie::starting : ties_[peer] == Tie::joined;
  if (!counts) return;  // the other attempt stands
  give_up(peer, Error(Code::peer_failed,
                      cat("rank ", peer, " at ", where(peer, line.tries),
                          " ended the connection while it was set up"),
                      "look for the first error of that rank"));
}

}  // namespace marrow::networks::rdma
