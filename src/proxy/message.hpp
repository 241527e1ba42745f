// SPDX-License-Identifier: Apache-2.0
// What progress threads say to each other, and in what order a receiver may act on it.
//
// On a network that orders, a message comes after the puts before it. On one that does not, every put
// carries the immediate {stream, sequence} and every message its own sequence of the same stream; the
// receiver's thread acts on a strong message when all smaller sequences have landed, on a weak one when
// its own put's have. A stream is one context of one device communicator, from one source.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "marrow/network.h"

namespace marrow::proxy {

enum class MessageKind : std::uint8_t {
  add = 1,
  fetch_add = 2,     ///< answered
  compare_swap = 3,  ///< answered
  flush = 4,         ///< answered when everything before it can be seen
  reply = 5,         ///< operand: old value; compare: Status
};

enum MessageFlags : std::uint8_t {
  kSequenced = 1,  ///< sequence and covers count
  kStrong = 2,     ///< covers everything before it
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
inline constexpr std::uint32_t kSequenceMask = (1u << kSequenceBits) - 1;

constexpr std::uint32_t make_immediate(std::uint32_t stream, std::uint32_t sequence) {
  return stream << kSequenceBits | (sequence & kSequenceMask);
}
constexpr std::uint32_t stream_of(std::uint32_t immediate) { return immediate >> kSequenceBits; }

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
  bool has_all(std::uint32_t from, std::uint32_t to) const {
    for (std::uint32_t s = before(from, next_) ? next_ : from; before(s, to); ++s) {
      if (!has(s)) return false;
    }
    return true;
  }
  /// False: a duplicate.
  bool add(std::uint32_t sequence) {
    if (has(sequence)) return false;
    early_.insert(sequence);
    while (!early_.empty() && early_.erase(next_) != 0) ++next_;
    return true;
  }
  /// Every smaller sequence has landed.
  std::uint32_t next() const { return next_; }

 private:
  static bool before(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::int32_t>(a - b) < 0;
  }
  std::uint32_t next_;
  std::set<std::uint32_t> early_;
};

/// What one source sent on one stream.
struct Stream {
  Arrivals arrivals;
  std::vector<Message> waiting;
};

}  // namespace marrow::proxy
