// SPDX-License-Identifier: Apache-2.0
// Latency: one block a rank, send and answer. One iteration is a round trip; the host halves it and says so.
// Timed on the device that sends first: no launch, no host in the figure. Rounds are timed in cycles, because
// the global timer ticks coarsely, and converted by the whole rally's ratio of the two clocks.
#pragma once

#include "cli/kernels/log.cuh"

namespace marrow::cli {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

/// Sends round number `round` (from 1); the answer or next ball is recognised by it.
template <Ping kPing, class Gin, class Coop>
MARROW_DEVICE Status serve(const PingPongArguments& a, const Gin& gin, std::uint64_t round,
                           const Coop& coop) {
  if constexpr (kPing == Ping::put) {
    return gin.put(a.peer, a.window, 0, a.source, 0, a.bytes, SignalAdd{0}, coop);
  } else if constexpr (kPing == Ping::put_value) {
    const std::uint64_t value[3] = {round, round, round};
    if (a.bytes <= 8) return gin.put_value(a.peer, a.window, 0, value[0], SignalAdd{0}, coop);
    return gin.put_value(a.peer, a.window, 0, value, SignalAdd{0}, coop);
  } else if constexpr (kPing == Ping::signal) {
    return gin.signal(a.peer, SignalAdd{0}, coop);
  } else {
    Status status = Status::ok;
    const int packets = static_cast<int>(a.bytes / 8);
    const int mine = coop.rank();
    if (mine < packets) status = gin.send_packet(a.peer, mine, round * 3 + mine, round);
    for (int p = mine + coop.size(); p < packets; p += coop.size()) {
      status = worse(status, gin.send_packet(a.peer, p, round * 3 + p, round));
    }
    return status;
  }
}

template <Ping kPing, class Gin, class Coop>
MARROW_DEVICE Status receive(const PingPongArguments& a, const Gin& gin, std::uint64_t round,
                             const Coop& coop) {
  if constexpr (kPing != Ping::packet) {
    return gin.wait_signal(0, round, coop);
  } else {
    Status status = Status::ok;
    const int packets = static_cast<int>(a.bytes / 8);
    for (int p = coop.rank(); p < packets; p += coop.size()) {
      std::uint64_t value = 0;
      status = worse(status, gin.receive_packet(p, round, &value));
      if (status == Status::ok && value != round * 3 + p) status = Status::invalid;
    }
    // The next ball may only leave when every member has its packet.
    coop.sync();
    return status;
  }
}

/// The log's cycles as ns, by the whole rally's ratio of the two clocks.
MARROW_DEVICE void to_ns(const PingPongArguments& a, std::uint64_t first_ns,
                         std::uint64_t first_cycle) {
  const double ns_per_cycle =
      static_cast<double>(now_ns() - first_ns) / static_cast<double>(cycle_clock() - first_cycle);
  for (std::uint32_t i = 0; i < a.iterations; ++i) {
    a.log.sample[i] =
        static_cast<std::uint64_t>(static_cast<double>(a.log.sample[i]) * ns_per_cycle + 0.5);
  }
}

template <Ping kPing, class Gin, class Coop>
MARROW_DEVICE Status rally(const PingPongArguments& a, const Coop& coop) {
  const Gin gin(a.comm, 0);
  Status status = Status::ok;
  const std::uint64_t first_ns = now_ns();
  const std::uint64_t first_cycle = cycle_clock();
  // Who answers keeps no times: nothing stands between ball and answer.
  for (std::uint32_t i = 0; i < a.iterations && status == Status::ok && !a.first; ++i) {
    status = receive<kPing>(a, gin, a.round + i + 1, coop);
    if (status == Status::ok) status = serve<kPing>(a, gin, a.round + i + 1, coop);
  }
  if (!a.first) return status;
  for (std::uint32_t i = 0; i < a.iterations && status == Status::ok; ++i) {
    const std::uint64_t start = cycle_clock();
    status = serve<kPing>(a, gin, a.round + i + 1, coop);
    if (status == Status::ok) status = receive<kPing>(a, gin, a.round + i + 1, coop);
    if (coop.rank() == 0) a.log.sample[i] = cycle_clock() - start;
  }
  if (coop.rank() == 0) to_ns(a, first_ns, first_cycle);
  return status;
}

template <class Gin, class Coop>
MARROW_DEVICE Status play(const PingPongArguments& a, const Coop& coop) {
  switch (a.ping) {
    case Ping::put: return rally<Ping::put, Gin>(a, coop);
    case Ping::put_value: return rally<Ping::put_value, Gin>(a, coop);
    case Ping::signal: return rally<Ping::signal, Gin>(a, coop);
    case Ping::packet: return rally<Ping::packet, Gin>(a, coop);
    case Ping::floor: break;  // floor_kernel
  }
  return Status::invalid;
}

// A lone thread skips every group barrier. With the path known when the kernel is built, a round is short enough
// to stay in the instruction cache.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(32)
    ping_pong_thread_kernel(const MARROW_GRID_CONSTANT PingPongArguments a) {
  begin(a.log);
  finish(a.log, play<Gin<>>(a, Thread{}), a.peer);
}
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    ping_pong_block_kernel(const MARROW_GRID_CONSTANT PingPongArguments a) {
  begin(a.log);
  finish(a.log, play<Gin<>>(a, Block{}), a.peer);
}
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(32)
    ping_pong_lsa_thread_kernel(const MARROW_GRID_CONSTANT PingPongArguments a) {
  begin(a.log);
  finish(a.log, play<Gin<Path::lsa>>(a, Thread{}), a.peer);
}
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(1024)
    ping_pong_lsa_block_kernel(const MARROW_GRID_CONSTANT PingPongArguments a) {
  begin(a.log);
  finish(a.log, play<Gin<Path::lsa>>(a, Block{}), a.peer);
}

/// The least that 8 bytes from memory and a strong signal can take between two ranks that load and
/// store: load, store, release store; acquire loads. Marrow's window and signal word are used as plain
/// memory, because a word's place in memory changes its latency by a tenth. The word counts rounds as put does.
MARROW_KERNEL MARROW_LAUNCH_BOUNDS(32)
    floor_kernel(const MARROW_GRID_CONSTANT PingPongArguments a) {
  begin(a.log);
  auto* to = reinterpret_cast<std::uint64_t*>(a.window.near[a.peer - a.comm.lsa_first]);
  auto* word = reinterpret_cast<std::uint64_t*>(a.comm.sync[0].near[a.peer - a.comm.lsa_first]);
  const auto* from = reinterpret_cast<const std::uint64_t*>(a.source.local);
  const auto* mine = reinterpret_cast<const std::uint64_t*>(a.comm.sync[0].local);
  const auto send = [&](std::uint32_t i) {
    store_plain(to, load_data_ahead(from));
    publish<Scope::system>(Store<std::uint64_t>{word, a.round + i + 1});
  };
  const auto receive = [&](std::uint32_t i) {
    const std::uint64_t round = a.round + i + 1;
    if (observe<Scope::system>(mine) >= round) return Status::ok;
    const std::uint64_t start = now_ns();
    for (std::uint32_t turns = 1;; ++turns) {
      if (observe<Scope::system>(mine) >= round) return Status::ok;
      relax(turns);
      if ((turns & 1023) == 0 && now_ns() - start > a.comm.wait_ns) return Status::timeout;
    }
  };
  // The same loops as in rally.
  Status status = Status::ok;
  const std::uint64_t first_ns = now_ns();
  const std::uint64_t first_cycle = cycle_clock();
  for (std::uint32_t i = 0; i < a.iterations && status == Status::ok; ++i) {
    const std::uint64_t start = cycle_clock();
    if (a.first) send(i);
    status = receive(i);
    if (!a.first && status == Status::ok) send(i);
    if (a.first) a.log.sample[i] = cycle_clock() - start;
  }
  if (a.first) to_ns(a, first_ns, first_cycle);
  finish(a.log, status);
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::cli
