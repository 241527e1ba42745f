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
/// From here on: a device communicator's staging slots. Puts from there give their slot back when they end.
inline constexpr std::uint32_t kProxyStageRegions = kProxyMaxRegions - 64;
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

/// Fields of a descriptor where they lie; lap bits are ignored. Nothing is checked: the values are the
/// kernel's claims. Which of them count is the opcode's business (table above).
class ProxyFields {
 public:
  explicit constexpr MARROW_HOST_DEVICE ProxyFields(const ProxyDescriptor& d) : d_(d) {}

  constexpr MARROW_HOST_DEVICE ProxyOpcode opcode() const {
    return static_cast<ProxyOpcode>(d_.chunk[0].high >> 58 & 31);
  }
  constexpr MARROW_HOST_DEVICE bool strong() const { return (d_.chunk[0].high >> 57 & 1) != 0; }
  constexpr MARROW_HOST_DEVICE bool has_add() const { return (d_.chunk[0].high >> 56 & 1) != 0; }
  constexpr MARROW_HOST_DEVICE std::uint16_t peer() const {
    return static_cast<std::uint16_t>(d_.chunk[0].high >> 40);
  }
  /// -1: none
  constexpr MARROW_HOST_DEVICE std::int32_t counter() const {
    return static_cast<std::int32_t>(d_.chunk[0].high >> 23 & kProxyMaxCounters) - 1;
  }
  constexpr MARROW_HOST_DEVICE std::uint32_t window() const {
    return static_cast<std::uint32_t>(d_.chunk[0].high & (kProxyMaxWindows - 1));
  }
  constexpr MARROW_HOST_DEVICE std::uint32_t add_window() const {
    return static_cast<std::uint32_t>(d_.chunk[1].high >> 31 & (kProxyMaxRegions - 1));
  }
  constexpr MARROW_HOST_DEVICE std::uint32_t region() const {
    return static_cast<std::uint32_t>(d_.chunk[1].high & (kProxyMaxRegions - 1));
  }
  constexpr MARROW_HOST_DEVICE std::uint64_t add_offset() const {
    return d_.chunk[3].high & ~kProxyLapBit;
  }
  constexpr MARROW_HOST_DEVICE bool is_value() const { return opcode() == ProxyOpcode::put_value; }
  constexpr MARROW_HOST_DEVICE bool is_fetch() const {
    return opcode() == ProxyOpcode::fetch_add || opcode() == ProxyOpcode::compare_swap;
  }
  constexpr MARROW_HOST_DEVICE std::uint64_t add_n() const {
    return is_value() ? d_.chunk[2].high & ~kProxyLapBit : d_.chunk[3].low;
  }
  // put, get
  constexpr MARROW_HOST_DEVICE std::uint64_t bytes() const { return d_.chunk[0].low; }
  constexpr MARROW_HOST_DEVICE std::uint64_t offset() const { return d_.chunk[1].low; }
  constexpr MARROW_HOST_DEVICE std::uint64_t source_offset() const { return d_.chunk[2].low; }
  // put_value
  constexpr MARROW_HOST_DEVICE std::uint64_t value_bytes() const { return d_.chunk[0].low >> 56; }
  constexpr MARROW_HOST_DEVICE std::uint64_t value_offset() const {
    return d_.chunk[0].low & 0xffffffffffffffu;
  }
  constexpr MARROW_HOST_DEVICE std::uint64_t value(int i) const { return d_.chunk[i + 1].low; }
  // fetch_add, compare_swap
  constexpr MARROW_HOST_DEVICE std::uint32_t result_slot() const {
    return static_cast<std::uint32_t>(d_.chunk[0].low >> 32 & 0xffff);
  }
  constexpr MARROW_HOST_DEVICE std::uint32_t generation() const {
    return static_cast<std::uint32_t>(d_.chunk[0].low);
  }
  constexpr MARROW_HOST_DEVICE std::uint64_t operand() const { return d_.chunk[1].low; }
  constexpr MARROW_HOST_DEVICE std::uint64_t compare() const { return d_.chunk[2].low; }
  constexpr MARROW_HOST_DEVICE std::uint64_t fetch_offset() const { return add_offset(); }

 private:
  const ProxyDescriptor& d_;
};

/// All of them.
MARROW_HOST_DEVICE constexpr ProxyOperation proxy_decode(const ProxyDescriptor& d) {
  const ProxyFields f(d);
  ProxyOperation op{};
  op.opcode = f.opcode();
  op.strong = f.strong();
  op.has_add = f.has_add();
  op.peer = f.peer();
  op.counter = f.counter();
  op.window = f.window();
  op.add_window = f.add_window();
  op.region = f.region();
  if (f.is_fetch()) {
    op.result_slot = f.result_slot();
    op.generation = f.generation();
    op.operand = f.operand();
    op.compare = f.compare();
    op.offset = f.fetch_offset();
    return op;
  }
  op.add_offset = f.add_offset();
  op.add_n = f.add_n();
  if (f.is_value()) {
    op.bytes = f.value_bytes();
    op.offset = f.value_offset();
    for (int i = 0; i < 3; ++i) op.value[i] = f.value(i);
  } else {
    op.bytes = f.bytes();
    op.offset = f.offset();
    op.source_offset = f.source_offset();
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
  std::uint64_t limit;  ///< exclusive contexts: no room from this index on until `consumed` says so
  alignas(
      64) std::uint64_t credits;  ///< free slots nobody took (as signed; dips below 0 for a moment)
  std::uint64_t consumed_seen;
  std::uint64_t looking;  ///< 1: a waiter is looking at `consumed`
  alignas(64) std::uint64_t fetch_free[kProxyFetchSlots / 64];  ///< bit set: result slot is free
  alignas(64) std::uint32_t generation[kProxyFetchSlots];  ///< how often a result slot was taken
};
static_assert(sizeof(ProxyRing) == 4 * 64 + 4 * kProxyFetchSlots &&
              offsetof(ProxyRing, producer) == 64 && offsetof(ProxyRing, credits) == 128 &&
              offsetof(ProxyRing, fetch_free) == 192);

inline constexpr std::uint64_t kProxyFailed = std::uint64_t{1} << 63;

/// Completion of one (context, peer), pinned host memory, written by the thread. A cache line each: the
/// queues of several threads lie side by side.
struct alignas(64) ProxyCompletion {
  /// Every operation of this queue with a ring index below is complete; stored last (release). With
  /// kProxyFailed when status says how: a kernel needs no second look at host memory to know that all is well.
  std::uint64_t completed;
  std::uint64_t status;  ///< Status of the worst of them; stays
};
static_assert(sizeof(ProxyCompletion) == 64);

/// What DeviceCommunicator::proxy points at. 128 bytes.
struct ProxyDevice {
  std::uint32_t abi = 0;
  std::uint32_t threads =
      1;  ///< progress threads; ring of (context, peer) is context * threads + peer % threads
  ProxyRing* rings = nullptr;  ///< [contexts * threads]
  std::uint64_t* posted =
      nullptr;  ///< [contexts * nranks] ring index after the queue's last operation
  const ProxyCompletion* completion = nullptr;  ///< [contexts * nranks]
  std::uint64_t magic = 0;                      ///< proxy_magic(threads)
  ProxyDescriptor* slots = nullptr;  ///< of ring 0; those of ring r begin r << log_size behind it
  std::uint32_t log_size = 0;        ///< of each ring
  std::uint32_t stage_bytes =
      0;  ///< puts up to this size from staged memory are written by the kernel; 0: none
  std::uint32_t stage_log_slot = 0;      ///< bytes of a staging slot
  std::uint32_t stage_log_size = 0;      ///< staging slots of each ring
  std::uint32_t stage_region = 0;        ///< its id
  std::uint32_t stage_thread_bytes = 0;  ///< and up to this size for each calling thread
  /// Staging slots of a ring are taken as ring slots are: [contexts * threads], of which slots and results are
  /// null. The thread gives them back in order, by `consumed`, when the network has read them.
  ProxyRing* stage_rings = nullptr;
  std::byte* stage =
      nullptr;  ///< pinned host memory [rings][1 << stage_log_size][1 << stage_log_slot]
  /// Pinned host memory [rings][1 << stage_log_size]: a kernel that took a slot and could not post writes its
  /// index + 1 here.
  std::uint64_t* stage_unused = nullptr;
  std::uint64_t reserved[4] = {};
};
static_assert(sizeof(ProxyDevice) == 128 && offsetof(ProxyDevice, completion) == 24);

/// peer % threads without a division, which takes a lone GPU thread longer than the rest of a post:
/// exact for peers below 2^16 and up to 2^16 threads.
constexpr std::uint64_t proxy_magic(std::uint32_t threads) {
  return ((std::uint64_t{1} << 32) + threads - 1) / threads;
}
MARROW_HOST_DEVICE constexpr std::uint32_t proxy_thread_of(std::uint32_t peer,
                                                           std::uint32_t threads,
                                                           std::uint64_t magic) {
  return peer - static_cast<std::uint32_t>(peer * magic >> 32) * threads;
}

}  // namespace marrow
