// SPDX-License-Identifier: Apache-2.0
// The shm network as a table of C functions: every exception ends here as a code and a sentence.
#include <cstring>
#include <memory>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "networks/functions.hpp"
#include "networks/guarded.hpp"
#include "networks/shm/endpoint.hpp"

namespace marrow::networks::shm {
namespace {

struct Instance {
  const marrow_network_services* services;
  Options options;
};

using Common = Functions<Endpoint, Region, Region>;

int init(const marrow_network_services* services, const char* options, void** instance) {
  return guarded([&] {
    *instance = new Instance{services, parse_options(options)};
    return MARROW_NETWORK_OK;
  });
}

void finalize(void* instance) { delete static_cast<Instance*>(instance); }

int devices(void*, std::uint32_t* count) {
  *count = 1;
  return MARROW_NETWORK_OK;
}

int properties(void* instance, std::uint32_t device, marrow_network_properties* out) {
  return guarded([&] {
    if (device != 0)
      throw Error(Code::invalid_argument, base::cat("network shm has no device ", device));
    const Instance& self = *static_cast<Instance*>(instance);
    const bool reorder = self.options.reorder != 0;
    marrow_network_properties p{};
    p.size = sizeof(p);
    std::strcpy(p.device, "memory");
    p.ordered = reorder ? 0 : 1;
    p.device_memory = self.services->copy != nullptr && !reorder;
    p.host_only = 1;
    p.immediate_bytes = 4;
    p.needs_descriptor = 1;
    p.numa_node = -1;
    p.max_inline = MARROW_NETWORK_MAX_INLINE;
    p.max_message = std::uint64_t{1} << 20;  // so that other peers' work is not kept waiting
    std::memcpy(out, &p, std::min<std::size_t>(out->size, sizeof(p)));
    return MARROW_NETWORK_OK;
  });
}

int listen(void* instance, std::uint32_t, std::uint32_t rank, std::uint32_t nranks,
           const marrow_network_events* events, void** endpoint, marrow_network_address* address) {
  return guarded([&] {
    const Instance& self = *static_cast<Instance*>(instance);
    auto made = std::make_unique<Endpoint>(*self.services, self.options, rank, nranks, *events);
    *address = made->address();
    *endpoint = made.release();
    return MARROW_NETWORK_OK;
  });
}

int connect(void* endpoint, const marrow_network_address* addresses, std::uint64_t timeout_ns) {
  return guarded([&] {
    const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(
        std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_ns)));
    Common::of(endpoint).connect(addresses, base::Deadline::after(timeout));
    return MARROW_NETWORK_OK;
  });
}

constexpr marrow_network kNetwork =
    Common::table("shm", 50, {init, finalize, devices, properties, listen, connect});

[[maybe_unused]] const int kRegistered = marrow_network_register(&kNetwork);

}  // namespace
}  // namespace marrow::networks::shm
