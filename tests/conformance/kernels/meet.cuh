// SPDX-License-Identifier: Apache-2.0
// Barriers with each fence, teams, packets, cells, plain loads and stores.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

/// Puts on every context, then one barrier instead of signals.
MARROW_KERNEL barrier_put(Args a) {
  const Block coop;
  const auto sync = [&](Contexts contexts, Fence fence) {
    return meet(a, team_world(a.comm), 0, coop, contexts, fence);
  };
  const Contexts all = Contexts::all(a.comm);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      Status status = Status::ok;
      for (int c = 0; c < a.comm.contexts; ++c) {
        const Ops<> gin(a.comm, c);
        const std::uint64_t begin = a.bytes * c / a.comm.contexts;
        const std::uint64_t end = a.bytes * (c + 1) / a.comm.contexts;
        status = worse(status, gin.put(peer, a.inbox, to + begin, source_region(a), from + begin,
                                       end - begin, coop));
        status = worse(status, gin.add(peer, a.inbox, word_offset(a, a.comm.rank), 1, coop));
      }
      return status;
    });
    if (!sent) return;
    pause(a, it, 1);
    if (!ok(a, sync(all, Fence::put), it, -1)) return;
    for (int source = 0; source < a.comm.nranks; ++source) {
      std::byte* slot = inbox_slot(a, source);
      verify(a, coop, slot, a.bytes, key_of(a, source, a.comm.rank, it), it, source);
      verify_poison(a, coop, slot + a.bytes, kGuard, it, source,
                    static_cast<std::int64_t>(a.bytes));
      if (coop.rank() == 0) {
        same(a, load_relaxed<Scope::system>(own_word(a, source)),
             static_cast<std::uint64_t>(it + 1) * a.comm.contexts, it, source);
      }
      coop.sync();
      poison(coop, slot - kGuard, a.bytes + 2 * kGuard, it + 1);
    }
    if (!ok(a, sync(all, Fence::put), it, -2)) return;
  }
}

/// Gets on every context, then one barrier: they are here, and their sources may change.
MARROW_KERNEL barrier_get(Args a) {
  const Block coop;
  const auto sync = [&](Contexts contexts, Fence fence) {
    return meet(a, team_world(a.comm), 1, coop, contexts, fence);
  };
  const Contexts all = Contexts::all(a.comm);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      fill(coop, a.outbox.local + outbox_offset(a, peer), a.bytes,
           key_of(a, a.comm.rank, peer, it));
    }
    if (!ok(a, sync(all, Fence::put), it, -1)) return;
    const bool read = each_peer(a, it, [&](int peer) {
      Status status = Status::ok;
      for (int c = 0; c < a.comm.contexts; ++c) {
        const Ops<> gin(a.comm, c);
        const std::uint64_t begin = a.bytes * c / a.comm.contexts;
        const std::uint64_t end = a.bytes * (c + 1) / a.comm.contexts;
        status = worse(status, gin.get(peer, a.outbox, outbox_offset(a, a.comm.rank) + begin,
                                       a.inbox, inbox_offset(a, peer) + begin, end - begin, coop));
      }
      return status;
    });
    if (!read) return;
    pause(a, it, 1);
    if (!ok(a, sync(all, Fence::get), it, -2)) return;
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      poison(coop, a.outbox.local + outbox_offset(a, peer), a.bytes, it + 17);
      std::byte* slot = inbox_slot(a, peer);
      verify(a, coop, slot, a.bytes, key_of(a, peer, a.comm.rank, it), it, peer);
      verify_poison(a, coop, slot + a.bytes, kGuard, 0, peer, static_cast<std::int64_t>(a.bytes));
      coop.sync();
      poison(coop, slot, a.bytes, it + 1);
    }
  }
}

/// Nobody leaves before the last has come: each arrival is counted at rank 0 by an add that has
/// been performed (fetch_add returned) before it.
MARROW_KERNEL barrier_none(Args a) {
  const Block coop;
  const auto sync = [&](Contexts contexts, Fence fence) {
    return meet(a, team_world(a.comm), 2, coop, contexts, fence);
  };
  const Ops<> gin(a.comm, a.context);
  const auto n = static_cast<std::uint64_t>(a.comm.nranks);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    std::uint64_t seen = 0;
    pause(a, it, 1);
    if (coop.rank() == 0 && !ok(a, gin.fetch_add(0, a.inbox, word_offset(a, 0), 1, &seen), it, 0))
      return;
    if (!ok(a, sync(Contexts{a.context, 1}, Fence::none), it, -1)) return;
    if (coop.rank() == 0) {
      if (!ok(a, gin.fetch_add(0, a.inbox, word_offset(a, 0), 0, &seen), it, 0)) return;
      const std::uint64_t least = static_cast<std::uint64_t>(it + 1) * n;
      if (seen < least || seen > least + n - 1) fail(a, __LINE__, it, 0, 0, seen, least);
    }
  }
}

/// Every thread count meets in one barrier of the lsa team and one of the rail; then peers are named by
/// their index in a team that counts backwards.
MARROW_KERNEL teams(Args a) {
  const Block coop;
  const Team lsa = team_lsa(a.comm);
  const Team rail = team_rail(a.comm);
  same(a, lsa.world_rank(lsa.rank), a.comm.rank, 0, -1);
  if (rail.size * lsa.size == a.comm.nranks)
    same(a, rail.world_rank(rail.rank), a.comm.rank, 0, -1);
  const Team back{a.comm.nranks, a.comm.nranks - 1 - a.comm.rank, a.comm.nranks - 1, -1};
  exchange(a, coop, [&](const auto& gin, std::int64_t it) {
    if (!ok(a, meet(a, lsa, 3, coop), it, -1)) return false;
    if (rail.size * lsa.size == a.comm.nranks && !ok(a, meet(a, rail, 4, coop), it, -2)) {
      return false;
    }
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      return gin.put(a.comm.nranks - 1 - peer, a.inbox, to, source_region(a), from, a.bytes, back,
                     coop, SignalAdd{data_signal(a, a.comm.rank)});
    });
  });
}

/// Two slots a source, used in turn: a packet may be overwritten once the peer's next one is here.
MARROW_KERNEL packets(Args a) {
  if (thread_index() != 0) return;
  const Ops<> gin(a.comm, a.context);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    const std::uint64_t epoch = static_cast<std::uint64_t>(it) + 1;
    pause(a, it, 1);
    const bool sent = each_peer(a, it, [&](int peer) {
      return gin.send_packet(peer, a.comm.rank * 2 + static_cast<int>(it % 2),
                             key_of(a, a.comm.rank, peer, it), epoch);
    });
    if (!sent) return;
    for (int k = 0; k < a.comm.nranks; ++k) {
      const int source = nth_peer(a, k);
      const int slot = source * 2 + static_cast<int>(it % 2);
      std::uint64_t value = 0;
      if (!ok(a, gin.receive_packet(slot, epoch, &value), it, source)) return;
      same(a, value, key_of(a, source, a.comm.rank, it), it, source);
      // The next epoch cannot be here: it is in the other slot.
      if (!expect(a, gin.receive_packet(slot, epoch + 1, &value, Deadline{1}), Status::timeout, it,
                  source))
        return;
    }
  }
}

/// Cells stored straight into peers' windows: both halves of one store, never a mixture.
MARROW_KERNEL cells(Args a) {
  const Block coop;
  const Ops<> gin(a.comm, a.context);
  const Lsa lsa(a.comm);
  constexpr int kCells = 16;
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    for (int k = 0; k < a.comm.nranks; ++k) {
      const int peer = nth_peer(a, k);
      auto* to = lsa.pointer<std::byte>(a.inbox, word_offset(a, a.comm.rank * kCells * 2), peer);
      if (!to) return fail(a, __LINE__, it, peer, 0, 0, 1);
      for (int i = coop.rank(); i < kCells; i += coop.size()) {
        store_cell(to + i * 16, Cell16{key_of(a, a.comm.rank, peer, it) + i,
                                       static_cast<std::uint64_t>(it + 1)});
      }
    }
    for (int source = 0; source < a.comm.nranks; ++source) {
      const auto* from = reinterpret_cast<const std::byte*>(own_word(a, source * kCells * 2));
      for (int i = coop.rank(); i < kCells; i += coop.size()) {
        Cell16 cell{};
        const Status status = wait_until(a.comm, {}, [&] {
          cell = load_cell(from + i * 16);
          return cell.high == static_cast<std::uint64_t>(it + 1);
        });
        if (!ok(a, status, it, source)) break;
        same(a, cell.low, key_of(a, source, a.comm.rank, it) + i, it, source, i);
      }
    }
    coop.sync();
    if (!ok(a, meet(a, team_world(a.comm), 0, coop), it, -1)) return;
  }
}

/// Plain stores to peers and plain loads from them, ordered by barriers; Multimem on one word.
MARROW_KERNEL load_store(Args a) {
  const Block coop;
  const Lsa lsa(a.comm);
  const Multimem multimem(a.comm);
  const auto sync = [&](Contexts contexts, Fence fence) {
    return meet(a, team_world(a.comm), 0, coop, contexts, fence);
  };
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    for (int k = 0; k < a.comm.nranks; ++k) {
      const int peer = nth_peer(a, k);
      auto* to = lsa.pointer<std::byte>(a.inbox, inbox_offset(a, a.comm.rank), peer);
      if (!to) return fail(a, __LINE__, it, peer, 0, 0, 1);
      fill(coop, to, a.bytes, key_of(a, a.comm.rank, peer, it));
    }
    if (coop.rank() == 0) {
      const Status added = multimem.reduce_add(a.inbox, word_offset(a, 0), a.comm.rank + 1);
      if (!expect(a, added, a.inbox.no_atomics ? Status::invalid : Status::ok, it, -1)) return;
      *own_word(a, 1) = key_of(a, a.comm.rank, 0, it);
    }
    if (!ok(a, sync({}, Fence::put), it, -1)) return;
    const auto n = static_cast<std::uint64_t>(a.comm.nranks);
    std::uint64_t sum = 0;
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      verify(a, coop, inbox_slot(a, peer), a.bytes, key_of(a, peer, a.comm.rank, it), it, peer);
      // What we wrote is at the peer's too.
      const auto* at = lsa.pointer<const std::byte>(a.inbox, inbox_offset(a, a.comm.rank), peer);
      verify(a, coop, at, a.bytes, key_of(a, a.comm.rank, peer, it), it, peer);
      sum += key_of(a, peer, 0, it);
    }
    if (coop.rank() == 0) {
      const std::uint64_t all = a.inbox.no_atomics ? 0 : n * (n + 1) / 2 * (it + 1);
      same(a, load_relaxed<Scope::system>(own_word(a, 0)), all, it, -1);
      same(a, multimem.load_reduce<std::uint64_t>(a.inbox, word_offset(a, 1)), sum, it, -1);
    }
    if (!ok(a, sync({}, Fence::put), it, -2)) return;
    for (int peer = 0; peer < a.comm.nranks; ++peer)
      poison(coop, inbox_slot(a, peer), a.bytes, it + 1);
    if (!ok(a, sync({}, Fence::put), it, -3)) return;
  }
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> meet_cases() {
  return {
      {"barrier_put", "a barrier with fence put covers puts of all contexts", start<barrier_put>,
       kSized | kWindowWords},
      {"barrier_get", "a barrier with fence get completes gets", start<barrier_get>, kSized},
      {"barrier_none", "nobody leaves a barrier before all have come", start<barrier_none>,
       kWindowWords},
      {"teams", "peers and barriers by team", start<teams>},
      {"packets", "a packet carries its own arrival", start<packets>, 0, 8, 50},
      {"cells", "16 bytes are stored and loaded at once", start<cells>, kLsaOnly, 256, 50},
      {"load_store", "barriers order plain loads and stores", start<load_store>, kLsaOnly | kSized},
  };
}

}  // namespace marrow::conformance
