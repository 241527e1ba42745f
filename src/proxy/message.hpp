// SPDX-License-Identifier: Apache-2.0
// What progress threads say to each other, and in what order a receiver may act on it.
//
// On a network that orders, a message comes after the puts before it. On one that does not, every put
// carries the immediate {stream, sequence} and every message its own sequence of the same stream; the
// receiver's thread acts on a strong message when all smaller sequences have landed, on a weak one when
// its own put's have. A stream is one context of one device communicator, from one source. Its sequences
// outlive the device communicator, so that what lands late is not taken for its successor's.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "marrow/network.h"

namespace marrow::proxy {

enum class MessageKind : std::uint8_t {
  add = 1,
  fetch_add = 2,     ///< answered
  compare_swap = 3,  ///< answered
  flush = 4,         ///< answered when everything before it can be seen
  reply = 5,         ///< operand: old value; compare: Status
  skip = 6,          ///< nothing: its sequence was given to an operation that never started
  // Staged memory (staging.hpp). compare: slot | generation << 32
  staged_put = 7,    ///< the slot has operand bytes for the window
  staged_value = 8,  ///< as of put_value: offset | bytes << 56; operand, compare, token: the value
  staged_get = 9,    ///< answered when operand bytes of the window are in the slot
  credit = 10,       ///< that slot is free; operand: Status
};

enum MessageFlags : std::uint8_t {
  kSequenced = 1,  ///< sequence and covers count
  kStrong = 2,     ///< covers everything before it
  kAcknowledges =
      4  ///< a reply: everything before sequence `covers` of the stream has been acted upon
};

struct Message {
  MessageKind kind;
  std::uint8_t flags;
  std::uint16_t stream;
  std::uint32_t window;
  std::uint64_t offset;
  std::uint64_t operand;
  std::uint64_t compare;
  std::uint64_t token;
  std::uint32_t sequence;  ///< its own
  std::uint32_t covers;    ///< a weak one acts after [covers, sequence) has landed
};
static_assert(sizeof(Message) == 48 && sizeof(Message) <= MARROW_NETWORK_MAX_MESSAGE);

inline constexpr std::uint32_t kStreamBits = 10;
inline constexpr std::uint32_t kSequenceBits = 32 - kStreamBits;
inline constexpr std::uint32_t kStreams = 1u << kStreamBits;
inline constexpr std::uint32_t kDeviceStreams =
    64;  ///< contexts of one device communicator at most
inline constexpr std::uint32_t kSequenceMask = (1u << kSequenceBits) - 1;
/// Of one stream, sequences that the peer may not have seen yet; then its ring waits. A quarter of what an immediate
/// can tell apart. One operation may take as many, and then starts when none is unseen: with its message and
/// questions in between, less than half of it.
inline constexpr std::uint32_t kMaxUnseen = 1u << (kSequenceBits - 2);
/// So many unseen ones make the sender ask; early enough that it need not wait.
inline constexpr std::uint32_t kAskAfter = kMaxUnseen / 4;

constexpr std::uint32_t make_immediate(std::uint32_t stream, std::uint32_t sequence) {
  return stream << kSequenceBits | (sequence & kSequenceMask);
}
constexpr std::uint32_t stream_of(std::uint32_t immediate) { return immediate >> kSequenceBits; }
/// Sequences wrap: which of two comes first.
constexpr bool before(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>(a - b) < 0;
}

/// The sender's end of a stream. On a network that orders, only adds are counted.
struct Sending {
  std::uint32_t next = 0;  ///< sequence of the next put or message
  std::uint32_t seen = 0;  ///< all before it were acted upon by the peer
  bool asking = false;     ///< the peer was asked for `seen`

  std::uint32_t unseen() const { return next - seen; }
  void saw(std::uint32_t end) {
    if (before(seen, end) && !before(next, end)) seen = end;
  }
};

/// Which sequences of one stream have landed. They wrap at 2^32; less than 2^21 are outstanding.
class Arrivals {
 public:
  explicit Arrivals(std::uint32_t first = 0) : next_(first) {}

  /// The full sequence of an immediate's low bits: the one nearest to what is expected.
  std::uint32_t expand(std::uint32_t immediate) const {
    const std::uint32_t ahead = (immediate - next_) & kSequenceMask;
    return next_ + ahead - (ahead > kSequenceMask / 2 ? kSequenceMask + 1 : 0);
  }
  bool has(std::uint32_t sequence) const {
    return before(sequence, next_) || early_.count(sequence) != 0;
  }
  /// The first of [from, to) that has not landed; `to`: all have.
  std::uint32_t first_missing(std::uint32_t from, std::uint32_t to) const {
    if (before(from, next_)) from = before(to, next_) ? to : next_;
    while (before(from, to) && has(from)) ++from;
    return from;
  }
  bool has_all(std::uint32_t from, std::uint32_t to) const {
    return !before(first_missing(from, to), to);
  }
  /// False: a duplicate.
  bool add(std::uint32_t sequence) {
    if (has(sequence)) return false;
    if (sequence != next_) {
      early_.insert(sequence);
      return true;
    }
    ++next_;
    while (!early_.empty() && early_.erase(next_) != 0) ++next_;
    return true;
  }
  /// Every smaller sequence has landed.
  std::uint32_t next() const { return next_; }

 private:
  std::uint32_t next_;
  std::unordered_set<std::uint32_t> early_;
};

/// The receiver's end of a stream: keeps messages until what they cover has landed. Each is acted upon once,
/// however often it is delivered. `act(const Message&)` may not call back into it.
class Receiving {
 public:
  explicit Receiving(std::uint32_t first = 0) : arrivals_(first) {}

  template <class Act>
  void immediate(std::uint32_t value, Act&& act) {
    landed(arrivals_.expand(value), act);
  }
  template <class Act>
  void message(const Message& message, Act&& act) {
    if (arrivals_.has(message.sequence)) return;
    if (!(message.flags & kStrong)) {
      try_weak(message, message.covers, act);
    } else if (message.sequence == arrivals_.next()) {
      act(message);
      landed(message.sequence, act);
    } else {
      strong_.emplace(message.sequence, message);
    }
  }
  const Arrivals& arrivals() const { return arrivals_; }
  std::size_t waiting() const { return strong_.size() + weak_.size(); }

 private:
  struct Earlier {
    bool operator()(std::uint32_t a, std::uint32_t b) const { return before(a, b); }
  };

  /// `from`: what it covers before that has landed.
  template <class Act>
  void try_weak(const Message& message, std::uint32_t from, Act& act) {
    const std::uint32_t missing = arrivals_.first_missing(from, message.sequence);
    if (before(missing, message.sequence)) {
      weak_.emplace(missing, message);
    } else if (!arrivals_.has(message.sequence)) {
      act(message);
      landed(message.sequence, act);
    }
  }
  template <class Act>
  void landed(std::uint32_t sequence, Act& act) {
    if (!arrivals_.add(sequence)) return;
    if (working_) {  // called for a message that was acted upon below
      fresh_.push_back(sequence);
      return;
    }
    working_ = true;
    fresh_.assign(1, sequence);
    while (!fresh_.empty()) {
      const std::uint32_t at = fresh_.back();
      fresh_.pop_back();
      for (auto found = weak_.find(at); found != weak_.end(); found = weak_.find(at)) {
        const Message waited = found->second;
        weak_.erase(found);
        try_weak(waited, at + 1, act);
      }
      while (!strong_.empty() && !before(arrivals_.next(), strong_.begin()->first)) {
        const Message waited = strong_.begin()->second;
        strong_.erase(strong_.begin());
        if (arrivals_.has(waited.sequence)) continue;
        act(waited);
        landed(waited.sequence, act);
      }
    }
    working_ = false;
  }

  Arrivals arrivals_;
  std::map<std::uint32_t, Message, Earlier> strong_;      ///< by their own sequence
  std::unordered_multimap<std::uint32_t, Message> weak_;  ///< by the first sequence they wait for
  std::vector<std::uint32_t> fresh_;                      ///< landed, not looked at yet
  bool working_ = false;
};

}  // namespace marrow::proxy
