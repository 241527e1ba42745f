// SPDX-License-Identifier: Apache-2.0
// Words: exact atomics under contention, and every way to wait for a signal.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

/// How many threads of this rank may post at once, and our index among them; -1: none of ours.
MARROW_DEVICE int poster(const Args& a, int* n) {
  *n = a.comm.sharing == Sharing::thread ? 1 : block_size() < 8 ? block_size() : 8;
  return thread_index() < *n ? thread_index() : -1;
}

/// Tickets from one word at each rank, drawn by everybody at once: each ticket marks its own word, and in
/// the end each word is marked exactly once.
MARROW_KERNEL fetch_add(Args a) {
  int n;
  const int me = poster(a, &n);
  const Ops<> gin(a.comm, a.context);
  const auto all = static_cast<std::uint64_t>(n) * a.comm.nranks * a.iterations;
  for (std::int64_t it = 0; me >= 0 && it < a.iterations; ++it) {
    const bool done = each_peer(a, it, [&](int peer) {
      std::uint64_t old = 0;
      Status status = gin.fetch_add(peer, a.inbox, word_offset(a, 0), 1, &old);
      if (status == Status::ok && old >= all) fail(a, __LINE__, it, peer, 0, old, all);
      if (old < all && old + 16 < kWords) {
        status = worse(status, gin.add(peer, a.inbox, word_offset(a, 16 + old), 1));
      }
      return status;
    });
    if (!done) break;
  }
  const Block coop;
  if (!ok(a, meet(a, team_world(a.comm), 0, coop, Contexts::all(a.comm), Fence::put), 0, -1))
    return;
  if (coop.rank() != 0) return;
  same(a, load_relaxed<Scope::system>(own_word(a, 0)), all, 0, -1);
  for (std::uint64_t i = 0; i < all && i + 16 < kWords; ++i) {
    same(a, load_relaxed<Scope::system>(own_word(a, 16 + i)), 1, 0, -1,
         static_cast<std::int64_t>(i));
  }
}

/// Everybody increments one word of each rank by compare_swap; a lost race is tried again.
MARROW_KERNEL compare_swap(Args a) {
  int n;
  const int me = poster(a, &n);
  const Ops<> gin(a.comm, a.context);
  const auto all = static_cast<std::uint64_t>(n) * a.comm.nranks * a.iterations;
  for (std::int64_t it = 0; me >= 0 && it < a.iterations; ++it) {
    const bool done = each_peer(a, it, [&](int peer) {
      std::uint64_t expected = static_cast<std::uint64_t>(it);
      for (std::uint64_t tries = 0; tries <= all; ++tries) {
        std::uint64_t old = 0;
        const Status status =
            gin.compare_swap(peer, a.inbox, word_offset(a, 0), expected, expected + 1, &old);
        if (status != Status::ok) return status;
        if (old == expected) return Status::ok;
        // Not ours: the word has moved on, and it only grows.
        if (old < expected) fail(a, __LINE__, it, peer, 0, old, expected);
        expected = old;
      }
      fail(a, __LINE__, it, peer, 0, expected, all);
      return Status::ok;
    });
    if (!done) break;
  }
  const Block coop;
  if (!ok(a, meet(a, team_world(a.comm), 0, coop, Contexts::all(a.comm), Fence::put), 0, -1))
    return;
  if (coop.rank() == 0) same(a, load_relaxed<Scope::system>(own_word(a, 0)), all, 0, -1);
}

/// Everybody adds 1 `count` times to one signal and one window word of rank 0, over whatever path
/// each has to it: both sums are exact.
MARROW_KERNEL exact_sum(Args a) {
  int n;
  const int me = poster(a, &n);
  const Ops<> gin(a.comm, a.context);
  const std::uint64_t count = a.count / n;
  for (std::uint64_t i = 0; me >= 0 && i < count; ++i) {
    const auto it = static_cast<std::int64_t>(i);
    if (!ok(a, gin.signal(0, SignalAdd{free_signal(a, 0), 1, Strength::weak}), it, 0)) return;
    if (i % 16 == 0 && !ok(a, gin.add(0, a.inbox, word_offset(a, 0), 1), it, 0)) return;
  }
  const Block coop;
  if (!ok(a, meet(a, team_world(a.comm), 0, coop, Contexts::all(a.comm), Fence::put), 0, -1))
    return;
  if (a.comm.rank != 0 || coop.rank() != 0) return;
  const auto all = count * n * a.comm.nranks;
  const auto words = (count + 15) / 16 * n * a.comm.nranks;
  if (!ok(a, gin.wait_signal(free_signal(a, 0), all), 0, -1)) return;
  same(a, gin.read_signal(free_signal(a, 0)), all, 0, -1);
  same(a, load_relaxed<Scope::system>(own_word(a, 0)), words, 0, -1, 1);
}

/// wait_any finds each source once, whatever the order in which they come.
MARROW_KERNEL wait_any(Args a) {
  if (thread_index() != 0) return;
  const Thread coop;
  const Ops<> gin(a.comm, a.context);
  std::int32_t ids[16];
  std::uint64_t least[16];
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes,
                     SignalAdd{data_signal(a, a.comm.rank)});
    });
    if (!sent) return;
    int left = a.comm.nranks < 16 ? a.comm.nranks : 16;
    for (int i = 0; i < left; ++i) {
      ids[i] = data_signal(a, nth_peer(a, i));
      least[i] = static_cast<std::uint64_t>(it + 1);
    }
    while (left > 0) {
      int which = -1;
      if (!ok(a, gin.wait_any(ids, least, left, &which), it, -1)) return;
      if (which < 0 || which >= left) return fail(a, __LINE__, it, -1, 0, which, left);
      if (!take(a, gin, coop, ids[which], it)) return;
      ids[which] = ids[--left];
    }
    if (!await_acks(a, gin, coop, it)) return;
  }
}

/// Shadows move by what was waited for: nobody counts rounds, nobody resets.
MARROW_KERNEL shadow(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
          return gin.put(
              peer, a.inbox, to, source_region(a), from, a.bytes, coop,
              SignalAdd{data_signal(a, a.comm.rank), static_cast<std::uint64_t>(it % 3 + 1)});
        });
      },
      [&](const auto& gin, int source, std::int64_t it) {
        const Status status = gin.wait_signal_shadow(data_signal(a, source), it % 3 + 1, coop);
        if (coop.rank() == 0) {
          same(a, *gin.signal_shadow(data_signal(a, source)),
               gin.read_signal(data_signal(a, source)), it, source);
        }
        return status;
      });
}

/// After reset the value is 0 and counts anew; so do counters.
MARROW_KERNEL reset(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        const bool sent =
            send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
              return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                             CounterInc{1}, SignalAdd{data_signal(a, a.comm.rank), 5});
            });
        if (!sent || !ok(a, gin.wait_counter(1, a.comm.nranks, coop), it, -1)) return false;
        if (coop.rank() == 0) {
          same(a, gin.read_counter(1), a.comm.nranks, it, -1);
          gin.reset_counter(1);
          same(a, gin.read_counter(1), 0, it, -1);
        }
        coop.sync();
        return true;
      },
      [&](const auto& gin, int source, std::int64_t it) {
        const Status status = gin.wait_signal(data_signal(a, source), 5, coop);
        if (coop.rank() == 0) {
          same(a, gin.read_signal(data_signal(a, source)), 5, it, source);
          gin.reset_signal(data_signal(a, source));
          same(a, gin.read_signal(data_signal(a, source)), 0, it, source);
          expect(a, gin.test_signal(data_signal(a, source), 1), Status::timeout, it, source);
        }
        coop.sync();
        return status;
      });
}

/// test_signal and read_signal acquire as wait_signal does, and never say more than was sent.
MARROW_KERNEL test_read(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
          return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                         SignalAdd{data_signal(a, a.comm.rank)});
        });
      },
      [&](const auto& gin, int source, std::int64_t it) {
        Status status = Status::ok;
        if (coop.rank() == 0) {
          const int id = data_signal(a, source);
          const auto want = static_cast<std::uint64_t>(it + 1);
          status = wait_until(a.comm, {}, [&] {
            return it % 2 ? gin.test_signal(id, want) == Status::ok : gin.read_signal(id) >= want;
          });
          same(a, gin.read_signal(id), want, it, source);
          expect(a, gin.test_signal(id, want), Status::ok, it, source);
          expect(a, gin.test_signal(id, want + 1), Status::timeout, it, source);
        }
        return coop.agree(status);
      });
}

/// Each wait ends at its deadline, and everything still works afterwards.
MARROW_KERNEL timeouts(Args a) {
  const Block coop;
  constexpr std::uint64_t kShort = 2000000;
  exchange(a, coop, [&](const auto& gin, std::int64_t it) {
    for (int kind = 0; kind < 5; ++kind) {
      const std::uint64_t start = now_ns();
      const Deadline deadline{kShort};
      Status status = Status::timeout;
      std::uint64_t value;
      int which = 0;
      const std::int32_t id = free_signal(a, 1);
      const std::uint64_t least = 1;
      if (kind == 0) status = gin.wait_signal(id, least, coop, deadline);
      if (kind == 1) status = gin.wait_counter(2, least, coop, deadline);
      if (kind == 2 && coop.rank() == 0) status = gin.receive_packet(0, 1, &value, deadline);
      if (kind == 3 && coop.rank() == 0) status = gin.wait_any(&id, &least, 1, &which, deadline);
      if (kind == 4) status = gin.wait_signal_shadow(id, least, coop, deadline);
      if (!expect(a, status, Status::timeout, it, -1 - kind)) return false;
      const std::uint64_t waited = now_ns() - start;
      // Member 0 waits for the group; the others may have looked at the clock after it did.
      const bool early = waited < kShort && coop.rank() == 0;
      if (early || waited > kShort + 1000000000u)
        fail(a, __LINE__, it, -1 - kind, 0, waited, kShort);
    }
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                     SignalAdd{data_signal(a, a.comm.rank)});
    });
  });
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> words_cases() {
  return {
      {"fetch_add", "fetch_add is exact under contention", start<fetch_add>, kWindowWords, 8},
      {"compare_swap", "compare_swap is exact under contention", start<compare_swap>, kWindowWords,
       8, 10},
      {"exact_sum", "adds over several paths to one signal are exact", start<exact_sum>,
       kCounted | kWindowWords, 8},
      {"wait_any", "wait_any finds every signal once", start<wait_any>, kSized},
      {"shadow", "shadows count for signals nobody resets", start<shadow>},
      {"reset", "reset makes a signal and a counter 0", start<reset>},
      {"test_read", "test_signal and read_signal acquire", start<test_read>, kSized},
      {"timeouts", "waits end at their deadline, then work on", start<timeouts>, 0, 64, 2},
  };
}

}  // namespace marrow::conformance
