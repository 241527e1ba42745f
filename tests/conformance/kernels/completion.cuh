// SPDX-License-Identifier: Apache-2.0
// Local completion (flush, counters, requests), gets, and the fences that reach across contexts.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

/// Puts without a signal, `complete`, then the sources are overwritten before the peers are told:
/// what arrives must be what was there at the put.
template <class Coop, class Post, class Complete>
MARROW_DEVICE void reuse(const Args& a, const Coop& coop, Post&& post, Complete&& complete) {
  exchange(a, coop, [&](const auto& gin, std::int64_t it) {
    const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      return post(gin, it, peer, from, to);
    });
    if (!sent || !complete(gin, it)) return false;
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      poison(coop, source_slot(a, peer), a.bytes, it + 17);
    }
    return each_peer(a, it, [&](int peer) {
      return gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop);
    });
  });
}

MARROW_KERNEL flush_reuse(Args a) {
  with_group(a, [&](const auto& coop) {
    reuse(
        a, coop,
        [&](const auto& gin, std::int64_t, int peer, std::uint64_t from, std::uint64_t to) {
          return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop);
        },
        [&](const auto& gin, std::int64_t it) {
          if (it % 2 == 0) return ok(a, gin.flush(coop), it, -1);
          return each_peer(a, it, [&](int peer) { return gin.flush(peer, coop); });
        });
  });
}

MARROW_KERNEL counter_reuse(Args a) {
  with_group(a, [&](const auto& coop) {
    reuse(
        a, coop,
        [&](const auto& gin, std::int64_t, int peer, std::uint64_t from, std::uint64_t to) {
          return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, CounterInc{peer},
                         coop);
        },
        [&](const auto& gin, std::int64_t it) {
          return each_peer(a, it, [&](int peer) { return gin.wait_counter(peer, it + 1, coop); });
        });
  });
}

/// One counter for all peers.
MARROW_KERNEL counter_shared(Args a) {
  const Block coop;
  reuse(
      a, coop,
      [&](const auto& gin, std::int64_t, int peer, std::uint64_t from, std::uint64_t to) {
        return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, CounterInc{0}, coop);
      },
      [&](const auto& gin, std::int64_t it) {
        const auto all = static_cast<std::uint64_t>(it + 1) * a.comm.nranks;
        return ok(a, gin.wait_counter(0, all, coop), it, -1) &&
               (coop.rank() != 0 || same(a, gin.read_counter(0), all, it, -1));
      });
}

MARROW_KERNEL flush_async(Args a) {
  if (thread_index() != 0) return;
  const Thread coop;
  Request request[16];
  reuse(
      a, coop,
      [&](const auto& gin, std::int64_t, int peer, std::uint64_t from, std::uint64_t to) {
        const Status status = gin.put(peer, a.inbox, to, source_region(a), from, a.bytes);
        return worse(status, gin.flush_async(peer, &request[peer % 16]));
      },
      [&](const auto& gin, std::int64_t it) {
        return each_peer(a, it, [&](int peer) {
          if (it % 2 == 0) return gin.wait(request[peer % 16]);
          Status seen = Status::timeout;
          const Status waited = wait_until(a.comm, {}, [&] {
            seen = gin.test(request[peer % 16]);
            return seen != Status::timeout;
          });
          return worse(waited, seen);
        });
      });
}

/// flush_remote, then the signal goes by another context: it still finds the data and the adds.
MARROW_KERNEL flush_remote(Args a) {
  with_group(a, [&](const auto& coop) {
    const Ops<> other(a.comm, (a.context + 1) % a.comm.contexts);
    exchange(
        a, coop,
        [&](const auto& gin, std::int64_t it) {
          const bool sent =
              send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
                const Status status =
                    gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop);
                return worse(status, gin.add(peer, a.inbox, word_offset(a, a.comm.rank), 2, coop));
              });
          if (!sent || !ok(a, gin.flush_remote(coop), it, -1)) return false;
          for (int peer = 0; peer < a.comm.nranks; ++peer) {
            poison(coop, source_slot(a, peer), a.bytes, it + 17);  // it is a flush too
          }
          return each_peer(a, it, [&](int peer) {
            return other.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop);
          });
        },
        [&](const auto& gin, int source, std::int64_t it) {
          const Status status = gin.wait_signal(data_signal(a, source), it + 1, coop);
          if (coop.rank() == 0) {
            same(a, load_relaxed<Scope::system>(own_word(a, source)), 2 * (it + 1), it, source);
          }
          return status;
        });
  });
}

MARROW_KERNEL get_flush(Args a) {
  with_group(a, [&](const auto& coop) {
    gets(a, coop,
         [&](const auto& gin, std::int64_t it, int peer, std::uint64_t from, const Region& region,
             std::uint64_t to) {
           return ok(a, gin.get(peer, a.outbox, from, region, to, a.bytes, coop), it, peer) &&
                  ok(a, it % 2 ? gin.flush(peer, coop) : gin.flush(coop), it, peer);
         });
  });
}

MARROW_KERNEL get_counter(Args a) {
  with_group(a, [&](const auto& coop) {
    gets(a, coop,
         [&](const auto& gin, std::int64_t it, int peer, std::uint64_t from, const Region& region,
             std::uint64_t to) {
           return ok(a, gin.get(peer, a.outbox, from, region, to, a.bytes, CounterInc{peer}, coop),
                     it, peer) &&
                  ok(a, gin.wait_counter(peer, it + 1, coop), it, peer);
         });
  });
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> completion_cases() {
  return {
      {"flush_reuse", "after flush the source may be overwritten", start<flush_reuse>,
       kSized | kGrouped},
      {"counter_reuse", "a counter says that its source may be overwritten", start<counter_reuse>,
       kSized | kGrouped},
      {"counter_shared", "one counter counts operations to all peers", start<counter_shared>,
       kSized},
      {"flush_async", "a request completes as flush does", start<flush_async>, kSized},
      {"flush_remote", "flush_remote orders across contexts", start<flush_remote>,
       kSized | kGrouped | kTwoContexts | kWindowWords},
      {"get_flush", "a get is readable after flush", start<get_flush>, kSized | kGrouped},
      {"get_counter", "a get is readable when its counter is reached", start<get_counter>,
       kSized | kGrouped},
  };
}

}  // namespace marrow::conformance
