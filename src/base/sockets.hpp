// SPDX-License-Identifier: Apache-2.0
// Stream sockets that never block: TCP over either family, and abstract Unix sockets. The bootstrap meets
// over them, and networks whose queue pairs must be told of each other first.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"

namespace marrow::base {

/// IPv6, or IPv4 in its mapped form (::ffff:a.b.c.d, RFC 4291 section 2.5.5.2).
using IpAddress = std::array<std::uint8_t, 16>;

struct TcpAddress {
  IpAddress ip{};
  std::uint16_t port = 0;
  bool operator==(const TcpAddress&) const = default;
};

std::string to_text(const IpAddress& address);
std::string to_text(const TcpAddress& address);
bool is_loopback(const IpAddress& address);
IpAddress loopback_address();

/// Addresses of the interfaces that are up, best first (IPv4 before IPv6, loopback only when there is
/// nothing else). `filter` is MARROW_SOCKET_IFNAME. Throws Error(invalid_argument) when a filter
/// matches no interface, naming those there are.
std::vector<IpAddress> interface_addresses(const std::string& filter);

/// All addresses of a host name or literal. Throws Error(network).
std::vector<IpAddress> resolve(const std::string& host);

/// Listens on `bind_to` (all interfaces if empty); port 0 takes a free one, reported in `port`.
Fd listen_tcp(const std::optional<IpAddress>& bind_to, std::uint16_t& port);
Fd listen_unix(const std::string& name);

/// Starts a non-blocking connect. error is 0 (connected), EINPROGRESS (wait for POLLOUT, then
/// connect_error()), or why it failed.
struct Connecting {
  Fd fd;
  int error = 0;
};
Connecting connect_tcp(const TcpAddress& address);
Connecting connect_unix(const std::string& name);

/// SO_ERROR.
int connect_error(int fd);

/// Accepts without waiting; an invalid Fd when nobody is there. Throws Error(out_of_memory) when
/// descriptors ran out.
Fd accept_one(int listener);

/// Who is at the other end, for people: "192.0.2.7:4711" or "process 123 of this host".
std::string peer_text(int fd);

}  // namespace marrow::base
