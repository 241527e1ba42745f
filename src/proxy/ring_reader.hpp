// SPDX-License-Identifier: Apache-2.0
// The thread's side of a ring: it takes descriptor i when all four chunks carry i's lap bit.
#pragma once

#include <atomic>
#include <cstring>

#include "marrow/abi/proxy_ring.h"

namespace marrow::proxy {

class RingReader {
 public:
  RingReader(const ProxyDescriptor* slots, std::uint32_t log_size, std::uint64_t first)
      : slots_(slots), log_size_(log_size), index_(first) {}

  /// The index that next() looks for.
  std::uint64_t index() const { return index_; }
  std::uint64_t size() const { return std::uint64_t{1} << log_size_; }

  /// Takes the next descriptor if it is there.
  bool next(ProxyDescriptor* out) { return take(out, 1) != 0; }

  // For a loop of the reader's user that looks at descriptors in place:

  /// The next one, and how many follow it before the ring's end, itself included: they have one lap bit.
  const ProxyDescriptor* place() const { return &slots_[index_ & (size() - 1)]; }
  std::uint64_t until_end() const { return size() - (index_ & (size() - 1)); }
  std::uint64_t lap() const { return proxy_lap(index_, log_size_); }
  void taken(std::uint32_t n) { index_ += n; }
  /// The last one that was taken comes again.
  void put_back() { --index_; }

  /// The acquire meets the producer's release: what it stored before it posted is visible here, the low
  /// word of this chunk too.
  static std::uint64_t high(const ProxyChunk& chunk) {
    const std::atomic_ref word(const_cast<std::uint64_t&>(chunk.high));
#if defined(MARROW_PLANT_RING_DRAIN)
    // Planted bug: the acquire is missing.
    return word.load(std::memory_order_relaxed);
#else
    return word.load(std::memory_order_acquire);
#endif
  }
  /// How many descriptors ahead to fetch, when deep() says that they are written already.
  static constexpr std::uint64_t kAhead = 96;
  /// Whether kDeep descriptors from here on are there (one says it for all). look_deep() fetches the word that
  /// the next deep() needs.
  static constexpr std::uint64_t kDeep = 256;
  bool deep() const {
    return !((high(deep_slot().chunk[0]) ^ proxy_lap(index_ + kDeep, log_size_)) & kProxyLapBit);
  }
  void look_deep() const { __builtin_prefetch(&deep_slot()); }

  /// Takes up to n of them, as many as are there.
  std::uint32_t take(ProxyDescriptor* out, std::uint32_t n) {
    const ProxyDescriptor* const slots = slots_;
    const std::uint32_t log_size = log_size_;
    const std::uint64_t mask = (std::uint64_t{1} << log_size) - 1;
    const std::uint64_t first = index_;
    std::uint32_t i = 0;
    for (; i != n; ++i) {
      const ProxyDescriptor& slot = slots[(first + i) & mask];
      const std::uint64_t lap = proxy_lap(first + i, log_size);
      const std::uint64_t differs = (high(slot.chunk[0]) ^ lap) | (high(slot.chunk[1]) ^ lap) |
                                    (high(slot.chunk[2]) ^ lap) | (high(slot.chunk[3]) ^ lap);
      if (differs & kProxyLapBit) break;
      // Acquired by the high words, and nobody writes here until we say so.
      std::memcpy(out + i, &slot, sizeof(slot));
    }
    index_ = first + i;
    return i;
  }

 private:
  const ProxyDescriptor& deep_slot() const { return slots_[(index_ + kDeep) & (size() - 1)]; }

  const ProxyDescriptor* slots_;
  std::uint32_t log_size_;
  std::uint64_t index_;
};

}  // namespace marrow::proxy
