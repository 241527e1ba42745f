// SPDX-License-Identifier: Apache-2.0
// One thread's transfers through staging memory: pieces of operations, the slots they take, and what has
// arrived but is still being copied to where it belongs. Tables alone; engine_stage.cpp moves things.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "proxy/message.hpp"
#include "proxy/operation_queue.hpp"
#include "proxy/staging.hpp"

namespace marrow::proxy {

/// A part of a staged put or get, at most a slot long.
struct Piece {
  enum class State : std::uint8_t {
    free,
    waiting,   ///< for a slot
    copying,   ///< put: into its slot; with ticket 0 there is nothing to copy
    sending,   ///< put: with the network
    landing,   ///< put: the peer copies it to its place, and says when the slot is free
    asking,    ///< get: the peer copies into its slot, and says when that is done
    fetching,  ///< get: with the network
    storing,   ///< get: from its slot to its place
  };
  State state = State::free;
  bool get = false;
  bool there = false;      ///< the peer's side is staged
  bool no_credit = false;  ///< the peer will not say that the slot is free
  bool credited = false;   ///< it has said so
  std::int8_t slot = -1;
  std::uint32_t peer = 0;
  std::uint32_t window = 0;
  std::uint32_t network = 0;     ///< network operations queued or posted
  std::uint32_t serial = 0;      ///< tells uses of this entry apart
  std::uint64_t token = 0;       ///< of its operation; 0: that is done with it
  std::uint64_t ticket = 0;      ///< of its copy here
  std::byte* address = nullptr;  ///< our side, when that is staged
  void* local = nullptr;         ///< our side else
  std::uint64_t local_offset = 0;
  void* remote = nullptr;  ///< the peer's side, when that is not staged
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
};

/// Slots of one peer.
struct Channel {
  std::uint32_t free = (1u << kStageSlots) - 1;         ///< bit set: slot is free
  std::array<std::uint32_t, kStageSlots> generation{};  ///< how often it was taken
  std::array<std::uint32_t, kStageSlots> owner{};       ///< its piece
  std::deque<std::uint32_t> waiting;  ///< pieces without a slot, first come first served
  /// Of the peer's slots here: whose generation was acted upon last. A message may be delivered twice.
  std::array<std::uint32_t, kStageSlots> served{};
};

/// Something that has to wait for copies into our memory.
struct Landing {
  enum class Then : std::uint8_t { nothing, credit, answer, act };
  std::uint64_t ticket = 0;  ///< of the last of them
  std::uint32_t peer = 0;
  std::uint32_t region = kNone;  ///< that is copied to or from
  Then then = Then::nothing;
  Message message{};
};

class StageTable {
 public:
  static constexpr int kIndexBits = 28;

  explicit StageTable(int nranks) : channels_(nranks), landing_(nranks), last_(nranks) {}

  /// A new piece; references to others end.
  std::uint32_t add() {
    std::uint32_t id;
    if (free_.empty()) {
      id = static_cast<std::uint32_t>(pieces_.size());
      pieces_.emplace_back();
    } else {
      id = free_.back();
      free_.pop_back();
    }
    const std::uint32_t serial = pieces_[id].serial;
    pieces_[id] = {};
    pieces_[id].serial = (serial + 1) & ((1u << (Queue::kNumberBits - kIndexBits)) - 1);
    return id;
  }
  Piece& at(std::uint32_t id) { return pieces_[id]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(pieces_.size()); }
  /// What its network operations carry: the token of no queue.
  std::uint64_t token(std::uint32_t id) const {
    return (std::uint64_t{pieces_[id].serial} << kIndexBits | id) + 1;
  }
  /// The piece of a token, or kNone.
  std::uint32_t find(std::uint64_t token) const {
    if (token == 0 || token >> Queue::kNumberBits != 0) return kNone;
    const std::uint64_t id = (token - 1) & ((1u << kIndexBits) - 1);
    if (id >= pieces_.size() || pieces_[id].state == Piece::State::free ||
        pieces_[id].serial != (token - 1) >> kIndexBits)
      return kNone;
    return static_cast<std::uint32_t>(id);
  }
  Channel& channel(std::uint32_t peer) { return channels_[peer]; }

  /// Gives a piece and its slot back.
  void release(std::uint32_t id) {
    Piece& piece = pieces_[id];
    Channel& channel = channels_[piece.peer];
    if (piece.slot >= 0) {
      channel.free |= 1u << piece.slot;
    } else {
      std::erase(channel.waiting, id);
    }
    piece.state = Piece::State::free;
    free_.push_back(id);
    if (!channel.waiting.empty()) with_room_.push_back(piece.peer);
  }
  /// A slot for the first of those that wait. @return the piece, or kNone
  std::uint32_t take_slot(std::uint32_t peer) {
    Channel& channel = channels_[peer];
    if (channel.waiting.empty() || channel.free == 0) return kNone;
    const std::uint32_t id = channel.waiting.front();
    channel.waiting.pop_front();
    const int slot = __builtin_ctz(channel.free);
    channel.free &= channel.free - 1;
    ++channel.generation[slot];
    channel.owner[slot] = id;
    pieces_[id].slot = static_cast<std::int8_t>(slot);
    return id;
  }

  /// Peers with slots for pieces that waited.
  std::vector<std::uint32_t> take_peers_with_room() { return std::exchange(with_room_, {}); }
  bool has_peers_with_room() const { return !with_room_.empty(); }
  /// False: that use of a slot was acted upon already.
  bool serve(std::uint32_t peer, std::uint32_t slot, std::uint32_t generation) {
    std::uint32_t& served = channels_[peer].served[slot];
    if (!before(served, generation)) return false;
    served = generation;
    return true;
  }

  // What copies into our memory keep waiting. One copy engine makes them, in order.

  bool landing(std::uint32_t peer) const { return landing_[peer] != 0; }
  std::uint64_t last_ticket(std::uint32_t peer) const { return last_[peer]; }
  void land(const Landing& landing) {
    landings_.push_back(landing);
    ++landing_[landing.peer];
    last_[landing.peer] = landing.ticket;
  }
  std::deque<Landing>& landings() { return landings_; }
  Landing take_landing() {
    const Landing first = landings_.front();
    landings_.pop_front();
    --landing_[first.peer];
    return first;
  }

  std::deque<std::uint32_t> storing;  ///< gets whose last copy is under way, in order
  std::uint64_t dropped = 0;     ///< ticket of the last copy out whose operation has ended already
  std::uint32_t copies_out = 0;  ///< under way, at most: somebody has to ask for them

 private:
  std::vector<Piece> pieces_;
  std::vector<std::uint32_t> free_;
  std::vector<Channel> channels_;
  std::vector<std::uint32_t> with_room_;
  std::vector<std::uint32_t> landing_;  ///< [nranks] entries of landings_
  std::vector<std::uint64_t> last_;     ///< [nranks] ticket of the last copy for that peer
  std::deque<Landing> landings_;
};

}  // namespace marrow::proxy
