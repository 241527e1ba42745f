// SPDX-License-Identifier: Apache-2.0
// The options of an operation: what happens at the peer when the data has landed, what is counted
// here, who calls, what is already ordered, when the doorbell rings. Options are passed in any
// order after the fixed arguments.
#pragma once

#include "marrow/device/coop.cuh"
#include "marrow/device/team.cuh"

namespace marrow {

/// What a signal proves to the peer that sees it.
/// strong: its put and every put/put_value/add before it on the same context to the same peer.
/// weak: its own put only.
enum class Strength : std::uint8_t { strong, weak };

/// Adds n to the peer's signal `id`.
struct SignalAdd {
  std::int32_t id = 0;
  std::uint64_t n = 1;
  Strength strength = Strength::strong;
};

/// Adds n to a 64-bit word of the peer's window, at an 8-byte aligned byte offset. Counts as an add:
/// it takes the window's atomic path.
struct SignalAt {
  const WindowHandle& window;
  std::uint64_t offset = 0;
  std::uint64_t n = 1;
  Strength strength = Strength::strong;
};

/// Adds 1 to our counter `id` when the operation's source may be reused.
struct CounterInc {
  std::int32_t id = 0;
};

/// What the caller has already released: `released` is the widest scope of a release (fence or
/// publish) the caller made since it wrote the source. What a completion proves (docs/design.md 5) does
/// not depend on it, so there is no knob for less than the contract.
struct Ordering {
  enum class Released : std::uint8_t { nothing, block, device, system };
  Released released = Released::nothing;
};

/// now: the NIC or proxy is told at once. deferred: it may be told with a later operation on the
/// same context and peer; the next one with `now`, or any flush, tells it.
enum class Doorbell : std::uint8_t { now, deferred };

/// Source of a put or target of a get: a window (our own part) or a local buffer.
struct Region {
  std::byte* local = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t gda_local = 0;
  std::uint32_t gda_lkey = 0;
  std::uint32_t id = 0;
  std::uint32_t abi = 0;
  bool host_memory = false;
  bool staged = false;  ///< see WindowHandle
  std::uint64_t owner = 0;

  Region() = default;
  MARROW_HOST_DEVICE Region(const WindowHandle& w)  // NOLINT: implicit by design
      : local(w.local),
        bytes(w.bytes),
        gda_local(w.gda_local),
        gda_lkey(w.gda_lkey),
        id(w.id),
        abi(w.abi),
        host_memory(w.host_memory),
        staged(w.staged),
        owner(w.owner) {}
  MARROW_HOST_DEVICE Region(const LocalBufferHandle& b)  // NOLINT: implicit by design
      : local(b.local),
        bytes(b.bytes),
        gda_local(b.gda_local),
        gda_lkey(b.gda_lkey),
        id(b.id),
        abi(b.abi),
        host_memory(b.host_memory),
        staged(b.staged),
        owner(b.owner) {}
};

/// A rank, signal, counter or slot number that remembers, in MARROW_CHECKED builds, where in the
/// caller's source it was written.
struct Index {
  std::int32_t value;
#if defined(MARROW_CHECKED)
  const char* file;
  std::uint32_t line;
  MARROW_HOST_DEVICE constexpr Index(int v, const char* f = __builtin_FILE(),
                                     std::uint32_t l = __builtin_LINE())  // NOLINT
      : value(v), file(f), line(l) {}
#else
  MARROW_HOST_DEVICE constexpr Index(int v) : value(v) {}  // NOLINT: implicit by design
#endif
};

}  // namespace marrow
