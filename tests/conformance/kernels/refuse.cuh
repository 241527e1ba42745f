// SPDX-License-Identifier: Apache-2.0
// Arguments that must be refused without touching anything, and paths pruned at compile time.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

template <class Gin_>
MARROW_DEVICE void refused(const Args& a, const Gin_& gin, int peer, const Args& handles,
                           int salt) {
  const Region source(handles.outbox);
  std::uint64_t value = 0;
  const auto want = Status::invalid;
  const std::int64_t it = salt;
  const SignalAdd signal{free_signal(a, 0)};
  const std::uint64_t to = inbox_offset(a, a.comm.rank);
  expect(a, gin.put(peer, handles.inbox, to, source, 0, 8, signal), want, it, 0);
  expect(a, gin.put_value(peer, handles.inbox, to, value, signal), want, it, 1);
  expect(a, gin.get(peer, handles.inbox, to, source, 0, 8), want, it, 2);
  expect(a, gin.add(peer, handles.inbox, word_offset(a, 0), 1), want, it, 3);
  expect(a, gin.fetch_add(peer, handles.inbox, word_offset(a, 0), 1, &value), want, it, 4);
  expect(a, gin.compare_swap(peer, handles.inbox, word_offset(a, 0), 0, 1, &value), want, it, 5);
}

/// Every operation with one wrong number each; then everything must be as before, and work.
MARROW_KERNEL invalid(Args a) {
  const Block coop;
  if (coop.rank() == 0) {
    const auto want = Status::invalid;
    const int peer = (a.comm.rank + 1) % a.comm.nranks;
    const SignalAdd signal{free_signal(a, 0)};
    const Ops<> good(a.comm, a.context);
    const std::uint64_t to = inbox_offset(a, a.comm.rank);
    std::uint64_t value = 0;
    for (const int context : {-1, a.comm.contexts, 1 << 30}) {
      const Ops<> gin(a.comm, context);
      expect(a, gin.status(), want, 0, context);
      refused(a, gin, peer, a, 1);
      expect(a, gin.signal(peer, signal), want, 1, context);
      expect(a, gin.wait_signal(0, 0), want, 1, context);
      expect(a, gin.wait_counter(0, 0), want, 1, context);
      expect(a, gin.flush(), want, 1, context);
      expect(a, gin.flush(peer), want, 1, context);
      expect(a, gin.flush_remote(), want, 1, context);
      expect(a, gin.send_packet(peer, 0, 1, 1), want, 1, context);
      expect(a, gin.receive_packet(0, 1, &value), want, 1, context);
    }
    for (const int bad : {-1, a.comm.nranks, 1 << 30}) {
      refused(a, good, bad, a, 2);
      expect(a, good.signal(bad, signal), want, 2, bad);
      expect(a, good.flush(bad), want, 2, bad);
      expect(a, good.send_packet(bad, 0, 1, 1), want, 2, bad);
    }
    for (const int bad : {-1, a.comm.signals}) {
      expect(a, good.signal(peer, SignalAdd{bad}), want, 3, bad);
      expect(a, good.put(peer, a.inbox, to, a.outbox, 0, 8, SignalAdd{bad}), want, 3, bad);
      expect(a, good.wait_signal(bad, 0), want, 3, bad);
      expect(a, good.test_signal(bad, 0), want, 3, bad);
      const std::int32_t ids[1] = {bad};
      int which = 0;
      expect(a, good.wait_any(ids, &value, 1, &which), want, 3, bad);
      expect(a, good.wait_counter(bad < 0 ? bad : a.comm.counters, 0), want, 4, bad);
      expect(
          a,
          good.put(peer, a.inbox, to, a.outbox, 0, 8, CounterInc{bad < 0 ? bad : a.comm.counters}),
          want, 4, bad);
      expect(a, good.send_packet(peer, bad < 0 ? bad : a.comm.packets, 1, 1), want, 5, bad);
      expect(a, good.receive_packet(bad < 0 ? bad : a.comm.packets, 1, &value), want, 5, bad);
      expect(a, meet(a, team_world(a.comm), bad < 0 ? bad : a.comm.barriers, Thread{}), want, 6,
             bad);
    }
    // Words that not everybody could update atomically.
    if (a.inbox.no_atomics) {
      const SignalAt at{a.inbox, word_offset(a, 0)};
      expect(a, good.add(peer, a.inbox, word_offset(a, 0), 1), want, 11, 0);
      expect(a, good.fetch_add(peer, a.inbox, word_offset(a, 0), 1, &value), want, 11, 1);
      expect(a, good.compare_swap(peer, a.inbox, word_offset(a, 0), 0, 1, &value), want, 11, 2);
      expect(a, good.signal(peer, at), want, 11, 3);
      expect(a, good.put(peer, a.inbox, to, a.outbox, 0, 8, at), want, 11, 4);
    }
    // Kernel and handles from different builds.
    Args foreign = a;
    foreign.inbox.abi += 7;
    refused(a, good, peer, foreign, 7);
    foreign.comm.abi += 7;
    const Ops<> stranger(foreign.comm, a.context);
    expect(a, stranger.status(), want, 8, -1);
    refused(a, stranger, peer, a, 8);
    expect(a, stranger.wait_signal(0, 0), want, 8, -1);
    expect(a, stranger.flush(), want, 8, -1);
  }
  coop.sync();
  const Ops<> gin(a.comm, a.context);
  if (!ok(a, meet(a, team_world(a.comm), 0, coop, Contexts::all(a.comm)), 9, -1)) return;
  for (int source = 0; source < a.comm.nranks; ++source) {
    verify_poison(a, coop, inbox_slot(a, source) - kGuard, a.bytes + 2 * kGuard, 0, source, 0);
  }
  if (coop.rank() == 0) {
    same(a, gin.read_signal(free_signal(a, 0)), 0, 9, -1);
    same(a, load_relaxed<Scope::system>(own_word(a, 0)), 0, 9, -1);
  }
  // Nobody sends before everybody has looked.
  if (!ok(a, meet(a, team_world(a.comm), 0, coop, Contexts::all(a.comm)), 10, -1)) return;
  exchange(a, coop, [&](const auto& good, std::int64_t it) {
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      return good.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                      SignalAdd{data_signal(a, a.comm.rank)});
    });
  });
}

/// A Gin of one path works for that path's peers and refuses all others.
MARROW_KERNEL pruned(Args a) {
  const Block coop;
  exchange(a, coop, [&](const auto&, std::int64_t it) {
    const Ops<Gin<Path::lsa>> lsa(a.comm, a.context);
    const Ops<Gin<Path::gda>> gda(a.comm, a.context);
    const Ops<Gin<Path::proxy>> proxy(a.comm, a.context);
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      const auto send = [&](const auto& gin) {
        return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                       SignalAdd{data_signal(a, a.comm.rank)});
      };
      const auto path = static_cast<Path>(load_cached(a.comm.path + peer));
      if (path != Path::lsa) expect(a, send(lsa), Status::invalid, it, peer);
      if (path != Path::gda) expect(a, send(gda), Status::invalid, it, peer);
      if (path != Path::proxy) expect(a, send(proxy), Status::invalid, it, peer);
      return path == Path::lsa ? send(lsa) : path == Path::gda ? send(gda) : send(proxy);
    });
  });
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> refuse_cases() {
  return {
      {"invalid", "wrong numbers are refused and lose nothing", start<invalid>, kCheckThrows, 64,
       2},
      {"pruned", "Gin<Path> serves its path only", start<pruned>, kReports},
  };
}

}  // namespace marrow::conformance
