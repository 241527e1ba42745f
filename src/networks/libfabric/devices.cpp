// SPDX-License-Identifier: Apache-2.0
#include "networks/libfabric/devices.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "base/parameters.hpp"
#include "base/sockets.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "networks/libfabric/table.hpp"
#include "verbs/pci.hpp"

namespace marrow::networks::libfabric {
namespace {

using base::cat;

/// Best first. Others (shm, verbs, sockets, ...) are used when they are asked for by name.
constexpr const char* kPreferred[] = {"efa", "cxi", "tcp"};

std::string provider_of(const fi_info& info) {
  const char* name = info.fabric_attr->prov_name;
  return name ? name : "";
}
/// "tcp" means "tcp;ofi_rxm", too.
bool is_provider(const fi_info& info, const std::string& wanted) {
  const std::string name = provider_of(info);
  return name == wanted ||
         (wanted.find(';') == std::string::npos && name.starts_with(wanted + ";"));
}

std::string device_of(const fi_info& info) {
  const char* name = info.domain_attr->name;
  return name ? name : provider_of(info);
}

bool is_ip(const fi_info& info) {
  return (info.addr_format == FI_SOCKADDR_IN || info.addr_format == FI_SOCKADDR_IN6) &&
         info.src_addr;
}

base::IpAddress ip_of(const fi_info& info) {
  base::IpAddress ip{};
  if (info.addr_format == FI_SOCKADDR_IN) {
    ip[10] = ip[11] = 0xff;
    std::memcpy(ip.data() + 12, &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr, 4);
  } else {
    std::memcpy(ip.data(), &static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr, 16);
  }
  return ip;
}

/// How far a device is from the GPU; 0: not known for any.
std::size_t distance_of(const fi_info& info, const std::string& gpu) {
  if (gpu.empty() || !info.nic || !info.nic->bus_attr || info.nic->bus_attr->bus_type != FI_BUS_PCI)
    return 0;
  const fi_pci_attr& at = info.nic->bus_attr->attr.pci;
  char pci[16];
  std::snprintf(pci, sizeof(pci), "%04x:%02x:%02x.%x", at.domain_id, at.bus_id, at.device_id,
                at.function_id & 7u);
  return static_cast<std::size_t>(verbs::pci_distance("", gpu, pci).cost);
}

std::string parameter(const marrow_network_services& services, const char* name) {
  const char* value = services.parameter ? services.parameter(services.user, name) : nullptr;
  return value ? value : "";
}

/// What we need, and every mode of which we can do our part.
Info make_hints(bool device_memory) {
  Info hints(table().dupinfo(nullptr));
  if (!hints) throw std::bad_alloc();
  hints->caps = FI_MSG | FI_RMA | (device_memory ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                FI_MR_ENDPOINT | (device_memory ? FI_MR_HMEM : 0);
  // Host threads register memory while the progress thread works.
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->av_type = FI_AV_TABLE;
  return hints;
}

void add_offers(const Options& options, bool device_memory, std::vector<Info>& all) {
  Info hints = make_hints(device_memory);
  fi_info* list = nullptr;
  const int result = table().getinfo(wanted_version(), nullptr, nullptr, 0, hints.get(), &list);
  if (result == -FI_ENODATA) return;
  check(result, "fi_getinfo");
  const Info owned(list);
  for (const fi_info* info = list; info; info = info->next) {
    if (info->domain_attr->cq_data_size < 4)
      continue;  // no immediate: nothing would order a signal
    if (!carries_rank(*info, options) && !(info->caps & FI_SOURCE)) continue;
    Info copy(table().dupinfo(info));
    if (!copy) throw std::bad_alloc();
    all.push_back(std::move(copy));
  }
}

}  // namespace

void FreeInfo::operator()(fi_info* info) const { table().freeinfo(info); }

Options parse_options(const std::string& text) {
  Options options;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('&', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    const std::size_t equal = std::min(item.find('='), item.size());
    const std::string key = item.substr(0, equal);
    const std::string value = equal < item.size() ? item.substr(equal + 1) : "";
    if (key == "prov") {
      options.provider = value;
    } else if (key == "family" && (value == "4" || value == "6")) {
      options.family = value == "4" ? 4 : 6;
    } else if (key == "cq_data" && (value == "4" || value == "8")) {
      options.cq_data = value == "4" ? 4 : 8;
    } else if (key == "device" && value == "host") {
      options.device_is_host = true;
    } else if (key == "abort" && value == "keep") {
      options.keeps_connections = true;
    } else {
      throw Error(Code::invalid_argument, cat("network libfabric has no option '", item, "'"),
                  "it has prov=<provider>, family=4|6, cq_data=4|8, device=host and abort=keep");
    }
  }
  return options;
}

bool carries_rank(const fi_info& info, const Options& options) {
  return std::min<std::size_t>(info.domain_attr->cq_data_size, options.cq_data) >= 8;
}

std::vector<Info> find_devices(const marrow_network_services& services, const Options& options) {
  std::vector<Info> all;
  if (cuda::available()) add_offers(options, true, all);
  add_offers(options, false, all);
  // Interfaces as the bootstrap takes them, so that both use the same wires.
  const std::string gpu =
      services.size >= sizeof(services) && services.place_pci ? services.place_pci : "";
  const std::string filter = parameter(services, "MARROW_SOCKET_IFNAME");
  const std::vector<base::IpAddress> ips = base::interface_addresses(filter);
  const auto rank_of = [&](const fi_info& info) -> std::size_t {
    std::size_t provider = 0;
    if (options.provider.empty()) {
      const auto* found = std::find_if(std::begin(kPreferred), std::end(kPreferred),
                                       [&](const char* name) { return is_provider(info, name); });
      if (found == std::end(kPreferred)) return ~std::size_t{0};
      provider = static_cast<std::size_t>(found - std::begin(kPreferred));
    } else if (!is_provider(info, options.provider)) {
      return ~std::size_t{0};
    }
    // IP interfaces in the bootstrap's order, NICs of their own kind by their way to the GPU.
    std::size_t interface = is_ip(info) ? 0 : distance_of(info, gpu);
    if (is_ip(info)) {
      const std::uint32_t family = info.addr_format == FI_SOCKADDR_IN ? 4 : 6;
      if (options.family != 0 && options.family != family) return ~std::size_t{0};
      const auto found = std::find(ips.begin(), ips.end(), ip_of(info));
      if (found == ips.end()) return ~std::size_t{0};
      interface = static_cast<std::size_t>(found - ips.begin());
    }
    return provider << 32 | interface;
  };
  std::erase_if(all, [&](const Info& info) { return rank_of(*info) == ~std::size_t{0}; });
  std::stable_sort(all.begin(), all.end(),
                   [&](const Info& a, const Info& b) { return rank_of(*a) < rank_of(*b); });
  if (all.empty()) {
    throw Error(Code::unsupported,
                options.provider.empty()
                    ? "libfabric has no provider here that reaches other hosts (efa, cxi, tcp)"
                    : cat("libfabric has no provider '", options.provider,
                          "' here that can do what this network needs"),
                "see fi_info");
  }
  const std::string nic = parameter(services, "MARROW_NIC");
  if (!nic.empty() && nic != "auto" && nic != "none" && nic != "softnic") {
    std::string names;
    for (const Info& info : all) {
      if (names.find(device_of(*info)) == std::string::npos)
        names += (names.empty() ? "" : ", ") + device_of(*info);
    }
    std::erase_if(all, [&](const Info& info) { return device_of(*info) != nic; });
    if (all.empty()) {
      throw Error(Code::invalid_argument,
                  cat("MARROW_NIC=", nic, " is no device of network libfabric"),
                  cat("use one of: ", names));
    }
  }
  return all;
}

marrow_network_properties properties_of(const fi_info& info, const Options& options) {
  marrow_network_properties p{};
  p.size = sizeof(p);
  const std::string name = cat(provider_of(info), "/", device_of(info));
  name.copy(p.device, sizeof(p.device) - 1);
  // Even where a provider orders writes, a write and a message overtake each other on some; sequences cost
  // nothing, since the immediate travels with the write.
  p.ordered = 0;
  p.device_memory = (info.caps & FI_HMEM) != 0 || options.device_is_host;
  p.host_only = !(info.caps & FI_REMOTE_COMM) || is_provider(info, "shm");
  p.immediate_bytes = 4;
  p.max_inline = MARROW_NETWORK_MAX_INLINE;
  constexpr std::uint64_t kPiece = std::uint64_t{8}
                                   << 20;  // others' work waits no longer than that takes
  p.max_message = std::min<std::uint64_t>(info.ep_attr->max_msg_size, kPiece);
  p.numa_node = -1;
  std::ifstream file(cat("/sys/class/net/", device_of(info), "/device/numa_node"));
  int node = -1;
  if (file >> node) p.numa_node = node;
  return p;
}

std::string address_text(std::uint32_t format, const void* address, std::size_t bytes) {
  char buffer[INET6_ADDRSTRLEN] = {};
  if (format == FI_SOCKADDR_IN && bytes >= sizeof(sockaddr_in)) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof(v4));
    ::inet_ntop(AF_INET, &v4.sin_addr, buffer, sizeof(buffer));
    return cat(buffer, ":", ntohs(v4.sin_port));
  }
  if (format == FI_SOCKADDR_IN6 && bytes >= sizeof(sockaddr_in6)) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof(v6));
    ::inet_ntop(AF_INET6, &v6.sin6_addr, buffer, sizeof(buffer));
    return cat("[", buffer, "]:", ntohs(v6.sin6_port));
  }
  if (format == FI_ADDR_STR) {
    const char* text = static_cast<const char*>(address);
    return {text, ::strnlen(text, bytes)};
  }
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const std::uint8_t*>(address)[i];
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

}  // namespace marrow::networks::libfabric
