// SPDX-License-Identifier: Apache-2.0
// The libfabric network as a table of C functions.
#include <cstring>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "networks/functions.hpp"
#include "networks/guarded.hpp"
#include "networks/libfabric/endpoint.hpp"

namespace marrow::networks::libfabric {
namespace {

struct Instance {
  const marrow_network_services* services;
  Options options;
  std::vector<Info> devices;
};

using Common = Functions<Endpoint, Region, Remote>;

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
    marrow_network_properties p = properties_of(device_of(self, device), self.options);
    // The provider takes puts and gets there; values and what a rank sends itself are the copy engine's.
    p.device_memory = p.device_memory && self.services->copy;
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
    Common::of(endpoint).connect(addresses);  // asks nobody: connections are made on first use
    return MARROW_NETWORK_OK;
  });
}

constexpr marrow_network kNetwork =
    Common::table("libfabric", 10, {init, finalize, devices, properties, listen, connect});

[[maybe_unused]] const int kRegistered = marrow_network_register(&kNetwork);

}  // namespace
}  // namespace marrow::networks::libfabric
