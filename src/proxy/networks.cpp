// SPDX-License-Identifier: Apache-2.0
#include "proxy/networks.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/log.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"
#include "proxy/transport.hpp"

namespace marrow::proxy {
namespace {

struct Table {
  std::mutex mutex;
  std::vector<const marrow_network*> networks;
};
// Filled by initialisers of other files, so it may not be one itself.
Table& table() {
  static Table the_table;
  return the_table;
}

bool matches_version(const marrow_network& network) {
  return network.version == MARROW_NETWORK_VERSION && network.size >= sizeof(marrow_network);
}

std::string names() {
  std::string list;
  for (const marrow_network* network : registered_networks()) {
    list += (list.empty() ? "" : ", ") + std::string(network->name);
  }
  return list.empty() ? "none" : list;
}

Candidate load(const std::string& path, const std::string& options) {
  std::shared_ptr<void> library(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* handle) {
    if (handle) ::dlclose(handle);
  });
  if (!library) {
    const char* why = ::dlerror();
    throw Error(
        Code::unsupported,
        base::cat("the network plugin ", path, " cannot be loaded: ", why ? why : "no reason"),
        base::cat("check the path; linked in are: ", names()));
  }
  using Plugin = const marrow_network* (*)();
  const auto plugin = reinterpret_cast<Plugin>(::dlsym(library.get(), MARROW_NETWORK_SYMBOL));
  const marrow_network* network = plugin ? plugin() : nullptr;
  if (!network) {
    throw Error(Code::unsupported,
                base::cat(path, " is no network plugin: it has no ", MARROW_NETWORK_SYMBOL),
                "see marrow/network.h");
  }
  if (!matches_version(*network)) {
    throw Error(Code::version,
                base::cat("network plugin ", path, " is built for version ", network->version, " (",
                          network->size, " bytes) of network.h, this library has version ",
                          MARROW_NETWORK_VERSION, " (", sizeof(marrow_network), " bytes)"),
                "build the plugin against this library's headers");
  }
  return {network, options, std::move(library)};
}

void log_line(void*, int level, const char* text) {
  if (level <= 2) {
    MARROW_WARN(net, text);
  } else if (level == 3) {
    MARROW_INFO(net, text);
  } else {
    MARROW_TRACE(net, text);
  }
}

// The copy engine behind C functions: no exception may cross a network.
template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    MARROW_WARN(net, "copy engine: ", error.what());
    return MARROW_NETWORK_ERROR;
  }
}
CopyEngine& engine(void* user) { return *static_cast<Link*>(user)->copy_engine(); }

int copy(void* user, void* to, const void* from, std::uint64_t bytes, std::uint64_t* ticket) {
  return guarded([&] {
    *ticket = engine(user).copy(to, from, bytes);
    return MARROW_NETWORK_OK;
  });
}
int copy_test(void* user, std::uint64_t ticket) {
  return guarded([&] { return engine(user).done(ticket) ? 1 : 0; });
}
void* map_device(void* user, int fd, std::uint64_t fd_offset, std::uint64_t bytes) {
  void* address = nullptr;
  guarded([&] {
    address = engine(user).map(fd, fd_offset, bytes);
    return MARROW_NETWORK_OK;
  });
  return address;
}
void unmap_device(void* user, void* address, std::uint64_t bytes) {
  guarded([&] {
    engine(user).unmap(address, bytes);
    return MARROW_NETWORK_OK;
  });
}

const char* parameter(void* user, const char* name) {
  thread_local std::string text;
  try {
    text = base::parameter_text(name, static_cast<Link*>(user)->parameters()).text;
    return text.c_str();
  } catch (const std::exception&) {  // not declared
    return nullptr;
  }
}

const marrow_network* find(void*, const char* name) {
  for (const marrow_network* network : registered_networks()) {
    if (std::strcmp(network->name, name) == 0) return network;
  }
  return nullptr;
}

Code to_code(int result) {
  switch (result) {
    case MARROW_NETWORK_INVALID: return Code::invalid_argument;
    case MARROW_NETWORK_UNSUPPORTED: return Code::unsupported;
    case MARROW_NETWORK_PEER_FAILED: return Code::peer_failed;
    case MARROW_NETWORK_TIMEOUT: return Code::timeout;
    case MARROW_NETWORK_NO_MEMORY: return Code::out_of_memory;
    default: return Code::network;
  }
}

}  // namespace

std::vector<const marrow_network*> registered_networks() {
  Table& all = table();
  std::lock_guard lock(all.mutex);
  return all.networks;
}

std::vector<Candidate> candidates(const std::string& wanted) {
  const std::size_t mark = std::min(wanted.find('?'), wanted.size());
  const std::string name = wanted.substr(0, mark);
  const std::string options = mark < wanted.size() ? wanted.substr(mark + 1) : "";
  if (name.find('/') != std::string::npos || name.ends_with(".so")) return {load(name, options)};
  std::vector<Candidate> found;
  for (const marrow_network* network : registered_networks()) {
    if (name == "auto" ? network->priority >= 0 : name == network->name)
      found.push_back({network, options, nullptr});
  }
  if (found.empty() && name != "auto") {
    throw Error(Code::invalid_argument,
                base::cat("MARROW_NETWORK=", wanted, ": there is no network '", name, "'"),
                base::cat("use auto, the path of a plugin (.so), or one of: ", names()));
  }
  return found;
}

Link::Link(const Candidate& candidate, std::unique_ptr<CopyEngine> engine,
           const base::Parameters& parameters, std::string place_pci)
    : candidate_(candidate),
      engine_(std::move(engine)),
      parameters_(parameters),
      place_pci_(std::move(place_pci)) {
  services_.version = MARROW_NETWORK_VERSION;
  services_.size = sizeof(services_);
  services_.user = this;
  services_.log = log_line;
  services_.parameter = parameter;
  services_.find = find;
  services_.place_pci = place_pci_.empty() ? nullptr : place_pci_.c_str();
  if (engine_) {
    services_.copy = copy;
    services_.copy_test = copy_test;
    services_.map_device = map_device;
    services_.unmap_device = unmap_device;
  }
  check(network().init(&services_, candidate_.options.c_str(), &instance_), "init");
  try {
    std::uint32_t count = 0;
    check(network().devices(instance_, &count), "devices");
    if (count == 0) throw Error(Code::unsupported, "it has no device on this host");
    properties_.size = sizeof(properties_);
    properties_.numa_node = -1;
    check(network().properties(instance_, 0, &properties_), "properties");
    if (properties_.max_inline < MARROW_NETWORK_MAX_INLINE || properties_.max_message == 0 ||
        (!properties_.ordered && properties_.immediate_bytes < 4)) {
      throw Error(Code::unsupported,
                  base::cat("network ", network().name, " promises too little: max_inline ",
                            properties_.max_inline, ", max_message ", properties_.max_message,
                            ", ordered ", int{properties_.ordered}, ", immediate_bytes ",
                            int{properties_.immediate_bytes}));
    }
  } catch (...) {
    network().finalize(instance_);
    throw;
  }
}

Link::~Link() {
  if (endpoint_) network().close(endpoint_);
  network().finalize(instance_);
}

void Link::listen(std::uint32_t rank, std::uint32_t nranks, const marrow_network_events& events) {
  check(network().listen(instance_, 0, rank, nranks, &events, &endpoint_, &address_), "listen");
}

int Link::check(int result, const std::string& what) const {
  if (result >= 0) return result;
  throw Error(to_code(result), base::cat(what, ": ", network().last_error()));
}

std::vector<NetworkInfo> known_networks() {
  std::vector<NetworkInfo> list;
  for (const marrow_network* network : registered_networks()) {
    NetworkInfo info;
    info.name = network->name;
    info.priority = network->priority;
    try {
      const Link link({network, "", nullptr}, nullptr);
      info.device = link.properties().device;
    } catch (const Error& error) {
      info.reason = error.sentence();
    }
    list.push_back(std::move(info));
  }
  return list;
}

/// For marrow_network_register below.
static int add_to_table(const marrow_network* network) {
  if (!network || !matches_version(*network) || !network->name) return MARROW_NETWORK_INVALID;
  Table& all = table();
  std::lock_guard lock(all.mutex);
  for (const marrow_network* known : all.networks) {
    if (std::strcmp(known->name, network->name) == 0) return MARROW_NETWORK_INVALID;
  }
  const auto at = std::find_if(
      all.networks.begin(), all.networks.end(),
      [&](const marrow_network* known) { return known->priority < network->priority; });
  all.networks.insert(at, network);
  return MARROW_NETWORK_OK;
}

}  // namespace marrow::proxy

int marrow_network_register(const marrow_network* network) {
  return marrow::proxy::add_to_table(network);
}
