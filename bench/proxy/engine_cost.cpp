// SPDX-License-Identifier: Apache-2.0
// What a progress thread costs per descriptor, alone: rings are filled by this program, drained by an
// Engine into the null network, and only Engine::step is timed. Under callgrind it is a count:
//   valgrind --tool=callgrind --toggle-collect='*Engine::step*' marrow_proxy_engine_cost 4096
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "memory/arena.hpp"
#include "null_network.hpp"
#include "proxy/engine.hpp"

namespace {

using namespace marrow;

constexpr std::uint32_t kLogSize = 10;
constexpr int kPeers = 4;

struct Setup {
  Setup() : arena(memory::Arena::create(Place::cpu())), board(kPeers, 1) {
    Requirements r;
    r.counters = 8;
    counters = arena->allocate(4096, Memory::host);
    rings = std::make_shared<proxy::DeviceRings>(*arena, r, counters, kPeers, 1, kLogSize, 0);
    hooks.on_error = [](int, const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::exit(1);
    };
    link = std::make_unique<proxy::Link>(proxy::Candidate{&null_network::table(), "", nullptr},
                                         nullptr);
    engine = std::make_unique<proxy::Engine>(0, 1, 0, kPeers, board, hooks);
    engine->use(*link);
    link->listen(0, kPeers, engine->events());
    for (std::uint32_t id = 1; id <= 2; ++id) {
      auto region = std::make_shared<proxy::Region>();
      region->id = id;
      region->window = true;
      region->block = arena->allocate(1 << 16, Memory::host);
      region->local.assign(1, region->block.host);
      region->remote.assign(kPeers, region->block.host);
      board.change([&](proxy::View& view) { view.regions[id] = region; });
    }
    board.change([&](proxy::View& view) { view.devices.push_back(rings); });
  }

  /// Posts n descriptors as a kernel would.
  void fill(const ProxyOperation& op, int n) {
    for (int i = 0; i < n; ++i, ++index) {
      ProxyOperation mine = op;
      mine.offset = index * 8 % 4096;
      const ProxyDescriptor d = proxy_encode(mine);
      const std::uint64_t lap = proxy_lap(index, kLogSize);
      ProxyDescriptor& slot = rings->slots(0, 0)[index & ((1u << kLogSize) - 1)];
      for (int k = 0; k < 4; ++k)
        store_cell(&slot.chunk[k], Cell16{d.chunk[k].low, d.chunk[k].high | lap});
    }
  }
  void drain(int peer) {
    while (std::atomic_ref(rings->completion(0, peer).completed).load(std::memory_order_acquire) !=
           index)
      engine->step();
  }

  std::unique_ptr<memory::Arena> arena;
  proxy::Board board;
  proxy::Hooks hooks;
  memory::Block counters;
  std::shared_ptr<proxy::DeviceRings> rings;
  std::unique_ptr<proxy::Link> link;
  std::unique_ptr<proxy::Engine> engine;
  std::uint64_t index = 0;
};

void row(Setup& setup, const char* name, const ProxyOperation& op, std::uint64_t total) {
  constexpr int kAtOnce = 1 << kLogSize;
  std::vector<double> each;  // ns a descriptor
  for (std::uint64_t done = 0; done < total; done += kAtOnce) {
    setup.fill(op, kAtOnce);
    const auto begin = std::chrono::steady_clock::now();
    setup.drain(op.peer);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    each.push_back(took.count() / kAtOnce);
  }
  std::sort(each.begin(), each.end());
  std::printf("%-24s median %6.1f, least %6.1f ns a descriptor\n", name, each[each.size() / 2],
              each.front());
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4 << 20;
  const char* only = argc > 2 ? argv[2] : "";
  Setup setup;
  while (setup.engine->step()) {
  }
  struct Case {
    const char* name;
    ProxyOperation op;
  };
  ProxyOperation value;
  value.opcode = ProxyOpcode::put_value;
  value.peer = 1;
  value.window = 1;
  value.bytes = 8;
  value.value[0] = 42;
  ProxyOperation put = value;
  put.opcode = ProxyOpcode::put;
  put.region = 2;
  ProxyOperation put_signal = put;
  put_signal.has_add = true;
  put_signal.add_window = 2;
  put_signal.add_n = 1;
  ProxyOperation counted = value;
  counted.counter = 3;
  for (const Case& c : {Case{"value", value}, Case{"put", put}, Case{"put+signal", put_signal},
                        Case{"value+counter", counted}}) {
    if (*only == 0 || std::strcmp(only, c.name) == 0) row(setup, c.name, c.op, total);
  }
  return 0;
}
