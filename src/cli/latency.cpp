// SPDX-License-Identifier: Apache-2.0
#include "cli/latency.hpp"

#include <algorithm>

namespace marrow::cli {

Bench::Bench(Communicator& comm, std::uint64_t bytes, int packets, Memory memory)
    : comm_(comm),
      window_(comm.allocate(std::max<std::uint64_t>(bytes, 64), memory)),
      device_(comm.device_communicator(
          {.contexts = 1, .signals = 4, .counters = 0, .barriers = 1, .packets = packets})),
      source_(comm.place(), std::max<std::uint64_t>(bytes, 64), memory) {
  std::vector<std::uint8_t> pattern(source_.bytes());
  for (std::size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = static_cast<std::uint8_t>(i * 7 + static_cast<std::size_t>(comm.rank()) + 1);
  source_.upload(pattern);
  local_ = comm.register_local(source_.data(), source_.bytes());
}

std::vector<double> Bench::ping_pong(Ping ping, std::uint64_t bytes, int iterations, int warmup,
                                     int threads) {
  comm_.barrier();
  const auto total = static_cast<std::uint32_t>(iterations + warmup);
  // Packets are recognised by epoch, all else by the signal's count: two rallies, two scores.
  std::uint64_t& round = ping == Ping::packet ? packet_round_ : round_;
  std::vector<double> us;
  if (plays()) {
    const KernelLog log(comm_.place(), 1, total);
    PingPongArguments a;
    a.comm = device();
    a.window = window();
    a.source = local();
    a.bytes = bytes;
    a.iterations = total;
    a.peer = peer();
    a.round = round;
    a.ping = ping;
    a.first = first();
    a.log = log.log();
    const bool lsa = comm_.peers().at(static_cast<std::size_t>(peer())).path == Path::lsa;
    const auto launch = ping == Ping::floor ? launch_floor
                        : threads == 1
                            ? (lsa ? launch_ping_pong_lsa_thread : launch_ping_pong_thread)
                            : (lsa ? launch_ping_pong_lsa_block : launch_ping_pong_block);
    launch(comm_.place(), {1, threads}, a);
    log.finish(comm_, "a ping-pong");
    if (first()) {
      for (const std::uint64_t ns :
           log.samples(static_cast<std::size_t>(warmup), static_cast<std::size_t>(iterations))) {
        us.push_back(static_cast<double>(ns) * 0.5e-3);
      }
    }
  }
  round += total;
  comm_.barrier();
  return us;
}

}  // namespace marrow::cli
