// SPDX-License-Identifier: Apache-2.0
// The verbs network as a table of C functions: every exception ends here as a code and a sentence.
#include <algorithm>
#include <cstring>
#include <memory>

#include "base/random.hpp"
#include "base/text.hpp"
#include "networks/functions.hpp"
#include "networks/guarded.hpp"
#include "networks/verbs/endpoint.hpp"

namespace marrow::networks::rdma {
namespace {

struct Instance {
  const marrow_network_services* services;
  Options options;
};

Instance& as_instance(void* instance) { return *static_cast<Instance*>(instance); }
using Common = Functions<Endpoint, Region, RemoteRegion>;

/// What one PUT may take. Larger ones would keep a queue pair busy for longer than others like to wait.
constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;

int init(const marrow_network_services* services, const char* options, void** instance) {
  return guarded([&] {
    *instance = new Instance{services, read_options(*services, options)};
    return MARROW_NETWORK_OK;
  });
}

void finalize(void* instance) { delete &as_instance(instance); }

int devices(void*, std::uint32_t* count) {
  *count = 1;  // whether it can be used, properties() finds out and says why not
  return MARROW_NETWORK_OK;
}

int properties(void* instance, std::uint32_t device, marrow_network_properties* out) {
  return guarded([&] {
    if (device != 0)
      throw Error(Code::invalid_argument, base::cat("network verbs has no device ", device));
    const auto opened =
        Device::open(as_instance(instance).options, "marrow-look-" + base::random_name(8));
    marrow_network_properties p{};
    p.size = sizeof(p);
    opened->name().copy(p.device, sizeof p.device - 1);
    p.ordered = 1;
    p.atomics = opened->attributes().atomic_cap != 0;
    p.device_memory = opened->takes_gpu_memory(nullptr);
    p.host_only = p.emulated = opened->emulated();
    p.immediate_bytes = 4;
    p.numa_node = opened->numa_node();
    p.max_inline = MARROW_NETWORK_MAX_MESSAGE;
    p.max_message = std::min(opened->port().most, kMostBytes);
    std::memcpy(out, &p, std::min<std::size_t>(out->size, sizeof(p)));
    return MARROW_NETWORK_OK;
  });
}

int listen(void* instance, std::uint32_t, std::uint32_t rank, std::uint32_t nranks,
           const marrow_network_events* events, void** endpoint, marrow_network_address* address) {
  return guarded([&] {
    auto made = std::make_unique<Endpoint>(as_instance(instance).options, rank, nranks, *events);
    *address = made->address();
    *endpoint = made.release();
    return MARROW_NETWORK_OK;
  });
}

int connect(void* endpoint, const marrow_network_address* addresses, std::uint64_t timeout_ns) {
  return guarded([&] {
    Common::of(endpoint).connect(
        addresses, std::chrono::ceil<std::chrono::milliseconds>(
                       std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_ns))));
    return MARROW_NETWORK_OK;
  });
}

constexpr marrow_network kNetwork =
    Common::table("verbs", 40, {init, finalize, devices, properties, listen, connect});

[[maybe_unused]] const int kRegistered = marrow_network_register(&kNetwork);

}  // namespace
}  // namespace marrow::networks::rdma
