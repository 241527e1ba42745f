// SPDX-License-Identifier: Apache-2.0
#include "verbs/ports.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::verbs {
namespace {

using base::cat;

constexpr std::uint8_t kHopLimit = 64;
constexpr std::uint8_t kGrhRequired = 1;  // ibv_port_attr::flags

bool is_zero(const ibv_gid& gid) {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw), [](auto b) { return b == 0; });
}

/// RoCE versions as the kernel writes them: "IB/RoCE v1", "RoCE v2".
GidKind kind_in_sysfs(const std::string& root, const std::string& device, std::uint8_t port,
                      int index) {
  std::ifstream file(cat(root, "/sys/class/infiniband/", device, "/ports/", int{port},
                         "/gid_attrs/types/", index));
  std::string line;
  std::getline(file, line);
  if (line.find("v2") != std::string::npos) return GidKind::roce_v2;
  if (line.find("v1") != std::string::npos) return GidKind::roce_v1;
  return GidKind::unknown;
}

/// Smaller is better.
int rank_of(const Gid& gid) {
  const int version = gid.kind == GidKind::roce_v2 ? 0 : gid.kind == GidKind::unknown ? 1 : 2;
  const int family = is_ipv4(gid.gid) ? 0 : is_link_local(gid.gid) ? 2 : 1;
  return version * 3 + family;
}

std::string list(const std::vector<Gid>& gids) {
  std::string text;
  for (const Gid& gid : gids) {
    text += cat(text.empty() ? "" : ", ", gid.index, " = ", to_text(gid.gid), " (", name(gid.kind),
                ")");
  }
  return text.empty() ? "none" : text;
}

ibv_port_attr query(const Table& table, ibv_context* context, const std::string& device,
                    int number) {
  ibv_port_attr attributes{};
  if (table.query_port(context, static_cast<std::uint8_t>(number), &attributes) != 0) {
    throw Error(Code::unsupported,
                cat(device, ": port ", number, " cannot be queried: ", base::errno_text(errno)),
                "look at `ibv_devinfo`; in a container, /sys/class/infiniband must be visible");
  }
  return attributes;
}

}  // namespace

const char* port_state_name(int state) noexcept {
  switch (state) {
    case 1: return "down";
    case 2: return "initialising";
    case 3: return "armed";
    case kPortActive: return "active";
    case 5: return "deferred";
    default: return "in no known state";
  }
}

const char* name(GidKind kind) noexcept {
  switch (kind) {
    case GidKind::infiniband: return "InfiniBand";
    case GidKind::roce_v1: return "RoCE v1";
    case GidKind::roce_v2: return "RoCE v2";
    default: return "RoCE of an unknown version";
  }
}

bool is_ipv4(const ibv_gid& gid) noexcept {
  constexpr std::uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof prefix) == 0;
}

bool is_link_local(const ibv_gid& gid) noexcept {
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

std::string to_text(const ibv_gid& gid) {
  char buffer[INET6_ADDRSTRLEN] = {};
  if (is_ipv4(gid)) {
    ::inet_ntop(AF_INET, gid.raw + 12, buffer, sizeof buffer);
  } else {
    ::inet_ntop(AF_INET6, gid.raw, buffer, sizeof buffer);
  }
  return buffer;
}

std::vector<Gid> gids_of(const Table& table, ibv_context* context, const std::string& device,
                         std::uint8_t port, const ibv_port_attr& attributes,
                         const std::string& root) {
  std::vector<Gid> found;
  for (int i = 0; i < attributes.gid_tbl_len; ++i) {
    Gid gid;
    gid.index = i;
    if (table.query_gid_ex) {
      ibv_gid_entry entry{};
      if (table.query_gid_ex(context, port, static_cast<std::uint32_t>(i), &entry, 0,
                             sizeof entry) != 0)
        continue;
      gid.gid = entry.gid;
      gid.kind = entry.gid_type <= 2 ? static_cast<GidKind>(entry.gid_type) : GidKind::unknown;
    } else {
      if (table.query_gid(context, port, i, &gid.gid) != 0) continue;
      gid.kind = attributes.link_layer == kLinkLayerEthernet ? kind_in_sysfs(root, device, port, i)
                                                             : GidKind::infiniband;
    }
    if (!is_zero(gid.gid)) found.push_back(gid);
  }
  return found;
}

const Gid* best_gid(const std::vector<Gid>& gids) {
  const auto best = std::min_element(gids.begin(), gids.end(), [](const Gid& a, const Gid& b) {
    return rank_of(a) < rank_of(b);  // the first of equals, and indices ascend
  });
  return best == gids.end() ? nullptr : &*best;
}

Port choose_port(const Table& table, ibv_context* context, const std::string& device, int number,
                 int gid_index, const std::string& root) {
  ibv_device_attr all{};
  if (table.query_device(context, &all) != 0) {
    throw Error(Code::unsupported, cat(device, " does not answer: ", base::errno_text(errno)),
                "look at `ibv_devinfo` and the kernel's log");
  }
  if (number > all.phys_port_cnt) {
    throw Error(Code::invalid_argument,
                cat(device, " has ", int{all.phys_port_cnt}, " ports, not a port ", number),
                "correct MARROW_NIC=device:port");
  }
  ibv_port_attr attributes{};
  Port port;
  std::string states;
  bool active = false;
  for (int n = number == 0 ? 1 : number; !active && n <= (number == 0 ? all.phys_port_cnt : number);
       ++n) {
    attributes = query(table, context, device, n);
    port.number = static_cast<std::uint8_t>(n);
    active = attributes.state == kPortActive;
    states +=
        cat(states.empty() ? "" : ", ", "port ", n, " is ", port_state_name(attributes.state));
  }
  if (!active) {
    throw Error(Code::unsupported, cat(device, ": ", states.empty() ? "it has no port" : states),
                "check the cable, `ip link` and `rdma link`; InfiniBand also needs a subnet "
                "manager");
  }
  port.lid = attributes.lid;
  port.mtu = attributes.active_mtu;
  port.most = attributes.max_msg_sz;
  port.ethernet = attributes.link_layer == kLinkLayerEthernet;
  port.needs_global =
      port.ethernet || (attributes.flags & kGrhRequired) != 0 || attributes.lid == 0;
  const std::vector<Gid> gids = gids_of(table, context, device, port.number, attributes, root);
  const Gid* chosen = nullptr;
  if (gid_index >= 0) {
    for (const Gid& gid : gids) {
      if (gid.index == gid_index) chosen = &gid;
    }
    if (!chosen) {
      throw Error(Code::invalid_argument,
                  cat(device, " port ", int{port.number}, " has no GID ", gid_index,
                      "; there are: ", list(gids)),
                  "correct MARROW_GID_INDEX, or leave it at -1");
    }
  } else if (port.ethernet) {
    chosen = best_gid(gids);
  } else if (!gids.empty()) {
    chosen = &gids.front();
  }
  if (!chosen && port.needs_global) {
    throw Error(Code::unsupported,
                cat(device, " port ", int{port.number}, " has no GID to be addressed by"),
                "give its network interface an IP address");
  }
  if (chosen) port.gid = *chosen;
  return port;
}

NicName parse_nic(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  NicName name{text.substr(0, colon), 0};
  if (colon != std::string::npos) {
    const std::string digits = text.substr(colon + 1);
    const bool good = !digits.empty() && digits.size() <= 3 &&
                      digits.find_first_not_of("0123456789") == std::string::npos;
    name.port = good ? std::stoi(digits) : 0;
    if (name.port < 1 || name.port > 255 || name.device.empty()) {
      throw Error(Code::invalid_argument,
                  cat("MARROW_NIC=", text, " is no device:port, such as mlx5_0:1"),
                  "`rdma link` lists devices and ports");
    }
  }
  return name;
}

PortAddress address_of(const Port& port) {
  PortAddress out{};
  std::memcpy(out.gid, port.gid.gid.raw, sizeof out.gid);
  out.lid = port.lid;
  out.mtu = static_cast<std::uint8_t>(port.mtu);
  out.kind = static_cast<std::uint8_t>(port.gid.kind);
  out.ethernet = port.ethernet ? 1 : 0;
  out.needs_global = port.needs_global ? 1 : 0;
  return out;
}

std::string cannot_reach(const Port& mine, const PortAddress& theirs) {
  if (mine.ethernet != (theirs.ethernet != 0)) {
    return cat("its port is ", theirs.ethernet ? "Ethernet (RoCE)" : "InfiniBand", ", ours is ",
               mine.ethernet ? "Ethernet (RoCE)" : "InfiniBand");
  }
  const auto kind = static_cast<GidKind>(theirs.kind);
  if (mine.ethernet && kind != mine.gid.kind && kind != GidKind::unknown &&
      mine.gid.kind != GidKind::unknown) {
    ibv_gid gid;
    std::memcpy(gid.raw, theirs.gid, sizeof theirs.gid);
    return cat("its GID ", to_text(gid), " is ", name(kind), ", ours, ", to_text(mine.gid.gid),
               ", is ", name(mine.gid.kind));
  }
  return {};
}

ibv_ah_attr path_to(const Port& mine, const PortAddress& theirs, std::uint8_t service_level,
                    std::uint8_t traffic_class) {
  ibv_ah_attr path{};
  path.port_num = mine.number;
  path.sl = service_level;
  path.dlid = theirs.lid;
  // Another subnet prefix: behind a router, who goes by the GID.
  const bool routed = !mine.ethernet && std::memcmp(mine.gid.gid.raw, theirs.gid, 8) != 0;
  if (mine.needs_global || theirs.needs_global || routed) {
    path.is_global = 1;
    std::memcpy(path.grh.dgid.raw, theirs.gid, sizeof theirs.gid);
    path.grh.sgid_index = static_cast<std::uint8_t>(mine.gid.index);
    path.grh.hop_limit = kHopLimit;
    path.grh.traffic_class = traffic_class;
  }
  return path;
}

std::string describe(const Port& port) {
  if (!port.ethernet) return cat("port ", int{port.number}, " (InfiniBand, LID ", port.lid, ")");
  return cat("port ", int{port.number}, " (", name(port.gid.kind), ", GID ", port.gid.index, " = ",
             to_text(port.gid.gid), ")");
}

}  // namespace marrow::verbs
