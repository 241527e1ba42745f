// SPDX-License-Identifier: Apache-2.0
// What the conformance kernels share: patterns that change with every iteration, poison that must
// survive around a message, and the exchange in which every rank sends to every rank, itself
// included, verifies each byte, poisons the slot again and hands it back.
#pragma once

#include "conformance/case.hpp"
#include "marrow/device.cuh"

// Not inlined: dozens of kernels times three groups times three paths would cost nvcc minutes.
#if defined(__CUDACC__)
#define MARROW_CASE_FUNCTION __noinline__ __device__ inline
#else
#define MARROW_CASE_FUNCTION __attribute__((noinline)) inline
#endif

namespace marrow::conformance {

// ---- reports --------------------------------------------------------------------------------

MARROW_CASE_FUNCTION void fail(const Args& a, int line, std::int64_t it, std::int64_t peer,
                               std::int64_t index, std::uint64_t got, std::uint64_t want) {
  if (fetch_add_relaxed<Scope::system>(&a.report->errors, std::uint64_t{1}) != 0) return;
  a.report->line = line;
  a.report->iteration = it;
  a.report->peer = peer;
  a.report->index = index;
  a.report->got = got;
  a.report->want = want;
}
/// False (and a report) when the status is not the expected one.
MARROW_DEVICE bool expect(const Args& a, Status got, Status want, std::int64_t it,
                          std::int64_t peer, int line = __builtin_LINE()) {
  if (got == want) return true;
  fail(a, line, it, peer, -1, static_cast<std::uint64_t>(got), static_cast<std::uint64_t>(want));
  return false;
}
MARROW_DEVICE bool ok(const Args& a, Status got, std::int64_t it, std::int64_t peer,
                      int line = __builtin_LINE()) {
  return expect(a, got, Status::ok, it, peer, line);
}
MARROW_DEVICE bool same(const Args& a, std::uint64_t got, std::uint64_t want, std::int64_t it,
                        std::int64_t peer, std::int64_t index = 0, int line = __builtin_LINE()) {
  if (got != want) fail(a, line, it, peer, index, got, want);
  return got == want;
}

// ---- data -----------------------------------------------------------------------------------

MARROW_HOST_DEVICE constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
/// Names the message that `source` sends to `target` in iteration `it`.
MARROW_DEVICE std::uint64_t key_of(const Args& a, int source, int target, std::int64_t it) {
  return mix(a.seed * 0x9e3779b97f4a7c15ull + static_cast<std::uint64_t>(source) * 65537 +
             static_cast<std::uint64_t>(target) * 257 + static_cast<std::uint64_t>(it) * 0x10001);
}
MARROW_DEVICE std::uint8_t pattern(std::uint64_t key, std::uint64_t i) {
  return static_cast<std::uint8_t>(mix(key + i / 8) >> (i % 8 * 8));
}
MARROW_DEVICE std::uint8_t poison_byte(std::int64_t it) {
  return static_cast<std::uint8_t>(0xc3 ^ (it * 29));
}

/// Plain stores by the group: they are what the operation under test must publish.
template <class Coop>
MARROW_CASE_FUNCTION void fill(const Coop& coop, std::byte* p, std::uint64_t bytes,
                               std::uint64_t key) {
  for (std::uint64_t i = coop.rank(); i * 8 < bytes; i += coop.size()) {
    const std::uint64_t word = mix(key + i);
    if ((reinterpret_cast<std::uintptr_t>(p) & 7) == 0 && i * 8 + 8 <= bytes) {
      reinterpret_cast<std::uint64_t*>(p)[i] = word;
    } else {
      for (std::uint64_t j = i * 8; j < bytes && j < i * 8 + 8; ++j) {
        p[j] = static_cast<std::byte>(word >> (j % 8 * 8));
      }
    }
  }
}
template <class Coop>
MARROW_CASE_FUNCTION void poison(const Coop& coop, std::byte* p, std::uint64_t bytes,
                                 std::int64_t it) {
  for (std::uint64_t i = coop.rank(); i < bytes; i += coop.size()) {
    p[i] = static_cast<std::byte>(poison_byte(it));
  }
}
/// Plain loads by the group of what the completion under test must have made visible.
template <class Coop>
MARROW_CASE_FUNCTION void verify(const Args& a, const Coop& coop, const std::byte* p,
                                 std::uint64_t bytes, std::uint64_t key, std::int64_t it, int peer,
                                 int line = __builtin_LINE()) {
  for (std::uint64_t i = coop.rank(); i * 8 < bytes; i += coop.size()) {
    const std::uint64_t word = mix(key + i);
    if ((reinterpret_cast<std::uintptr_t>(p) & 7) == 0 && i * 8 + 8 <= bytes) {
      const std::uint64_t got = reinterpret_cast<const std::uint64_t*>(p)[i];
      if (got != word) fail(a, line, it, peer, static_cast<std::int64_t>(i * 8), got, word);
    } else {
      for (std::uint64_t j = i * 8; j < bytes && j < i * 8 + 8; ++j) {
        const auto want = static_cast<std::uint8_t>(word >> (j % 8 * 8));
        const auto got = static_cast<std::uint8_t>(p[j]);
        if (got != want) fail(a, line, it, peer, static_cast<std::int64_t>(j), got, want);
      }
    }
  }
}
template <class Coop>
MARROW_CASE_FUNCTION void verify_poison(const Args& a, const Coop& coop, const std::byte* p,
                                        std::uint64_t bytes, std::int64_t it, int peer,
                                        std::int64_t index, int line = __builtin_LINE()) {
  for (std::uint64_t i = coop.rank(); i < bytes; i += coop.size()) {
    const auto got = static_cast<std::uint8_t>(p[i]);
    if (got != poison_byte(it)) {
      fail(a, line, it, peer, index + static_cast<std::int64_t>(i), got, poison_byte(it));
    }
  }
}

// ---- places ---------------------------------------------------------------------------------

MARROW_DEVICE std::uint64_t inbox_offset(const Args& a, int source) {
  return a.base + static_cast<std::uint64_t>(source) * slot_stride(a.bytes) + kGuard +
         a.target_shift;
}
MARROW_DEVICE std::uint64_t outbox_offset(const Args& a, int target) {
  return static_cast<std::uint64_t>(target) * slot_stride(a.bytes) + kGuard + a.source_shift;
}
MARROW_DEVICE std::uint64_t word_offset(const Args& a, std::uint64_t word) {
  return a.base + static_cast<std::uint64_t>(a.comm.nranks) * slot_stride(a.bytes) + word * 8;
}
MARROW_DEVICE std::uint64_t* own_word(const Args& a, std::uint64_t word) {
  return reinterpret_cast<std::uint64_t*>(a.inbox.local + word_offset(a, word));
}
MARROW_DEVICE std::byte* inbox_slot(const Args& a, int source) {
  return a.inbox.local + inbox_offset(a, source);
}
MARROW_DEVICE Region source_region(const Args& a) {
  return a.use_local ? Region(a.local) : Region(a.outbox);
}
MARROW_DEVICE std::byte* source_slot(const Args& a, int target) {
  return (a.use_local ? a.local.local : a.outbox.local) + outbox_offset(a, target);
}

/// Signals 0 .. n-1: data from that rank. n .. 2n-1: that rank has emptied our slot at its place.
/// From 2n on: free for cases.
MARROW_DEVICE int data_signal(const Args&, int source) { return source; }
MARROW_DEVICE int ack_signal(const Args& a, int source) { return a.comm.nranks + source; }
MARROW_DEVICE int free_signal(const Args& a, int i) { return 2 * a.comm.nranks + i; }

/// Peers in an order that differs per rank, ourselves first.
MARROW_DEVICE int nth_peer(const Args& a, int k) { return (a.comm.rank + k) % a.comm.nranks; }

/// A random pause: waiting for nothing, so that it ends at its deadline.
MARROW_CASE_FUNCTION void pause(const Args& a, std::int64_t it, int salt) {
  if (a.delay_ns <= 0) return;
  const std::uint64_t dice =
      mix(a.seed + static_cast<std::uint64_t>(it) * 1000003 + salt * 7919 + a.comm.rank);
  if (dice % 4 != 0) return;
  (void)wait_until(a.comm, Deadline{1 + (dice >> 8) % static_cast<std::uint64_t>(a.delay_ns)},
                   [] { return false; });
}

// ---- operations -----------------------------------------------------------------------------

/// Gin's operations, each compiled once per set of options.
template <class Gin_ = Gin<>>
class Ops {
 public:
  MARROW_DEVICE Ops(const DeviceCommunicator& comm, int context) : gin_(comm, context) {}
  MARROW_DEVICE Status status() const { return gin_.status(); }

  template <class... O>
  MARROW_CASE_FUNCTION Status put(int peer, const WindowHandle& window, std::uint64_t to,
                                  const Region& source, std::uint64_t from, std::uint64_t bytes,
                                  const O&... options) const {
    return gin_.put(peer, window, to, source, from, bytes, options...);
  }
  template <class T, class... O>
  MARROW_CASE_FUNCTION Status put_value(int peer, const WindowHandle& window, std::uint64_t to,
                                        const T& value, const O&... options) const {
    return gin_.put_value(peer, window, to, value, options...);
  }
  template <class... O>
  MARROW_CASE_FUNCTION Status get(int peer, const WindowHandle& window, std::uint64_t from,
                                  const Region& target, std::uint64_t to, std::uint64_t bytes,
                                  const O&... options) const {
    return gin_.get(peer, window, from, target, to, bytes, options...);
  }
  template <class... O>
  MARROW_CASE_FUNCTION Status add(int peer, const WindowHandle& window, std::uint64_t at,
                                  std::uint64_t n, const O&... options) const {
    return gin_.add(peer, window, at, n, options...);
  }
  MARROW_CASE_FUNCTION Status fetch_add(int peer, const WindowHandle& window, std::uint64_t at,
                                        std::uint64_t n, std::uint64_t* old) const {
    return gin_.fetch_add(peer, window, at, n, old);
  }
  MARROW_CASE_FUNCTION Status compare_swap(int peer, const WindowHandle& window, std::uint64_t at,
                                           std::uint64_t expected, std::uint64_t desired,
                                           std::uint64_t* old) const {
    return gin_.compare_swap(peer, window, at, expected, desired, old);
  }
  template <class Action, class... O>
  MARROW_CASE_FUNCTION Status signal(int peer, const Action& action, const O&... options) const {
    return gin_.signal(peer, action, options...);
  }
  template <class... O>
  MARROW_CASE_FUNCTION Status wait_signal(int id, std::uint64_t at_least,
                                          const O&... options) const {
    return gin_.wait_signal(id, at_least, options...);
  }
  template <class... O>
  MARROW_CASE_FUNCTION Status wait_signal_shadow(int id, std::uint64_t delta,
                                                 const O&... options) const {
    return gin_.wait_signal_shadow(id, delta, options...);
  }
  MARROW_DEVICE Status test_signal(int id, std::uint64_t at_least) const {
    return gin_.test_signal(id, at_least);
  }
  MARROW_DEVICE std::uint64_t read_signal(int id) const { return gin_.read_signal(id); }
  MARROW_DEVICE void reset_signal(int id) const { gin_.reset_signal(id); }
  MARROW_DEVICE std::uint64_t* signal_shadow(int id) const { return gin_.signal_shadow(id); }
  MARROW_DEVICE Status wait_any(const std::int32_t* ids, const std::uint64_t* at_least, int count,
                                int* which, Deadline deadline = {}) const {
    return gin_.wait_any(ids, at_least, count, which, deadline);
  }
  template <class... O>
  MARROW_CASE_FUNCTION Status wait_counter(int id, std::uint64_t n, const O&... options) const {
    return gin_.wait_counter(id, n, options...);
  }
  MARROW_DEVICE std::uint64_t read_counter(int id) const { return gin_.read_counter(id); }
  MARROW_DEVICE void reset_counter(int id) const { gin_.reset_counter(id); }
  template <class... O>
  requires(detail::is_option<O>&&...) MARROW_CASE_FUNCTION Status flush(const O&... options)
  const { return gin_.flush(options...); }
  template <class... O>
  MARROW_CASE_FUNCTION Status flush(int peer, const O&... options) const {
    return gin_.flush(Index(peer), options...);
  }
  MARROW_CASE_FUNCTION Status flush_async(int peer, Request* request) const {
    return gin_.flush_async(peer, request);
  }
  MARROW_CASE_FUNCTION Status test(const Request& request) const { return gin_.test(request); }
  MARROW_CASE_FUNCTION Status wait(const Request& request) const { return gin_.wait(request); }
  template <class... O>
  MARROW_CASE_FUNCTION Status flush_remote(const O&... options) const {
    return gin_.flush_remote(options...);
  }
  MARROW_CASE_FUNCTION Status send_packet(int peer, int slot, std::uint64_t value,
                                          std::uint64_t epoch) const {
    return gin_.send_packet(peer, slot, value, epoch);
  }
  MARROW_CASE_FUNCTION Status receive_packet(int slot, std::uint64_t epoch, std::uint64_t* value,
                                             Deadline deadline = {}) const {
    return gin_.receive_packet(slot, epoch, value, deadline);
  }

 private:
  Gin_ gin_;
};

template <class Coop>
MARROW_CASE_FUNCTION Status meet(const Args& a, const Team& team, int slot, const Coop& coop,
                                 Contexts contexts = {}, Fence fence = Fence::put) {
  return Barrier(a.comm, team, slot).sync(coop, contexts, fence);
}

// ---- the exchange ---------------------------------------------------------------------------

/// body(coop) by the group the row names; other threads do nothing.
template <class Body>
MARROW_DEVICE void with_group(const Args& a, Body&& body) {
  if (a.group == Group::thread) {
    if (thread_index() == 0) body(Thread{});
  } else if (a.group == Group::warp) {
    if (thread_index() < warp_lanes()) body(Warp{});
  } else {
    body(Block{});
  }
}

/// Receives one message: checks it and what lies around it, poisons all of it, hands it back.
template <class Gin_, class Coop>
MARROW_CASE_FUNCTION bool take(const Args& a, const Gin_& gin, const Coop& coop, int source,
                               std::int64_t it, int line = __builtin_LINE()) {
  std::byte* slot = inbox_slot(a, source);
  verify(a, coop, slot, a.bytes, key_of(a, source, a.comm.rank, it), it, source, line);
  verify_poison(a, coop, slot - kGuard, kGuard, it, source, -static_cast<std::int64_t>(kGuard),
                line);
  verify_poison(a, coop, slot + a.bytes, kGuard, it, source, static_cast<std::int64_t>(a.bytes),
                line);
  coop.sync();
  poison(coop, slot - kGuard, a.bytes + 2 * kGuard, it + 1);
  return ok(a, gin.signal(source, SignalAdd{ack_signal(a, a.comm.rank)}, coop), it, source, line);
}

/// Waits until every peer has handed back what it got in iteration `it`.
template <class Gin_, class Coop>
MARROW_CASE_FUNCTION bool await_acks(const Args& a, const Gin_& gin, const Coop& coop,
                                     std::int64_t it, int line = __builtin_LINE()) {
  for (int k = 0; k < a.comm.nranks; ++k) {
    const int peer = nth_peer(a, k);
    if (!ok(a, gin.wait_signal(ack_signal(a, peer), it + 1, coop), it, peer, line)) return false;
  }
  return true;
}

/// `iterations` rounds: send(gin, it) sends to every rank, and the message of rank s is complete at
/// us when arrived(gin, s, it) returns ok; then all of it is checked.
template <class Coop, class Send, class Arrived>
MARROW_DEVICE void exchange(const Args& a, const Coop& coop, Send&& send, Arrived&& arrived) {
  const Ops<> gin(a.comm, a.context);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    if (!send(gin, it)) return;
    pause(a, it, 1);
    for (int k = 0; k < a.comm.nranks; ++k) {
      const int source = (a.comm.rank + a.comm.nranks - k) % a.comm.nranks;
      if (!ok(a, arrived(gin, source, it), it, source)) return;
      if (!take(a, gin, coop, source, it)) return;
    }
    pause(a, it, 2);
    if (!await_acks(a, gin, coop, it)) return;
  }
}
/// The same; a message is complete when its source's data signal has counted it.
template <class Coop, class Send>
MARROW_DEVICE void exchange(const Args& a, const Coop& coop, Send&& send) {
  exchange(a, coop, send, [&](const auto& gin, int source, std::int64_t it) {
    return gin.wait_signal(data_signal(a, source), it + 1, coop);
  });
}

/// For each peer: the source is filled, then post(peer, source_offset, target_offset) -> Status.
template <class Coop, class Post>
MARROW_DEVICE bool send_each(const Args& a, const Coop& coop, std::int64_t it, Post&& post,
                             int line = __builtin_LINE()) {
  for (int k = 0; k < a.comm.nranks; ++k) {
    const int peer = nth_peer(a, k);
    fill(coop, source_slot(a, peer), a.bytes, key_of(a, a.comm.rank, peer, it));
    pause(a, it, 10 + k);
    if (!ok(a, post(peer, outbox_offset(a, peer), inbox_offset(a, a.comm.rank)), it, peer, line)) {
      return false;
    }
  }
  return true;
}
/// The same without filling.
template <class Post>
MARROW_DEVICE bool each_peer(const Args& a, std::int64_t it, Post&& post,
                             int line = __builtin_LINE()) {
  for (int k = 0; k < a.comm.nranks; ++k) {
    const int peer = nth_peer(a, k);
    if (!ok(a, post(peer), it, peer, line)) return false;
  }
  return true;
}

/// Reads the slot that every peer keeps for us in its outbox. `completed` says when it is here.
template <class Coop, class Completed>
MARROW_DEVICE void gets(const Args& a, const Coop& coop, Completed&& completed) {
  const Ops<> gin(a.comm, a.context);
  std::byte* target = (a.use_local ? a.local.local : a.inbox.local);
  const Region region = a.use_local ? Region(a.local) : Region(a.inbox);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      fill(coop, a.outbox.local + outbox_offset(a, peer), a.bytes,
           key_of(a, a.comm.rank, peer, it));
    }
    const bool told = each_peer(a, it, [&](int peer) {
      return gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop);
    });
    if (!told) return;
    pause(a, it, 1);
    for (int k = 0; k < a.comm.nranks; ++k) {
      const int source = nth_peer(a, k);
      if (!ok(a, gin.wait_signal(data_signal(a, source), it + 1, coop), it, source)) return;
      const std::uint64_t to = a.use_local ? outbox_offset(a, source) : inbox_offset(a, source);
      if (!completed(gin, it, source, outbox_offset(a, a.comm.rank), region, to)) return;
      std::byte* slot = target + to;
      verify(a, coop, slot, a.bytes, key_of(a, source, a.comm.rank, it), it, source);
      verify_poison(a, coop, slot - kGuard, kGuard, it, source, -static_cast<std::int64_t>(kGuard));
      verify_poison(a, coop, slot + a.bytes, kGuard, it, source,
                    static_cast<std::int64_t>(a.bytes));
      coop.sync();
      poison(coop, slot - kGuard, a.bytes + 2 * kGuard, it + 1);
      if (!ok(a, gin.signal(source, SignalAdd{ack_signal(a, a.comm.rank)}, coop), it, source))
        return;
    }
    if (!await_acks(a, gin, coop, it)) return;
  }
}

}  // namespace marrow::conformance
