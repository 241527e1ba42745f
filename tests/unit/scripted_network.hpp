// SPDX-License-Identifier: Apache-2.0
// The shm network with hooks, so that a test below core decides what one of its functions does: network "scripted".
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "unit/network_sides.hpp"

namespace marrow::test {

/// Set before ranks are opened; empty hooks do what shm does. They are called by progress threads.
struct Script {
  struct End {  ///< an endpoint
    std::uint32_t rank = 0;
    marrow_network_events events{};
  };
  std::function<void(marrow_network_properties&)> properties;
  std::function<int(void* endpoint, const End&, const marrow_network_operation*, std::uint32_t)>
      post;
  std::function<void(void* remote)> release_key;
  std::function<bool(const marrow_network_memory&)> refuses;  ///< to register it
  /// Around the events of that rank's endpoints.
  std::function<void(std::uint32_t rank, const void* data, std::uint32_t bytes)> message;

  std::mutex mutex;
  std::map<void*, End> ends;

  static Script& current() {
    static Script script;
    return script;
  }
  /// Forgets hooks, and registers the network at the first call.
  static Script& begin();
};

inline const marrow_network& below_script() { return network_named("shm"); }

inline Script& Script::begin() {
  Script& script = current();
  script.properties = nullptr;
  script.post = nullptr;
  script.release_key = nullptr;
  script.refuses = nullptr;
  script.message = nullptr;
  script.ends.clear();
  static marrow_network network = [] {
    marrow_network n = below_script();
    n.name = "scripted";
    n.priority = -1;
    n.properties = [](void* instance, std::uint32_t device, marrow_network_properties* p) {
      const int result = below_script().properties(instance, device, p);
      if (result >= 0 && current().properties) current().properties(*p);
      return result;
    };
    n.listen = [](void* instance, std::uint32_t device, std::uint32_t rank, std::uint32_t nranks,
                  const marrow_network_events* events, void** endpoint,
                  marrow_network_address* address) {
      // The endpoint is not known yet when its events are: they find it by its End, which stays in place.
      auto end = std::make_unique<End>(End{rank, *events});
      marrow_network_events ours = *events;
      ours.user = end.get();
      ours.message = [](void* user, std::uint32_t peer, const void* data, std::uint32_t bytes) {
        const End& e = *static_cast<End*>(user);
        if (current().message) current().message(e.rank, data, bytes);
        e.events.message(e.events.user, peer, data, bytes);
      };
      ours.immediate = [](void* user, std::uint32_t peer, std::uint32_t immediate) {
        const End& e = *static_cast<End*>(user);
        e.events.immediate(e.events.user, peer, immediate);
      };
      ours.peer_down = [](void* user, std::uint32_t peer, const char* sentence) {
        const End& e = *static_cast<End*>(user);
        e.events.peer_down(e.events.user, peer, sentence);
      };
      const int result =
          below_script().listen(instance, device, rank, nranks, &ours, endpoint, address);
      if (result < 0) return result;
      std::lock_guard lock(current().mutex);
      current().ends[*endpoint] = *end;
      static std::vector<std::unique_ptr<End>> kept;
      kept.push_back(std::move(end));
      return result;
    };
    n.post = [](void* endpoint, const marrow_network_operation* operations, std::uint32_t count) {
      if (!current().post) return below_script().post(endpoint, operations, count);
      End end;
      {
        std::lock_guard lock(current().mutex);
        end = current().ends.at(endpoint);
      }
      return current().post(endpoint, end, operations, count);
    };
    n.register_memory = [](void* endpoint, const marrow_network_memory* memory, void** region,
                           void* key, std::uint32_t* bytes) -> int {
      if (current().refuses && current().refuses(*memory)) return MARROW_NETWORK_UNSUPPORTED;
      return below_script().register_memory(endpoint, memory, region, key, bytes);
    };
    n.release_key = [](void* endpoint, void* remote) {
      if (current().release_key) current().release_key(remote);
      return below_script().release_key(endpoint, remote);
    };
    return n;
  }();
  static const int registered = marrow_network_register(&network);
  EXPECT_EQ(registered, MARROW_NETWORK_OK) << "is network shm built in?";
  return script;
}

}  // namespace marrow::test
