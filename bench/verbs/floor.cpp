// SPDX-License-Identifier: Apache-2.0
// The floor under the verbs network, on whatever NIC MARROW_NIC names: 8-byte WRITEs between two queue pairs
// of this process, posted and polled by hand, as a ping-pong and to completion; then the same two figures
// through network.h. Prints one JSON array of {what, samples in ns}; run.py makes results of it.
//   marrow_verbs_floor [ITERATIONS]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/random.hpp"
#include "networks/verbs/device.hpp"
#include "networks/verbs/queue_pair.hpp"
#include "proxy/networks.hpp"

namespace {

using namespace marrow;
namespace v = marrow::verbs;
using networks::rdma::QueuePair;

std::uint64_t now() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

/// Spins; the other side and softnic's engine may need this core.
void wait_for(const std::function<bool()>& holds) {
  for (unsigned spins = 0; !holds(); ++spins) {
    if (spins % 64 == 63) std::this_thread::yield();
  }
}

std::uint64_t load(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

void print(const char* what, const std::vector<std::uint64_t>& samples, bool last = false) {
  std::printf("  {\"what\": \"%s\", \"samples\": [", what);
  for (std::size_t i = 0; i < samples.size(); ++i)
    std::printf("%s%llu", i ? ", " : "", static_cast<unsigned long long>(samples[i]));
  std::printf("]}%s\n", last ? "" : ",");
}

/// Half round trips of `iterations` exchanges: send(side, value) and the word that each side watches.
std::vector<std::uint64_t> ping_pong(int iterations, std::uint64_t* words[2],
                                     const std::function<void(int, std::uint64_t)>& send,
                                     const std::function<void(int)>& idle) {
  std::vector<std::uint64_t> samples;
  const auto await = [&](int side, std::uint64_t value) {
    wait_for([&] {
      idle(side);
      return load(*words[side]) == value;
    });
  };
  std::thread other([&] {
    for (int i = 1; i <= iterations; ++i) {
      await(1, static_cast<std::uint64_t>(i));
      send(1, static_cast<std::uint64_t>(i));
    }
  });
  for (int i = 1; i <= iterations; ++i) {
    const std::uint64_t start = now();
    send(0, static_cast<std::uint64_t>(i));
    await(0, static_cast<std::uint64_t>(i));
    if (i > iterations / 10) samples.push_back((now() - start) / 2);
  }
  other.join();
  return samples;
}

struct Bare {
  Bare() : device(networks::rdma::Device::open(options(), "floor-" + base::random_name(6))) {
    for (int side = 0; side < 2; ++side) {
      cq[side] = device->table().create_cq(device->context(), 512, nullptr, nullptr, 0);
      pair[side] = std::make_unique<QueuePair>(device, cq[side], chosen, side);
    }
    pair[0]->connect(pair[1]->end());
    pair[1]->connect(pair[0]->end());
  }
  ~Bare() {
    for (auto& each : pair) each.reset();
    for (v::ibv_cq* each : cq) device->table().destroy_cq(each);
  }
  networks::rdma::Options& options() {
    marrow_network_services services{};
    chosen = networks::rdma::read_options(services, "");
    return chosen;
  }
  /// Writes `value` into the other side's word.
  void send(int side, std::uint64_t value, bool reap) {
    QueuePair& mine = *pair[side];
    v::ibv_sge sge{reinterpret_cast<std::uint64_t>(&value), 8, 0};
    v::ibv_send_wr request{};
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = v::IBV_WR_RDMA_WRITE;
    request.send_flags = v::IBV_SEND_INLINE | v::IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = mine.theirs().control;
    request.wr.rdma.rkey = mine.theirs().control_rkey;
    v::ibv_send_wr* bad = nullptr;
    if (mine.qp()->context->ops.post_send(mine.qp(), &request, &bad) != 0) std::exit(1);
    v::ibv_wc wc[16];
    if (!reap) {
      cq[side]->context->ops.poll_cq(cq[side], 16, wc);  // whatever is there
      return;
    }
    wait_for([&] { return cq[side]->context->ops.poll_cq(cq[side], 1, wc) == 1; });
    if (wc[0].status != 0) std::exit(1);
  }

  networks::rdma::Options chosen;
  std::shared_ptr<networks::rdma::Device> device;
  v::ibv_cq* cq[2] = {};
  std::unique_ptr<QueuePair> pair[2];
};

/// Two endpoints of the network.
struct Network {
  struct Side {
    void* instance = nullptr;
    void* endpoint = nullptr;
    void* region = nullptr;
    void* remote = nullptr;
    marrow_network_address address{};
    alignas(4096) std::uint64_t words[512] = {};
  };
  Network() {
    for (const marrow_network* each : proxy::registered_networks()) {
      if (std::string(each->name) == "verbs") n = each;
    }
    services.version = MARROW_NETWORK_VERSION;
    services.size = sizeof services;
    const marrow_network_events events = {nullptr,
                                          [](void*, std::uint32_t, const void*, std::uint32_t) {},
                                          [](void*, std::uint32_t, std::uint32_t) {},
                                          [](void*, std::uint32_t, const char* why) {
                                            std::fprintf(stderr, "%s\n", why);
                                            std::exit(1);
                                          }};
    for (std::uint32_t r = 0; r < 2; ++r) {
      check(n->init(&services, "", &sides[r].instance));
      check(n->listen(sides[r].instance, 0, r, 2, &events, &sides[r].endpoint, &sides[r].address));
    }
    const marrow_network_address all[2] = {sides[0].address, sides[1].address};
    std::uint8_t key[2][MARROW_NETWORK_MAX_KEY];
    std::uint32_t bytes[2];
    for (int r = 0; r < 2; ++r) {
      check(n->connect(sides[r].endpoint, all, 10'000'000'000));
      marrow_network_memory memory{};
      memory.address = sides[r].words;
      memory.bytes = sizeof sides[r].words;
      memory.fd = -1;
      check(n->register_memory(sides[r].endpoint, &memory, &sides[r].region, key[r], &bytes[r]));
    }
    for (std::uint32_t r = 0; r < 2; ++r)
      check(n->import_key(sides[r].endpoint, 1 - r, key[1 - r], bytes[1 - r], &sides[r].remote));
  }
  ~Network() {
    for (Side& side : sides) {
      n->release_key(side.endpoint, side.remote);
      n->deregister_memory(side.endpoint, side.region);
    }
    for (Side& side : sides) {
      n->close(side.endpoint);
      n->finalize(side.instance);
    }
  }
  void check(int result) {
    if (result >= 0) return;
    std::fprintf(stderr, "%s\n", n->last_error());
    std::exit(1);
  }
  void step(int side) {
    check(n->progress(sides[side].endpoint));
    marrow_network_completion got[16];
    done[side] += static_cast<std::uint64_t>(n->test(sides[side].endpoint, got, 16));
  }
  void send(int side, std::uint64_t value, bool reap) {
    marrow_network_operation o{};
    o.kind = MARROW_NETWORK_PUT_VALUE;
    o.peer = static_cast<std::uint32_t>(1 - side);
    o.token = 1;
    o.remote = sides[side].remote;
    o.bytes = 8;
    std::memcpy(o.inline_data, &value, 8);
    const std::uint64_t before = done[side];
    while (n->post(sides[side].endpoint, &o, 1) != 1) step(side);
    while (reap && done[side] == before) step(side);
  }

  const marrow_network* n = nullptr;
  marrow_network_services services{};
  Side sides[2];
  std::uint64_t done[2] = {};
};

std::vector<std::uint64_t> completions(int iterations,
                                       const std::function<void(std::uint64_t)>& send) {
  std::vector<std::uint64_t> samples;
  for (int i = 1; i <= iterations; ++i) {
    const std::uint64_t start = now();
    send(static_cast<std::uint64_t>(i));
    if (i > iterations / 10) samples.push_back(now() - start);
  }
  return samples;
}

}  // namespace

int main(int argc, char** argv) {
  const int iterations = argc > 1 ? std::atoi(argv[1]) : 2000;
  try {
    std::puts("[");
    {
      Bare bare;
      // The same first word that receives are given back through: nothing else writes it here.
      std::uint64_t* words[2] = {&bare.pair[0]->words().returned, &bare.pair[1]->words().returned};
      print("verbs: bare WRITE of 8 bytes, half round trip",
            ping_pong(
                iterations, words,
                [&](int side, std::uint64_t value) { bare.send(side, value, false); }, [](int) {}));
      print("verbs: bare WRITE of 8 bytes, post to completion",
            completions(iterations, [&](std::uint64_t value) { bare.send(0, value, true); }));
    }
    {
      Network network;
      network.send(0, 0, true);  // connects
      network.send(1, 0, true);
      std::uint64_t* words[2] = {network.sides[0].words, network.sides[1].words};
      print("verbs network: put_value of 8 bytes, half round trip",
            ping_pong(
                iterations, words,
                [&](int side, std::uint64_t value) { network.send(side, value, false); },
                [&](int side) { network.step(side); }));
      print("verbs network: put_value of 8 bytes, post to completion",
            completions(iterations, [&](std::uint64_t value) { network.send(0, value, true); }),
            true);
    }
    std::puts("]");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "marrow_verbs_floor: %s\n", error.what());
    return 1;
  }
  return 0;
}
