// SPDX-License-Identifier: Apache-2.0
// How the CPU engine touches memory that others touch at the same time. The engine's templates take
// this as a policy, so that an engine on another processor brings its own. Payload moves with plain
// copies, except that small aligned pieces move word by word as relaxed atomics: a reader may poll an
// 8-byte cell inside a WRITE, as it may on a real NIC.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "softnic/far_memory.hpp"

namespace marrow::softnic {

struct HostAccess {
  /// Longer pieces are given to the engine's driver (a GPU has a whole block for them).
  static constexpr std::uint64_t kAlone = ~std::uint64_t{0};
  /// Bytes moved before other queues get their turn.
  static constexpr std::uint64_t kTurnBytes = std::uint64_t{1} << 20;

  static std::uint32_t load_acquire(const std::uint32_t* p) {
    if (FarMemory::is(p)) return far_load<std::uint32_t>(p);
    return std::atomic_ref<std::uint32_t>(*const_cast<std::uint32_t*>(p))
        .load(std::memory_order_acquire);
  }
  static std::uint64_t load_acquire(const std::uint64_t* p) {
    if (FarMemory::is(p)) return far_load<std::uint64_t>(p);
    return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(p))
        .load(std::memory_order_acquire);
  }
  static std::uint32_t load_relaxed(const std::uint32_t* p) {
    return std::atomic_ref<std::uint32_t>(*const_cast<std::uint32_t*>(p))
        .load(std::memory_order_relaxed);
  }
  static void store_release(std::uint32_t* p, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_release);
  }
  static void store_relaxed(std::uint32_t* p, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_relaxed);
  }
  /// Writes the 16 words of a completion entry, the last one last. Word stores, not a copy: a collapsed
  /// entry is rewritten while its reader may look at it.
  static void store_entry(std::uint32_t* p, const std::uint32_t (&words)[16]) {
    if (FarMemory::is(p)) return FarMemory::active()->copy(p, words, sizeof words);
    for (int i = 0; i < 15; ++i) store_relaxed(p + i, words[i]);
    store_completion(p + 15, words[15]);
  }
  /// The store that publishes a completion entry, and with it all that the operation did.
  static void store_completion(std::uint32_t* p, std::uint32_t value) {
#ifdef MARROW_PLANT_CQE_POST
    // Planted bug: what ThreadSanitizer must find when this release is missing.
    std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_relaxed);
#else
    std::atomic_ref<std::uint32_t>(*p).store(value, std::memory_order_release);
#endif
  }

  /// Reads bytes that an earlier acquire made visible (WQEs).
  static void read(void* to, const std::byte* from, std::size_t bytes) {
    if (FarMemory::is(from)) return FarMemory::active()->copy(to, from, bytes);
    std::memcpy(to, from, bytes);
  }

  /// Copies between memory of users. The ranges may overlap.
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (FarMemory::is(to) || FarMemory::is(from)) {
      return FarMemory::active()->copy(to, from, bytes);
    }
    if (bytes <= kSmall && aligned8(to, bytes) && aligned8(from, 0)) {
      if (to <= from) {
        for (std::size_t i = 0; i < bytes; i += 8) move8(to + i, from + i);
      } else {
        for (std::size_t i = bytes; i > 0; i -= 8) move8(to + i - 8, from + i - 8);
      }
      return;
    }
    std::memmove(to, from, bytes);
  }
  /// Copies the engine's own bytes (inline payload) to memory of users.
  static void place(std::byte* to, const std::uint8_t* from, std::size_t bytes) {
    if (FarMemory::is(to)) return FarMemory::active()->copy(to, from, bytes);
    if (bytes <= kSmall && aligned8(to, bytes)) {
      for (std::size_t i = 0; i < bytes; i += 8) {
        std::uint64_t word;
        std::memcpy(&word, from + i, 8);
        std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(to + i))
            .store(word, std::memory_order_relaxed);
      }
      return;
    }
    std::memcpy(to, from, bytes);
  }

  /// Atomic read-modify-write. A signal word is released after the data of earlier WRITEs.
  template <class Word, class Update>
  static Word update(std::byte* at, Update&& next) {
    if (FarMemory::is(at)) return far_update<Word>(at, next);
    std::atomic_ref<Word> word(*reinterpret_cast<Word*>(at));
    Word old = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(old, next(old), std::memory_order_acq_rel,
                                       std::memory_order_relaxed)) {
    }
    return old;
  }
  /// The same, but not atomic against anyone who does not hold the NIC's lock.
  template <class Word, class Update>
  static Word update_unlocked(std::byte* at, Update&& next) {
    if (FarMemory::is(at)) return far_update<Word>(at, next);
    std::atomic_ref<Word> word(*reinterpret_cast<Word*>(at));
    const Word old = word.load(std::memory_order_acquire);
    word.store(next(old), std::memory_order_release);
    return old;
  }

 private:
  template <class Word>
  static Word far_load(const void* p) {
    Word value;
    FarMemory::active()->copy(&value, p, sizeof value);
    return value;
  }
  template <class Word, class Update>
  static Word far_update(std::byte* at, Update&& next) {
    const Word old = far_load<Word>(at);
    const Word value = next(old);
    FarMemory::active()->copy(at, &value, sizeof value);
    return old;
  }

  static constexpr std::size_t kSmall = 256;
  static bool aligned8(const void* p, std::size_t bytes) {
    return ((reinterpret_cast<std::uintptr_t>(p) | bytes) & 7) == 0;
  }
  static void move8(std::byte* to, const std::byte* from) {
    const auto* source = reinterpret_cast<const std::uint64_t*>(from);
    const std::uint64_t word = std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(source))
                                   .load(std::memory_order_relaxed);
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(to))
        .store(word, std::memory_order_relaxed);
  }
};

}  // namespace marrow::softnic
