// SPDX-License-Identifier: Apache-2.0
// The thread's side of a ring: it takes descriptor i when all four chunks carry i's lap bit.
#pragma once

#include "marrow/abi/proxy_ring.h"
#include "marrow/device/platform.cuh"

namespace marrow::proxy {

class RingReader {
 public:
  RingReader(const ProxyDescriptor* slots, std::uint32_t log_size, std::uint64_t first)
      : slots_(slots), log_size_(log_size), index_(first) {}

  /// The index that next() looks for.
  std::uint64_t index() const { return index_; }

  /// Takes the next descriptor if it is there.
  bool next(ProxyDescriptor* out) {
    const ProxyDescriptor& slot = slots_[index_ & ((std::uint64_t{1} << log_size_) - 1)];
    const std::uint64_t lap = proxy_lap(index_, log_size_);
    for (int i = 0; i < 4; ++i) {
      const Cell16 cell = load(&slot.chunk[i]);
      if ((cell.high & kProxyLapBit) != lap) return false;
      out->chunk[i] = {cell.low, cell.high};
    }
    ++index_;
    return true;
  }

 private:
  /// The acquire meets the producer's release: what it stored before it posted is visible here.
  static Cell16 load(const ProxyChunk* chunk) {
#if defined(MARROW_PLANT_RING_DRAIN)
    // Planted bug: the acquire is missing.
    return {load_relaxed<Scope::system>(&chunk->low), load_relaxed<Scope::system>(&chunk->high)};
#else
    return load_cell(chunk);
#endif
  }

  const ProxyDescriptor* slots_;
  std::uint32_t log_size_;
  std::uint64_t index_;
};

}  // namespace marrow::proxy
