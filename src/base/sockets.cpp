// SPDX-License-Identifier: Apache-2.0
// Everything here is non-blocking and close-on-exec.
#include "base/sockets.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/system_error.hpp"
#include "base/text.hpp"

namespace marrow::base {
namespace {

bool is_mapped_v4(const IpAddress& address) {
  return std::all_of(address.begin(), address.begin() + 10, [](auto b) { return b == 0; }) &&
         address[10] == 0xff && address[11] == 0xff;
}

IpAddress mapped(const in_addr& v4) {
  IpAddress out{};
  out[10] = out[11] = 0xff;
  std::memcpy(out.data() + 12, &v4, 4);
  return out;
}

IpAddress plain(const in6_addr& v6) {
  IpAddress out{};
  std::memcpy(out.data(), &v6, 16);
  return out;
}

std::optional<IpAddress> from_sockaddr(const sockaddr* address) {
  if (address == nullptr) return std::nullopt;
  if (address->sa_family == AF_INET) {
    return mapped(reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
  }
  if (address->sa_family == AF_INET6) {
    return plain(reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return std::nullopt;
}

/// The socket address for connect and bind; IPv4 in its native family, which exists everywhere.
socklen_t to_sockaddr(const TcpAddress& address, sockaddr_storage& out) {
  out = {};
  if (is_mapped_v4(address.ip)) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&out);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(address.port);
    std::memcpy(&v4->sin_addr, address.ip.data() + 12, 4);
    return sizeof(sockaddr_in);
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&out);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(address.port);
  std::memcpy(&v6->sin6_addr, address.ip.data(), 16);
  return sizeof(sockaddr_in6);
}

Fd tcp_socket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
}

void no_delay(int fd) {
  int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

socklen_t abstract_address(const std::string& name, sockaddr_un& out) {
  out = {};
  out.sun_family = AF_UNIX;
  std::memcpy(out.sun_path + 1, name.data(), std::min(name.size(), sizeof(out.sun_path) - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

/// MARROW_SOCKET_IFNAME: prefixes, "=name" exactly, a leading ^ inverts the list.
bool matches(const std::string& interface, std::string_view filter) {
  bool invert = filter.starts_with('^');
  if (invert) filter.remove_prefix(1);
  bool hit = false;
  while (!filter.empty()) {
    std::size_t end = std::min(filter.find(','), filter.size());
    std::string_view item = filter.substr(0, end);
    filter.remove_prefix(std::min(end + 1, filter.size()));
    if (item.starts_with('=')) {
      hit = hit || interface == item.substr(1);
    } else if (!item.empty()) {
      hit = hit || interface.starts_with(item);
    }
  }
  return hit != invert;
}

}  // namespace

std::string to_text(const IpAddress& address) {
  char buffer[INET6_ADDRSTRLEN] = {};
  if (is_mapped_v4(address)) {
    ::inet_ntop(AF_INET, address.data() + 12, buffer, sizeof(buffer));
  } else {
    ::inet_ntop(AF_INET6, address.data(), buffer, sizeof(buffer));
  }
  return buffer;
}

std::string to_text(const TcpAddress& address) {
  if (is_mapped_v4(address.ip)) return cat(to_text(address.ip), ":", address.port);
  return cat("[", to_text(address.ip), "]:", address.port);
}

bool is_loopback(const IpAddress& address) {
  if (is_mapped_v4(address)) return address[12] == 127;
  return address == plain(in6addr_loopback);
}

IpAddress loopback_address() {
  in_addr v4 = {htonl(INADDR_LOOPBACK)};
  return mapped(v4);
}

std::vector<IpAddress> interface_addresses(const std::string& filter) {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) throw_errno("listing the network interfaces");
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(raw, &::freeifaddrs);
  std::vector<IpAddress> v4;
  std::vector<IpAddress> v6;
  std::string seen;
  for (ifaddrs* entry = list.get(); entry != nullptr; entry = entry->ifa_next) {
    std::optional<IpAddress> address = from_sockaddr(entry->ifa_addr);
    if (!address || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::string name = entry->ifa_name;
    seen += cat(seen.empty() ? "" : ", ", name, " (", to_text(*address), ")");
    bool wanted = filter.empty() ? (entry->ifa_flags & IFF_LOOPBACK) == 0 &&
                                       !name.starts_with("docker") && !name.starts_with("virbr")
                                 : matches(name, filter);
    if (!wanted) continue;
    // A link-local address means nothing without the interface it was seen on.
    bool link_local = (*address)[0] == 0xfe && ((*address)[1] & 0xc0) == 0x80;
    if (link_local) continue;
    (is_mapped_v4(*address) ? v4 : v6).push_back(*address);
  }
  v4.insert(v4.end(), v6.begin(), v6.end());
  if (v4.empty() && !filter.empty()) {
    throw Error(
        Code::invalid_argument,
        cat("MARROW_SOCKET_IFNAME=\"", filter,
            "\" matches no interface that is up; there are: ", seen.empty() ? "none" : seen, "."),
        "name one of those, or unset MARROW_SOCKET_IFNAME.");
  }
  if (v4.empty()) v4.push_back(loopback_address());
  return v4;
}

std::vector<IpAddress> resolve(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* raw = nullptr;
  int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &raw);
  if (status != 0) {
    throw Error(Code::network,
                cat("Host \"", host, "\" has no address: ", ::gai_strerror(status), "."),
                "check the name, or write an address.");
  }
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(raw, &::freeaddrinfo);
  std::vector<IpAddress> out;
  for (addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    std::optional<IpAddress> address = from_sockaddr(entry->ai_addr);
    if (address && std::find(out.begin(), out.end(), *address) == out.end())
      out.push_back(*address);
  }
  return out;
}

Fd listen_tcp(const std::optional<IpAddress>& bind_to, std::uint16_t& port) {
  TcpAddress address{bind_to.value_or(IpAddress{}), port};
  sockaddr_storage where = {};
  socklen_t length = 0;
  auto bound = [&](bool dual_stack) {
    length = to_sockaddr(address, where);
    Fd fd = tcp_socket(where.ss_family);
    if (!fd) return fd;
    int on = 1;
    int off = 0;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (dual_stack) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&where), length) != 0) fd.reset();
    return fd;
  };
  Fd fd = bound(!bind_to);
  if (!fd && !bind_to && errno != EADDRINUSE) {
    // No IPv6 on this machine, or switched off.
    address.ip = mapped(in_addr{htonl(INADDR_ANY)});
    fd = bound(false);
  }
  if (!fd) {
    throw_errno(cat("binding a TCP listener to ", to_text(address)),
                "choose a free port of this host, or an address it has.");
  }
  if (::listen(fd.get(), 1024) != 0) throw_errno(cat("listening on ", to_text(address)));
  length = sizeof(where);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&where), &length) != 0) {
    throw_errno("reading the port of a TCP listener");
  }
  port = ntohs(where.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&where)->sin_port
                                          : reinterpret_cast<sockaddr_in6*>(&where)->sin6_port);
  return fd;
}

Fd listen_unix(const std::string& name) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("creating a Unix socket");
  sockaddr_un address;
  socklen_t length = abstract_address(name, address);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw_errno(cat("binding Unix socket @", name));
  }
  if (::listen(fd.get(), 1024) != 0) throw_errno(cat("listening on Unix socket @", name));
  return fd;
}

Connecting connect_tcp(const TcpAddress& address) {
  sockaddr_storage where;
  socklen_t length = to_sockaddr(address, where);
  Connecting out{tcp_socket(where.ss_family), 0};
  if (!out.fd) return {Fd(), errno};
  no_delay(out.fd.get());
  if (::connect(out.fd.get(), reinterpret_cast<sockaddr*>(&where), length) != 0) out.error = errno;
  return out;
}

Connecting connect_unix(const std::string& name) {
  Connecting out{Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), 0};
  if (!out.fd) return {Fd(), errno};
  sockaddr_un where;
  socklen_t length = abstract_address(name, where);
  if (::connect(out.fd.get(), reinterpret_cast<sockaddr*>(&where), length) != 0) out.error = errno;
  return out;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

Fd accept_one(int listener) {
  Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      throw_errno("accepting a connection");
    }
    return Fd();
  }
  no_delay(fd.get());
  return fd;
}

std::string peer_text(int fd) {
  sockaddr_storage where = {};
  socklen_t length = sizeof(where);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&where), &length) != 0)
    return "a closed socket";
  if (where.ss_family == AF_UNIX) {
    ucred who = {};
    socklen_t size = sizeof(who);
    ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size);
    return cat("process ", who.pid, " of this host");
  }
  TcpAddress address;
  std::optional<IpAddress> ip = from_sockaddr(reinterpret_cast<sockaddr*>(&where));
  if (!ip) return "an unknown address";
  address.ip = *ip;
  address.port =
      ntohs(where.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&where)->sin_port
                                       : reinterpret_cast<sockaddr_in6*>(&where)->sin6_port);
  return to_text(address);
}

}  // namespace marrow::base
