// SPDX-License-Identifier: Apache-2.0
// Which port of a NIC, and under which of its addresses (GIDs). One choice for the gda path and the
// verbs network.
//
// An InfiniBand port is addressed by its LID, and by its GID too only where a router stands between or
// the fabric asks for it. A RoCE port has a table of GIDs, one for each IP address and each RoCE version
// of its network interface; the peers must use the same version, so the choice has rules and not chance:
// RoCE v2 before v1 (v1 is not routed), an IPv4 address before a global IPv6 one before a link-local one
// (which says nothing beyond its own wire), then the lowest index.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verbs/table.hpp"

namespace marrow::verbs {

/// ibv_port_attr::state: "active", "down".
const char* port_state_name(int state) noexcept;

enum class GidKind : std::uint8_t { infiniband = 0, roce_v1 = 1, roce_v2 = 2, unknown = 3 };
const char* name(GidKind kind) noexcept;

struct Gid {
  int index = 0;
  ibv_gid gid{};
  GidKind kind = GidKind::unknown;
};

bool is_ipv4(const ibv_gid& gid) noexcept;        ///< ::ffff:a.b.c.d
bool is_link_local(const ibv_gid& gid) noexcept;  ///< fe80::/10
/// As people write it: 192.0.2.1, fe80::1.
std::string to_text(const ibv_gid& gid);

/// One port, chosen and queried.
struct Port {
  std::uint8_t number = 1;
  std::uint16_t lid = 0;
  int mtu = kMtu4096;         ///< 1 = 256 .. 5 = 4096 bytes
  std::uint64_t most = 0;     ///< bytes of the largest message
  bool ethernet = false;      ///< RoCE
  bool needs_global = false;  ///< packets carry a GRH: RoCE always, InfiniBand if the fabric asks
  Gid gid;
};

/// The port's GIDs that are set. Kinds come from the library, else from sysfs below `root`.
std::vector<Gid> gids_of(const Table& table, ibv_context* context, const std::string& device,
                         std::uint8_t port, const ibv_port_attr& attributes,
                         const std::string& root = "");

/// The rules above, for an Ethernet port. Null when there is none.
const Gid* best_gid(const std::vector<Gid>& gids);

/// @param number     0: the first active port
/// @param gid_index  -1: by the rules
/// @throws Error(unsupported) naming each port's state, or what the GID table holds;
///         Error(invalid_argument) for a port or GID index that is not there
Port choose_port(const Table& table, ibv_context* context, const std::string& device, int number,
                 int gid_index, const std::string& root = "");

/// A name in MARROW_NIC: "mlx5_0" or "mlx5_0:2".
struct NicName {
  std::string device;
  int port = 0;  ///< 0: any
};
/// @throws Error(invalid_argument)
NicName parse_nic(const std::string& text);

/// Where a peer's port is, as it travels between ranks.
struct PortAddress {
  std::uint8_t gid[16];
  std::uint16_t lid;
  std::uint8_t mtu;
  std::uint8_t kind;  ///< GidKind
  std::uint8_t ethernet;
  std::uint8_t needs_global;
  std::uint8_t reserved[2];
};
static_assert(sizeof(PortAddress) == 24);
PortAddress address_of(const Port& port);

/// Empty, or why packets of `mine` cannot reach `theirs`: another link layer or RoCE version.
std::string cannot_reach(const Port& mine, const PortAddress& theirs);

/// The path to the peer, for modify_qp and create_ah.
ibv_ah_attr path_to(const Port& mine, const PortAddress& theirs, std::uint8_t service_level,
                    std::uint8_t traffic_class);

/// Text for people: "port 1 (RoCE v2, GID 3 = 192.0.2.1)".
std::string describe(const Port& port);

}  // namespace marrow::verbs
