// SPDX-License-Identifier: Apache-2.0
// A network with nothing behind it: it takes every operation and completes it at once, and moves no byte.
// What the proxy costs with it is what the proxy costs. Any number of ranks; a message comes back as if the
// peer had sent the same one, so that signals are acted upon here and acknowledged.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "marrow/network.h"

namespace marrow::null_network {

struct Endpoint {
  static constexpr std::uint32_t kDepth = 4096;  ///< completions nobody took yet
  std::uint32_t head = 0, tail = 0;
  marrow_network_completion done[kDepth];
  marrow_network_events events{};
  struct Message {
    std::uint32_t peer, bytes;
    std::uint8_t data[MARROW_NETWORK_MAX_MESSAGE];
  };
  std::vector<Message> messages, delivering;
};

inline int post(void* endpoint, const marrow_network_operation* operations, std::uint32_t n) {
  auto* e = static_cast<Endpoint*>(endpoint);
  if (e->head == e->tail) e->head = e->tail = 0;
  if (n > Endpoint::kDepth - e->head) n = Endpoint::kDepth - e->head;
  marrow_network_completion* done = e->done + e->head;
  for (std::uint32_t i = 0; i < n; ++i) {
    done[i] = {operations[i].token, 0, MARROW_NETWORK_OK, operations[i].peer};
    if (operations[i].kind == MARROW_NETWORK_MESSAGE) [[unlikely]] {
      Endpoint::Message& message = e->messages.emplace_back();
      message.peer = operations[i].peer;
      message.bytes = static_cast<std::uint32_t>(operations[i].bytes);
      std::memcpy(message.data, operations[i].inline_data, sizeof(message.data));
    }
  }
  e->head += n;
  return static_cast<int>(n);
}

inline int progress(void* endpoint) {
  auto* e = static_cast<Endpoint*>(endpoint);
  if (e->messages.empty()) return 0;
  e->delivering.swap(e->messages);
  for (const Endpoint::Message& message : e->delivering)
    e->events.message(e->events.user, message.peer, message.data, message.bytes);
  const int called = static_cast<int>(e->delivering.size());
  e->delivering.clear();
  return called;
}

inline int test(void* endpoint, marrow_network_completion* completions, std::uint32_t n) {
  auto* e = static_cast<Endpoint*>(endpoint);
  const std::uint32_t there = e->head - e->tail;
  if (n > there) n = there;
  std::memcpy(completions, e->done + e->tail, n * sizeof(*completions));
  e->tail += n;
  return static_cast<int>(n);
}

inline const marrow_network& table() {
  static const marrow_network network = [] {
    marrow_network t{};
    t.version = MARROW_NETWORK_VERSION;
    t.size = sizeof(t);
    t.name = "null";
    t.priority = -1;
    t.init = [](const marrow_network_services*, const char*, void** instance) {
      *instance = nullptr;
      return int{MARROW_NETWORK_OK};
    };
    t.finalize = [](void*) {};
    t.devices = [](void*, std::uint32_t* count) {
      *count = 1;
      return int{MARROW_NETWORK_OK};
    };
    t.properties = [](void*, std::uint32_t, marrow_network_properties* out) {
      marrow_network_properties p{};
      p.size = sizeof(p);
      std::strcpy(p.device, "nothing");
      p.ordered = 1;
      p.host_only = 1;
      p.device_memory = 1;
      p.max_inline = MARROW_NETWORK_MAX_INLINE;
      p.max_message = std::uint64_t{1} << 40;
      p.numa_node = -1;
      std::memcpy(out, &p, out->size < sizeof(p) ? out->size : sizeof(p));
      return int{MARROW_NETWORK_OK};
    };
    t.listen = [](void*, std::uint32_t, std::uint32_t, std::uint32_t,
                  const marrow_network_events* events, void** endpoint,
                  marrow_network_address* address) {
      address->bytes = 0;
      auto made = std::make_unique<Endpoint>();
      made->events = *events;
      *endpoint = made.release();
      return int{MARROW_NETWORK_OK};
    };
    t.connect = [](void*, const marrow_network_address*, std::uint64_t) {
      return int{MARROW_NETWORK_OK};
    };
    t.close = [](void* endpoint) { delete static_cast<Endpoint*>(endpoint); };
    t.register_memory = [](void*, const marrow_network_memory* memory, void** region, void* key,
                           std::uint32_t* key_bytes) {
      *region = memory->address;
      std::memset(key, 0, 8);
      *key_bytes = 8;
      return int{MARROW_NETWORK_OK};
    };
    t.deregister_memory = [](void*, void*) { return int{MARROW_NETWORK_OK}; };
    t.import_key = [](void* endpoint, std::uint32_t, const void*, std::uint32_t, void** remote) {
      *remote = endpoint;  // anything that is not null
      return int{MARROW_NETWORK_OK};
    };
    t.release_key = [](void*, void*) { return int{MARROW_NETWORK_OK}; };
    t.post = post;
    t.progress = progress;
    t.test = test;
    t.abort = [](void*, std::uint32_t) { return int{MARROW_NETWORK_OK}; };
    t.last_error = [] { return "network null fails nothing"; };
    return t;
  }();
  return network;
}

/// Adds it to this program's networks, for MARROW_NETWORK=null. Once.
inline void add() {
  static const int added = marrow_network_register(&table());
  (void)added;
}

}  // namespace marrow::null_network
