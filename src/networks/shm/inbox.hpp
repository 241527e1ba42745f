// SPDX-License-Identifier: Apache-2.0
// What a rank receives through: one single-producer single-consumer ring of messages per source rank,
// in shared memory that the receiver makes. A put before a message is ordered by the ring itself: the
// sender's release of `head` meets the receiver's acquire.
#pragma once

#include <atomic>
#include <cstring>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "marrow/network.h"

namespace marrow::networks::shm {

inline constexpr std::uint32_t kSlots = 256;  // a power of two
inline constexpr std::uint32_t kInboxMagic = 0x4d534832;

/// A message, or the immediate of a put (bytes == 0).
struct Slot {
  std::uint32_t bytes;
  std::uint32_t immediate;
  std::uint8_t data[MARROW_NETWORK_MAX_MESSAGE];
};

struct Channel {
  alignas(64) std::uint64_t head;  ///< written by the sender
  alignas(64) std::uint64_t tail;  ///< written by the receiver
  alignas(64) Slot slots[kSlots];
};

struct InboxHeader {
  alignas(64) std::uint32_t magic;
  std::uint32_t nranks;
  std::uint32_t closed;  ///< 1: the owner leaves on purpose
};

/// The memory of one rank's inbox, ours or a peer's. A thread rank's inbox is shared by pointer, so
/// that it outlives its owner while a peer still writes to it.
class Inbox {
 public:
  /// Our own, for `nranks` sources. Throws Error.
  explicit Inbox(std::uint32_t nranks);
  /// A peer's, by its descriptor. Throws Error when it is not an inbox for `nranks` sources.
  Inbox(base::Fd fd, std::uint32_t nranks);

  int fd() const { return fd_.get(); }
  Channel& from(std::uint32_t rank) { return mapping_.as<Channel>(sizeof(InboxHeader))[rank]; }
  void set_closed() { std::atomic_ref(header().closed).store(1, std::memory_order_release); }
  bool closed() { return std::atomic_ref(header().closed).load(std::memory_order_acquire) != 0; }

 private:
  InboxHeader& header() { return *mapping_.as<InboxHeader>(); }
  static std::size_t bytes(std::uint32_t nranks) {
    return sizeof(InboxHeader) + std::size_t{nranks} * sizeof(Channel);
  }
  base::Fd fd_;
  base::Mapping mapping_;
};

/// The sending end of a channel; one thread.
class Sender {
 public:
  void attach(Channel* channel) {
    channel_ = channel;
    head_ = std::atomic_ref(channel->head).load(std::memory_order_relaxed);
  }

  /// False: the ring is full.
  bool space() {
    if (head_ - tail_seen_ < kSlots) return true;
    tail_seen_ = std::atomic_ref(channel_->tail).load(std::memory_order_acquire);
    return head_ - tail_seen_ < kSlots;
  }
  /// After space() said true.
  void send(const void* data, std::uint32_t bytes, std::uint32_t immediate) {
    Slot& slot = channel_->slots[head_ % kSlots];
    slot.bytes = bytes;
    slot.immediate = immediate;
    if (bytes) std::memcpy(slot.data, data, bytes);
    // Publishes the slot and every put made before; meets Receiver::next.
    std::atomic_ref(channel_->head).store(++head_, std::memory_order_release);
  }

 private:
  Channel* channel_ = nullptr;
  std::uint64_t head_ = 0;
  std::uint64_t tail_seen_ = 0;
};

/// The receiving end; one thread.
class Receiver {
 public:
  void attach(Channel* channel) { channel_ = channel; }

  /// The oldest message, or null. Good until pop().
  const Slot* next() {
    if (tail_ == head_seen_) {
      head_seen_ = std::atomic_ref(channel_->head).load(std::memory_order_acquire);
      if (tail_ == head_seen_) return nullptr;
    }
    return &channel_->slots[tail_ % kSlots];
  }
  void pop() { std::atomic_ref(channel_->tail).store(++tail_, std::memory_order_release); }

 private:
  Channel* channel_ = nullptr;
  std::uint64_t tail_ = 0;
  std::uint64_t head_seen_ = 0;
};

}  // namespace marrow::networks::shm
