// SPDX-License-Identifier: Apache-2.0
// The libfabric network as a table of C functions.
#include <cstring>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "networks/guarded.hpp"
#include "networks/libfabric/endpoint.hpp"

namespace marrow::networks::libfabric {
namespace {

struct Instance {
  const marrow_network_services* services;
  Options options;
  std::vector<Info> devices;
};

Endpoint& as_endpoint(void* endpoint) { return *static_cast<Endpoint*>(endpoint); }

const fi_info& device_of(const Instance& self, std::uint32_t device) {
  if (device >= self.devices.size())
    throw Error(Code::invalid_argument, base::cat("network libfabric has no device ", device));
  return *self.devices[device];
}

int init(const marrow_network_services* services, const char* options, void** instance) {
  return guarded([&] {
    auto made = std::make_unique<Instance>();
    made->services = services;
    made->options = parse_options(options);
    made->devices = find_devices(*services, made->options);
    *instance = made.release();
    return MARROW_NETWORK_OK;
  });
}

void finalize(void* instance) { delete static_cast<Instance*>(instance); }

int devices(void* instance, std::uint32_t* count) {
  *count = static_cast<std::uint32_t>(static_cast<Instance*>(instance)->devices.size());
  return MARROW_NETWORK_OK;
}

int properties(void* instance, std::uint32_t device, marrow_network_properties* out) {
  return guarded([&] {
    const Instance& self = *static_cast<Instance*>(instance);
    const marrow_network_properties p = properties_of(device_of(self, device), self.options);
    std::memcpy(out, &p, std::min<std::size_t>(out->size, sizeof(p)));
    return MARROW_NETWORK_OK;
  });
}

int listen(void* instance, std::uint32_t device, std::uint32_t rank, std::uint32_t nranks,
           const marrow_network_events* events, void** endpoint, marrow_network_address* address) {
  return guarded([&] {
    const Instance& self = *static_cast<Instance*>(instance);
    auto made = std::make_unique<Endpoint>(*self.services, device_of(self, device), self.options,
                                           rank, nranks, *events);
    *address = made->address();
    *endpoint = made.release();
    return MARROW_NETWORK_OK;
  });
}

int connect(void* endpoint, const marrow_network_address* addresses, std::uint64_t) {
  return guarded([&] {
    as_endpoint(endpoint).connect(addresses);  // asks nobody: connections are made on first use
    return MARROW_NETWORK_OK;
  });
}

void close(void* endpoint) { delete static_cast<Endpoint*>(endpoint); }

int register_memory(void* endpoint, const marrow_network_memory* memory, void** region, void* key,
                    std::uint32_t* key_bytes) {
  return guarded([&] {
    *region = as_endpoint(endpoint).register_memory(*memory, key, key_bytes).release();
    return MARROW_NETWORK_OK;
  });
}

int deregister_memory(void* endpoint, void* region) {
  return guarded([&] {
    const std::unique_ptr<Region> ours(static_cast<Region*>(region));
    as_endpoint(endpoint).deregister_memory(*ours);
    return MARROW_NETWORK_OK;
  });
}

int import_key(void* endpoint, std::uint32_t peer, const void* key, std::uint32_t key_bytes,
               void** remote) {
  return guarded([&] {
    *remote = as_endpoint(endpoint).import_key(peer, key, key_bytes).release();
    return MARROW_NETWORK_OK;
  });
}

int release_key(void*, void* remote) {
  delete static_cast<Remote*>(remote);
  return MARROW_NETWORK_OK;
}

int post(void* endpoint, const marrow_network_operation* operations, std::uint32_t n) {
  return guarded([&] { return static_cast<int>(as_endpoint(endpoint).post(operations, n)); });
}

int progress(void* endpoint) {
  return guarded([&] { return static_cast<int>(as_endpoint(endpoint).progress()); });
}

int test(void* endpoint, marrow_network_completion* completions, std::uint32_t n) {
  return guarded([&] { return static_cast<int>(as_endpoint(endpoint).test(completions, n)); });
}

int abort(void* endpoint, std::uint32_t peer) {
  as_endpoint(endpoint).abort(peer);
  return MARROW_NETWORK_OK;
}

constexpr marrow_network kNetwork = {
    MARROW_NETWORK_VERSION,
    sizeof(marrow_network),
    "libfabric",
    10,
    0,
    init,
    finalize,
    devices,
    properties,
    listen,
    connect,
    close,
    register_memory,
    deregister_memory,
    import_key,
    release_key,
    post,
    progress,
    test,
    abort,
    last_error,
};

[[maybe_unused]] const int kRegistered = marrow_network_register(&kNetwork);

}  // namespace
}  // namespace marrow::networks::libfabric
