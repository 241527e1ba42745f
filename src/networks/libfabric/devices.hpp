// SPDX-License-Identifier: Apache-2.0
// Which of libfabric's many offers is a device of this network, and what it can do. Nothing is assumed of a
// provider: what its fi_info promises is what it is used for.
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>
#include <vector>

#include "marrow/network.h"

namespace marrow::networks::libfabric {

struct Options {
  std::string provider;      ///< empty: the best of those that reach other hosts
  std::uint32_t family = 0;  ///< 4 or 6: only addresses of that version of IP
  /// Bytes of remote completion data to use at most; 4, as on EFA, for tests.
  std::uint32_t cq_data = 8;
  /// Device memory is the host's to the provider, and only the copy engine may touch it otherwise; for tests.
  bool device_is_host = false;
  /// Nothing ends what is under way to a peer that is gone, as with providers other than tcp; for tests.
  bool keeps_connections = false;
};
/// Throws Error(invalid_argument) naming the key.
Options parse_options(const std::string& text);

struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

/// The devices that can be used, best first: by provider, then in the order in which the bootstrap takes
/// interfaces (MARROW_SOCKET_IFNAME); MARROW_NIC narrows them to one by name.
/// @throws Error(invalid_argument) when MARROW_NIC or MARROW_SOCKET_IFNAME names none,
///         Error(unsupported) when there is none
std::vector<Info> find_devices(const marrow_network_services& services, const Options& options);

marrow_network_properties properties_of(const fi_info& info, const Options& options);

/// Whether a write's remote completion data has room for the sender's rank beside the immediate.
bool carries_rank(const fi_info& info, const Options& options);

/// "192.0.2.1:4711", "[fd00::1]:4711", or the bytes of another kind of address.
std::string address_text(std::uint32_t format, const void* address, std::size_t bytes);

}  // namespace marrow::networks::libfabric
