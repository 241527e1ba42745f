// SPDX-License-Identifier: Apache-2.0
// Ranks of one network as its C functions show them, all driven by the test's own thread: what was sent,
// what arrived, what completed, and whose end was said.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "marrow/network.h"
#include "proxy/networks.hpp"

namespace marrow::test {

inline const marrow_network& network_named(const std::string& name) {
  for (const marrow_network* network : proxy::registered_networks()) {
    if (name == network->name) return *network;
  }
  throw std::logic_error(name + " is not linked in");
}

/// One rank's endpoint.
struct Side {
  const marrow_network* network = nullptr;
  void* instance = nullptr;
  void* endpoint = nullptr;
  std::uint32_t rank = 0;
  marrow_network_address address{};
  std::vector<std::pair<std::uint32_t, std::string>> messages;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> immediates;
  std::map<std::uint32_t, std::string> down;
  std::map<std::uint64_t, marrow_network_completion> done;
  int duplicates = 0;  ///< tokens that completed twice

  const char* error() const { return network->last_error(); }

  int listen(const marrow_network& which, const marrow_network_services& services,
             const std::string& options, std::uint32_t me, std::uint32_t nranks) {
    network = &which;
    rank = me;
    const int status = which.init(&services, options.c_str(), &instance);
    if (status != MARROW_NETWORK_OK) return status;
    const marrow_network_events events = {
        this,
        [](void* user, std::uint32_t peer, const void* data, std::uint32_t bytes) {
          static_cast<Side*>(user)->messages.emplace_back(
              peer, std::string(static_cast<const char*>(data), bytes));
        },
        [](void* user, std::uint32_t peer, std::uint32_t immediate) {
          static_cast<Side*>(user)->immediates.emplace_back(peer, immediate);
        },
        [](void* user, std::uint32_t peer, const char* sentence) {
          Side& side = *static_cast<Side*>(user);
          EXPECT_EQ(side.down.count(peer), 0u) << "said twice";
          side.down[peer] = sentence;
        }};
    return which.listen(instance, 0, me, nranks, &events, &endpoint, &address);
  }
  void close() {
    if (endpoint) network->close(endpoint);
    if (instance) network->finalize(instance);
    endpoint = instance = nullptr;
  }

  void step() {
    EXPECT_GE(network->progress(endpoint), 0) << error();
    marrow_network_completion got[64];
    const int n = network->test(endpoint, got, 64);
    EXPECT_GE(n, 0) << error();
    for (int i = 0; i < n; ++i) {
      if (!done.emplace(got[i].token, got[i]).second) ++duplicates;
    }
  }
  int post(const marrow_network_operation& o) { return network->post(endpoint, &o, 1); }
  int status_of(std::uint64_t token) const { return done.at(token).status; }
};

/// Memory of one rank, registered, and as its peers know it.
struct Shared {
  std::vector<std::byte> bytes;
  void* region = nullptr;
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  std::vector<void*> remote;  ///< [rank] handle of that rank for this memory
};

class Sides {
 public:
  Sides(const std::string& name, const std::string& options, std::uint32_t n = 2,
        std::size_t bytes = 1 << 16, const marrow_network_services& lent = {})
      : services(lent), sides(n), memory(n) {
    services.version = MARROW_NETWORK_VERSION;
    services.size = sizeof(services);
    const marrow_network& network = network_named(name);
    std::vector<marrow_network_address> all;
    for (std::uint32_t r = 0; r < n; ++r) {
      const int status = sides[r].listen(network, services, options, r, n);
      if (status != MARROW_NETWORK_OK) problem = network.last_error();
      all.push_back(sides[r].address);
    }
    if (!problem.empty()) return;
    for (Side& side : sides) {
      if (network.connect(side.endpoint, all.data(), 10'000'000'000) != MARROW_NETWORK_OK)
        problem = network.last_error();
    }
    if (!problem.empty()) return;
    for (std::uint32_t r = 0; r < n && bytes != 0; ++r) {
      Shared& mine = memory[r];
      mine.bytes.resize(bytes);
      marrow_network_memory what{};
      what.address = mine.bytes.data();
      what.bytes = bytes;
      what.fd = -1;
      if (network.register_memory(sides[r].endpoint, &what, &mine.region, mine.key,
                                  &mine.key_bytes) != MARROW_NETWORK_OK) {
        problem = network.last_error();
        return;
      }
    }
    for (std::uint32_t r = 0; r < n && bytes != 0; ++r) {
      memory[r].remote.resize(n);
      for (std::uint32_t other = 0; other < n; ++other) {
        EXPECT_EQ(network.import_key(sides[other].endpoint, r, memory[r].key, memory[r].key_bytes,
                                     &memory[r].remote[other]),
                  MARROW_NETWORK_OK);
      }
    }
  }
  ~Sides() { close(); }
  Sides(const Sides&) = delete;
  Sides& operator=(const Sides&) = delete;

  void close() {
    for (std::size_t r = 0; r < sides.size(); ++r) close(r);
  }
  void close(std::size_t r) {
    Side& side = sides[r];
    if (!side.endpoint) return side.close();
    for (Shared& shared : memory) {
      if (shared.remote.size() <= r || !shared.remote[r]) continue;
      side.network->release_key(side.endpoint, shared.remote[r]);
      shared.remote[r] = nullptr;
    }
    if (memory[r].region) side.network->deregister_memory(side.endpoint, memory[r].region);
    memory[r].region = nullptr;
    side.close();
  }

  Side& operator[](std::size_t r) { return sides[r]; }

  /// Steps every rank that is open until it holds. @return whether it does
  bool until(const std::function<bool()>& holds,
             std::chrono::milliseconds limit = std::chrono::milliseconds(20000)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!holds()) {
      if (std::chrono::steady_clock::now() > end) return false;
      for (Side& side : sides) {
        if (side.endpoint) side.step();
      }
      std::this_thread::yield();
    }
    return true;
  }
  /// Posts it, however often it takes, and waits for its completion. @return its status
  int run(std::size_t r, const marrow_network_operation& o) {
    Side& side = sides[r];
    bool posted = false;
    const bool came = until([&] {
      if (!posted) posted = side.post(o) == 1;
      return side.done.count(o.token) != 0;
    });
    EXPECT_TRUE(came) << "no completion of kind " << o.kind;
    return came ? side.status_of(o.token) : MARROW_NETWORK_TIMEOUT;
  }

  /// An operation of rank `from` on the memory of `to`.
  marrow_network_operation operation(std::uint32_t kind, std::uint32_t from, std::uint32_t to) {
    marrow_network_operation o{};
    o.kind = kind;
    o.peer = to;
    o.token = ++token;
    o.local = memory[from].region;
    if (memory[to].remote.size() > from) o.remote = memory[to].remote[from];
    return o;
  }
  marrow_network_operation message(std::uint32_t from, std::uint32_t to, const std::string& text) {
    marrow_network_operation o = operation(MARROW_NETWORK_MESSAGE, from, to);
    o.bytes = text.size();
    std::memcpy(o.inline_data, text.data(), text.size());
    return o;
  }
  std::uint64_t& word(std::size_t r, std::size_t offset) {
    return *reinterpret_cast<std::uint64_t*>(memory[r].bytes.data() + offset);
  }

  marrow_network_services services{};
  std::vector<Side> sides;
  std::vector<Shared> memory;
  std::string problem;  ///< why set-up failed
  std::uint64_t token = 0;
};

}  // namespace marrow::test
