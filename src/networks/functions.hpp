// SPDX-License-Identifier: Apache-2.0
// The functions of network.h that only pass on to an endpoint's member of the same name: one copy for all
// built-in networks.
#pragma once

#include <cstdint>
#include <memory>

#include "networks/guarded.hpp"

namespace marrow::networks {

/// @tparam Endpoint  with members register_memory, deregister_memory, import_key, post, progress, test and
///                   abort, and release_key if handles of keys own more than memory
/// @tparam Region    what register_memory gives, by unique_ptr
/// @tparam Remote    what import_key gives
template <class Endpoint, class Region, class Remote>
struct Functions {
  static Endpoint& of(void* endpoint) { return *static_cast<Endpoint*>(endpoint); }

  static void close(void* endpoint) { delete &of(endpoint); }

  static int register_memory(void* endpoint, const marrow_network_memory* memory, void** region,
                             void* key, std::uint32_t* key_bytes) {
    return guarded([&] {
      std::unique_ptr<Region> made = of(endpoint).register_memory(*memory, key, key_bytes);
      *region = made.release();
      return MARROW_NETWORK_OK;
    });
  }
  static int deregister_memory(void* endpoint, void* region) {
    return guarded([&] {
      const std::unique_ptr<Region> ours(static_cast<Region*>(region));
      of(endpoint).deregister_memory(*ours);
      return MARROW_NETWORK_OK;
    });
  }
  static int import_key(void* endpoint, std::uint32_t peer, const void* key,
                        std::uint32_t key_bytes, void** remote) {
    return guarded([&] {
      std::unique_ptr<Remote> theirs = of(endpoint).import_key(peer, key, key_bytes);
      *remote = theirs.release();
      return MARROW_NETWORK_OK;
    });
  }
  static int release_key(void* endpoint, void* remote) {
    return guarded([&] {
      const std::unique_ptr<Remote> theirs(static_cast<Remote*>(remote));
      if constexpr (requires { of(endpoint).release_key(*theirs); })
        of(endpoint).release_key(*theirs);
      return MARROW_NETWORK_OK;
    });
  }
  static int post(void* endpoint, const marrow_network_operation* operations, std::uint32_t n) {
    return guarded([&] { return static_cast<int>(of(endpoint).post(operations, n)); });
  }
  static int progress(void* endpoint) {
    return guarded([&] { return static_cast<int>(of(endpoint).progress()); });
  }
  static int test(void* endpoint, marrow_network_completion* completions, std::uint32_t n) {
    return guarded([&] { return static_cast<int>(of(endpoint).test(completions, n)); });
  }
  static int abort(void* endpoint, std::uint32_t peer) {
    of(endpoint).abort(peer);
    return MARROW_NETWORK_OK;
  }

  /// What a network has of its own.
  struct Own {
    decltype(marrow_network::init) init;
    decltype(marrow_network::finalize) finalize;
    decltype(marrow_network::devices) devices;
    decltype(marrow_network::properties) properties;
    decltype(marrow_network::listen) listen;
    decltype(marrow_network::connect) connect;
  };
  /// The network's table.
  static constexpr marrow_network table(const char* name, std::int32_t priority, const Own& own) {
    return {MARROW_NETWORK_VERSION,
            sizeof(marrow_network),
            name,
            priority,
            0,
            own.init,
            own.finalize,
            own.devices,
            own.properties,
            own.listen,
            own.connect,
            close,
            register_memory,
            deregister_memory,
            import_key,
            release_key,
            post,
            progress,
            test,
            abort,
            networks::last_error};
  }
};

}  // namespace marrow::networks
