// SPDX-License-Identifier: Apache-2.0
// The operations of one (device communicator, context, peer) that are under way, in ring order: a ring of
// 32-byte entries. They end in any order and are published in order. What a network carries as token is
// the queue's number and the operation's, so that a completion finds its entry by two shifts and a
// comparison; a token whose operation has ended finds nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "marrow/abi/proxy_ring.h"
#include "marrow/device/status.cuh"
#include "marrow/network.h"
#include "proxy/message.hpp"

namespace marrow::proxy {

/// No region, no side entry.
inline constexpr std::uint32_t kNone = ~0u;
inline constexpr std::uint32_t kNoWindow = (1u << 24) - 1;
static_assert(kProxyMaxWindows <= kNoWindow);

/// An operation under way, or a run of small ones that were posted together.
struct Operation {
  std::uint64_t index;        ///< of its (first) descriptor in the ring
  std::uint32_t region;       ///< it reads or writes while on the network; kNone
  std::int32_t counter;       ///< -1: none
  std::uint32_t extra;        ///< its Extra; kNone
  std::uint32_t network;      ///< network operations queued or posted
  std::uint32_t window : 24;  ///< of the peer, which it reads or writes on the network; kNoWindow
  std::uint32_t count : 8;    ///< descriptors in a row that it stands for
  ProxyOpcode opcode;
  std::uint8_t status;  ///< a Status
  bool reply;           ///< an answer is awaited
  bool done;

  void fail(Status with) {
    status = static_cast<std::uint8_t>(worse(static_cast<Status>(status), with));
  }
};
static_assert(sizeof(Operation) == 32);

/// What fetches, and puts out of staging slots of kernels, need besides.
struct Extra {
  std::uint32_t result_slot = kNone;
  std::uint32_t stage_slot = kNone;  ///< is free when the operation has ended
  std::uint32_t result_generation = 0;
  std::uint64_t old_value = 0;
};

/// In `compare` of a PUT: its data is not where the network can read it yet, or its target not known.
inline constexpr std::uint64_t kHeld = 1;

/// Network operations to one peer that the network has not taken yet.
class Outbox {
 public:
  explicit Outbox(std::uint32_t peer = 0) : peer_(peer) {}

  /// A new one at the end; only inline_data is not cleared.
  marrow_network_operation& add(std::uint32_t kind, std::uint64_t token) {
    if (end_ == capacity_) grow();
    marrow_network_operation& o = operations_[end_++];
    o.kind = kind;
    o.peer = peer_;
    o.token = token;
    o.local = o.remote = nullptr;
    o.local_offset = o.remote_offset = o.bytes = o.operand = o.compare = 0;
    o.immediate = o.has_immediate = 0;
    return o;
  }
  /// Room for n more, to be filled from the first on, every member but inline_data, and then added with
  /// added(). It holds earlier operations.
  marrow_network_operation* room(std::uint32_t n) {
    while (capacity_ - end_ < n) grow();
    return operations_.get() + end_;
  }
  void added(std::uint32_t n) { end_ += n; }
  std::uint32_t peer() const { return peer_; }
  marrow_network_operation* first() { return operations_.get() + head_; }
  std::uint32_t size() const { return end_ - head_; }
  bool empty() const { return head_ == end_; }
  void taken(std::uint32_t n) {
    head_ += n;
    if (head_ == end_) head_ = end_ = 0;
  }
  /// Keeps those of which keep(operation) is true.
  template <class Keep>
  void filter(Keep&& keep) {
    std::uint32_t to = head_;
    for (std::uint32_t i = head_; i < end_; ++i) {
      if (keep(operations_[i])) operations_[to++] = operations_[i];
    }
    end_ = to;
    if (head_ == end_) head_ = end_ = 0;
  }

  bool listed = false;  ///< among those to push
  std::uint32_t held =
      0;  ///< how many of its operations carry kHeld: none behind the first may be posted

 private:
  [[gnu::cold]] void grow() {
    if (head_ != 0 && head_ >= end_ / 2) {  // a queue that is never empty may not grow for ever
      std::copy(operations_.get() + head_, operations_.get() + end_, operations_.get());
      end_ -= head_;
      head_ = 0;
      return;
    }
    const std::uint32_t wanted = capacity_ ? capacity_ * 2 : 16;
    auto larger = std::make_unique<marrow_network_operation[]>(wanted);
    std::copy(operations_.get() + head_, operations_.get() + end_, larger.get());
    end_ -= head_;
    head_ = 0;
    operations_ = std::move(larger);
    capacity_ = wanted;
  }

  std::unique_ptr<marrow_network_operation[]> operations_;
  std::uint32_t capacity_ = 0;
  std::uint32_t head_ = 0;
  std::uint32_t end_ = 0;
  std::uint32_t peer_;
};

struct Ring;

class Queue {
 public:
  static constexpr int kNumberBits = 40;
  static constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << kNumberBits) - 1;
  /// Queue ids are 1 .. this; 0 is the token of nobody.
  static constexpr std::uint64_t kMaxId = (std::uint64_t{1} << (64 - kNumberBits)) - 1;

  /// @param first  number of its first operation: past those of whoever had this id before
  Queue(std::uint64_t id, std::uint64_t first) : id_(id), first_(first), next_(first) {}

  Operation& add(std::uint64_t index, ProxyOpcode opcode, std::int32_t counter) {
    if (next_ - first_ == capacity_) grow();
    Operation& op = at(next_++);
    op = {index, kNone, counter, kNone, 0, kNoWindow, 1, opcode, 0, false, false};
    return op;
  }
  /// Takes back the last add.
  void undo_add() { --next_; }
  std::uint64_t token_of_last() const { return token(next_ - 1); }
  std::uint64_t token(std::uint64_t number) const {
    return id_ << kNumberBits | (number & kNumberMask);
  }
  /// The operation of that token (of this queue's id) if it has not ended.
  Operation* find(std::uint64_t token) {
    const std::uint64_t place = (token - first_) & kNumberMask;
    if (place >= next_ - first_) return nullptr;
    Operation& op = at(first_ + place);
    return op.done ? nullptr : &op;
  }
  /// Calls body(token, operation) for each that has not ended.
  template <class Body>
  void each(Body&& body) {
    for (std::uint64_t n = first_; n != next_; ++n) {
      if (!at(n).done) body(token(n), at(n));
    }
  }
  /// Forgets those at the front that have ended. @return ring index behind the last of them; 0: there are none
  std::uint64_t retire() {
    std::uint64_t end = 0;
    while (first_ != next_ && at(first_).done) {
      const Operation& op = at(first_++);
      end = op.index + op.count;
    }
    return end;
  }
  std::uint64_t id() const { return id_; }
  std::uint64_t next_number() const { return next_; }

  Ring* ring = nullptr;
  int context = 0;
  int peer = 0;
  bool listed = false;  ///< among those to publish
  ProxyCompletion* completion = nullptr;
  Outbox* outbox = nullptr;
  Sending* sending = nullptr;
  std::uint32_t stream = 0;

 private:
  Operation& at(std::uint64_t number) { return operations_[number & (capacity_ - 1)]; }
  [[gnu::cold]] void grow() {
    const std::uint64_t wanted = capacity_ ? capacity_ * 2 : 16;
    auto larger = std::make_unique<Operation[]>(wanted);
    for (std::uint64_t n = first_; n != next_; ++n) larger[n & (wanted - 1)] = at(n);
    operations_ = std::move(larger);
    capacity_ = wanted;
  }

  const std::uint64_t id_;
  std::unique_ptr<Operation[]> operations_;
  std::uint64_t capacity_ = 0;  ///< a power of two
  std::uint64_t first_;         ///< number of the oldest that was not retired
  std::uint64_t next_;
};

}  // namespace marrow::proxy
