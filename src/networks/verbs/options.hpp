// SPDX-License-Identifier: Apache-2.0
// What can be chosen about the verbs network: parameters of Marrow, each of which an option of
// MARROW_NETWORK=verbs?key=value&... overrides.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "marrow/network.h"

namespace marrow::networks::rdma {

struct Options {
  std::string provider;            ///< provider=: a table of verbs by name; empty: as `nic` says
  std::string nic = "auto";        ///< nic=, MARROW_NIC: auto, softnic, none, device or device:port
  int gid_index = -1;              ///< gid=, MARROW_GID_INDEX
  std::uint32_t depth = 256;       ///< depth=: send queue entries per peer
  std::uint32_t credits = 64;      ///< credits=: receives posted per peer
  std::uint8_t timeout = 18;       ///< timeout=: 4.096 us * 2^timeout without an answer is a retry
  std::uint8_t retries = 7;        ///< retries=
  std::uint8_t rnr_retries = 7;    ///< rnr_retries=: 7 means for ever
  std::uint8_t service_level = 0;  ///< sl=
  std::uint8_t traffic_class = 0;  ///< tc=
  bool eager = false;              ///< connect=eager: all peers in connect(), not on first use
  std::string softnic;             ///< softnic=, MARROW_SOFTNIC
  std::string gpu;                 ///< its PCI address; of several NICs the nearest is taken
  std::string sysfs;               ///< where /sys lies: for tests
  std::string interfaces;          ///< MARROW_SOCKET_IFNAME
  std::chrono::milliseconds peer_timeout{
      30000};  ///< MARROW_PEER_TIMEOUT: of each connection's set-up

  /// Least time, in seconds, before a peer that does not answer is given up.
  double patience_seconds() const;
};

/// @throws Error(invalid_argument) naming key, value and range
Options read_options(const marrow_network_services& services, const std::string& text);

}  // namespace marrow::networks::rdma
