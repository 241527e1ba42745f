// SPDX-License-Identifier: Apache-2.0
// The proxy path in memory: 64-byte descriptors in a ring that kernels fill and a CPU thread drains.
//
// A descriptor is four 16-byte chunks, each stored at once (store_cell), with the slot's lap bit in
// the top bit of each chunk's high word: the reader takes a chunk when its lap bit is that of the
// index it waits for, so publishing needs no order between chunks and no fence for what the
// descriptor itself carries. Everything a descriptor names is an index (rank, region, counter) that
// the thread checks against its own tables; no pointer travels.
//
// encode and decode stand here, so that both sides agree by construction. Word by word:
//   chunk 0 high   63 lap | 62..58 opcode | 57 strong | 56 has_add | 55..40 peer | 39..23 counter + 1 | 22..0 window
//   chunk 1 high   61..31 add_window | 30..0 region
//   chunk 3 high   62..0 add_offset (fetches: offset)
//                  put, get, add     put_value                   fetch_add, compare_swap
//   chunk 0 low    bytes             63..56 bytes | 55..0 offset 47..32 result slot | 31..0 generation
//   chunk 1 low    offset            value[0]                    operand
//   chunk 2 low    source_offset     value[1]                    compare
//   chunk 2 high   -                 add_n (63 bits)             -
//   chunk 3 low    add_n             value[2]                    -
#pragma once

#include "marrow/abi/abi.h"

namespace marrow {

enum class ProxyOpcode : std::uint8_t {
  none = 0,
  put = 1,        ///< region[source_offset] -> peer's window[offset], then the add
  put_value = 2,  ///< 1..24 inline bytes -> peer's window[offset], then the add
  get = 3,        ///< peer's window[offset] -> region[source_offset]
  add = 4,        ///< the add alone
  fetch_add = 5,  ///< old value goes to the ring's result slot
  compare_swap = 6,
  flush_remote =
      7,  ///< done when the peer can see everything posted before on this (context, peer)
};

/// Window ids in descriptors are smaller than this, ids of local buffers than the next.
inline constexpr std::uint32_t kProxyMaxWindows = 1u << 23;
inline constexpr std::uint32_t kProxyMaxRegions = 1u << 31;
/// Counter ids are 0 .. this - 1.
inline constexpr std::int32_t kProxyMaxCounters = (1 << 17) - 1;
/// Largest add that travels inside a put_value descriptor; a larger one takes its own.
inline constexpr std::uint64_t kProxyMaxFusedAdd = (std::uint64_t{1} << 63) - 1;
inline constexpr std::uint32_t kProxyMaxInline = 24;

struct alignas(16) ProxyChunk {
  std::uint64_t low;
  std::uint64_t high;
};
struct alignas(64) ProxyDescriptor {
  ProxyChunk chunk[4];
};
static_assert(sizeof(ProxyChunk) == 16 && offsetof(ProxyChunk, high) == 8);
static_assert(sizeof(ProxyDescriptor) == 64 && alignof(ProxyDescriptor) == 64);

inline constexpr std::uint64_t kProxyLapBit = std::uint64_t{1} << 63;

/// The lap bit of ring index i: it flips each time the ring is gone round. Set in the first lap, so
/// that zeroed memory is a ring that starts at index 0.
MARROW_HOST_DEVICE constexpr std::uint64_t proxy_lap(std::uint64_t index, std::uint32_t log_size) {
  return (index >> log_size & 1) ? 0 : kProxyLapBit;
}

/// A descriptor's content. Offsets and sizes are bytes.
struct ProxyOperation {
  ProxyOpcode opcode = ProxyOpcode::none;
  bool strong = true;
  bool has_add = false;
  std::uint16_t peer = 0;
  std::int32_t counter = -1;
  std::uint32_t window = 0;
  std::uint32_t region = 0;
  std::uint64_t offset = 0;
  std::uint64_t source_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t value[3] = {};
  std::uint32_t add_window = 0;
  std::uint64_t add_offset = 0;
  std::uint64_t add_n = 0;
  std::uint32_t result_slot = 0;
  std::uint32_t generation = 0;
  std::uint64_t operand = 0;
  std::uint64_t compare = 0;
};

/// The descriptor without its lap bits. Ids above their field are cut: the host refuses such regions.
MARROW_HOST_DEVICE constexpr ProxyDescriptor proxy_encode(const ProxyOperation& op) {
  constexpr std::uint64_t kId = kProxyMaxRegions - 1;
  constexpr std::uint64_t kCounter = kProxyMaxCounters;
  ProxyDescriptor d{};
  d.chunk[0].high = (static_cast<std::uint64_t>(op.opcode) & 31) << 58 |
                    static_cast<std::uint64_t>(op.strong) << 57 |
                    static_cast<std::uint64_t>(op.has_add) << 56 |
                    static_cast<std::uint64_t>(op.peer) << 40 |
                    (static_cast<std::uint64_t>(op.counter + 1) & kCounter) << 23 |
                    (op.window & (kProxyMaxWindows - 1));
  d.chunk[1].high = (op.add_window & kId) << 31 | (op.region & kId);
  d.chunk[3].high = op.add_offset & ~kProxyLapBit;
  if (op.opcode == ProxyOpcode::put_value) {
    d.chunk[0].low = op.bytes << 56 | (op.offset & 0xffffffffffffffu);
    d.chunk[1].low = op.value[0];
    d.chunk[2].low = op.value[1];
    d.chunk[2].high = op.add_n & ~kProxyLapBit;
    d.chunk[3].low = op.value[2];
  } else if (op.opcode == ProxyOpcode::fetch_add || op.opcode == ProxyOpcode::compare_swap) {
    d.chunk[0].low = static_cast<std::uint64_t>(op.result_slot & 0xffffu) << 32 | op.generation;
    d.chunk[1].low = op.operand;
    d.chunk[2].low = op.compare;
    d.chunk[3].high = op.offset & ~kProxyLapBit;
  } else {
    d.chunk[0].low = op.bytes;
    d.chunk[1].low = op.offset;
    d.chunk[2].low = op.source_offset;
    d.chunk[3].low = op.add_n;
  }
  return d;
}

/// The reverse; lap bits are ignored. Nothing is checked: the values are the kernel's claims.
MARROW_HOST_DEVICE constexpr ProxyOperation proxy_decode(const ProxyDescriptor& d) {
  constexpr std::uint64_t kId = kProxyMaxRegions - 1;
  constexpr std::uint64_t kCounter = kProxyMaxCounters;
  ProxyOperation op{};
  const std::uint64_t head = d.chunk[0].high;
  op.opcode = static_cast<ProxyOpcode>(head >> 58 & 31);
  op.strong = (head >> 57 & 1) != 0;
  op.has_add = (head >> 56 & 1) != 0;
  op.peer = static_cast<std::uint16_t>(head >> 40 & 0xffff);
  op.counter = static_cast<std::int32_t>(head >> 23 & kCounter) - 1;
  op.window = static_cast<std::uint32_t>(head & (kProxyMaxWindows - 1));
  op.add_window = static_cast<std::uint32_t>(d.chunk[1].high >> 31 & kId);
  op.region = static_cast<std::uint32_t>(d.chunk[1].high & kId);
  op.add_offset = d.chunk[3].high & ~kProxyLapBit;
  if (op.opcode == ProxyOpcode::put_value) {
    op.bytes = d.chunk[0].low >> 56;
    op.offset = d.chunk[0].low & 0xffffffffffffffu;
    op.value[0] = d.chunk[1].low;
    op.value[1] = d.chunk[2].low;
    op.value[2] = d.chunk[3].low;
    op.add_n = d.chunk[2].high & ~kProxyLapBit;
  } else if (op.opcode == ProxyOpcode::fetch_add || op.opcode == ProxyOpcode::compare_swap) {
    op.result_slot = static_cast<std::uint32_t>(d.chunk[0].low >> 32 & 0xffff);
    op.generation = static_cast<std::uint32_t>(d.chunk[0].low);
    op.operand = d.chunk[1].low;
    op.compare = d.chunk[2].low;
    op.offset = op.add_offset;
    op.add_offset = 0;
  } else {
    op.bytes = d.chunk[0].low;
    op.offset = d.chunk[1].low;
    op.source_offset = d.chunk[2].low;
    op.add_n = d.chunk[3].low;
  }
  return op;
}

/// Fetches that may be under way at once on one ring.
inline constexpr std::uint32_t kProxyFetchSlots = 256;

/// Kernel's side of one ring, in the executor's memory; the first line is constant.
/// A kernel takes n credits, then n indices; a failed take gives the credits back, so that a timeout
/// leaves nothing behind. Credits come from the distance between `consumed` (host memory, written by
/// the thread) and `consumed_seen`, the value they were last counted up to.
struct ProxyRing {
  alignas(64) ProxyDescriptor* slots;  ///< [1 << log_size], pinned host memory
  const std::uint64_t*
      consumed;  ///< pinned host memory: index of the first slot the thread has not read
  const ProxyChunk*
      results;  ///< [kProxyFetchSlots], pinned host memory: {old value, status << 32 | generation}
  std::uint32_t log_size;
  std::uint32_t reserved0;
  alignas(64) std::uint64_t producer;  ///< next index
  alignas(
      64) std::uint64_t credits;  ///< free slots nobody took (as signed; dips below 0 for a moment)
  std::uint64_t consumed_seen;
  alignas(64) std::uint64_t fetch_free[kProxyFetchSlots / 64];  ///< bit set: result slot is free
  alignas(64) std::uint32_t generation[kProxyFetchSlots];  ///< how often a result slot was taken
};
static_assert(sizeof(ProxyRing) == 4 * 64 + 4 * kProxyFetchSlots &&
              offsetof(ProxyRing, producer) == 64 && offsetof(ProxyRing, credits) == 128 &&
              offsetof(ProxyRing, fetch_free) == 192);

/// Completion of one (context, peer), pinned host memory, written by the thread.
struct alignas(16) ProxyCompletion {
  std::uint64_t
      completed;  ///< every operation of this queue with a ring index below is complete; stored last (release)
  std::uint64_t status;  ///< Status of the worst of them; stays
};
static_assert(sizeof(ProxyCompletion) == 16);

/// What DeviceCommunicator::proxy points at. 48 bytes.
struct ProxyDevice {
  std::uint32_t abi = 0;
  std::uint32_t threads =
      1;  ///< progress threads; ring of (context, peer) is context * threads + peer % threads
  ProxyRing* rings = nullptr;  ///< [contexts * threads]
  std::uint64_t* posted =
      nullptr;  ///< [contexts * nranks] ring index after the queue's last operation
  const ProxyCompletion* completion = nullptr;  ///< [contexts * nranks]
  std::uint64_t reserved[2] = {};
};
static_assert(sizeof(ProxyDevice) == 48 && offsetof(ProxyDevice, completion) == 24);

}  // namespace marrow
