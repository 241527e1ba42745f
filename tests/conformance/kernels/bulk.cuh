// SPDX-License-Identifier: Apache-2.0
// The promises of put and get when the group lends shared memory: on load/store paths the SM's copy engine
// moves the bytes then, whose accesses are ordered by rules of their own.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

/// The least that is used: 8 stages of 1 KiB, so that messages of a few KiB go round all stages.
constexpr std::uint32_t kLent = 9 * 1024;

MARROW_DEVICE Scratch lent() { return {dynamic_shared<std::byte>(), kLent}; }

/// Even rounds: a signal with the put. Odd rounds: the source is overwritten after flush, then the signal.
MARROW_KERNEL bulk_put(Args a) {
  with_group(a, [&](const auto& coop) {
    exchange(a, coop, [&](const auto& gin, std::int64_t it) {
      const SignalAdd signal{data_signal(a, a.comm.rank)};
      const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
        if (it % 2 == 0) {
          return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, signal, lent(), coop);
        }
        return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, lent(), coop);
      });
      if (!sent || it % 2 == 0) return sent;
      if (!ok(a, gin.flush(coop), it, -1)) return false;
      for (int peer = 0; peer < a.comm.nranks; ++peer) {
        poison(coop, source_slot(a, peer), a.bytes, it + 17);
      }
      return each_peer(a, it, [&](int peer) { return gin.signal(peer, signal, coop); });
    });
  });
}

MARROW_KERNEL bulk_get(Args a) {
  with_group(a, [&](const auto& coop) {
    gets(a, coop,
         [&](const auto& gin, std::int64_t it, int peer, std::uint64_t from, const Region& region,
             std::uint64_t to) {
           return ok(a, gin.get(peer, a.outbox, from, region, to, a.bytes, lent(), coop), it,
                     peer) &&
                  ok(a, gin.flush(peer, coop), it, peer);
         });
  });
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> bulk_cases() {
  return {
      {"bulk_put", "put keeps its promises when it copies through lent memory",
       start<bulk_put, kLent>, kSized | kGrouped},
      {"bulk_get", "get keeps its promises when it copies through lent memory",
       start<bulk_get, kLent>, kSized | kGrouped},
  };
}

}  // namespace marrow::conformance
