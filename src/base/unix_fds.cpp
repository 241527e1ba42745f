// SPDX-License-Identifier: Apache-2.0
// One batch is one or more packets: the kernel takes at most 253 descriptors a packet
// (SCM_MAX_FD, unix(7)).
#include "base/unix_fds.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"

namespace marrow::base {
namespace {

constexpr std::size_t kFdsPerPacket = 253;
constexpr std::uint32_t kMagic = 0x4d46'4453;  // "MFDS"

struct PacketHeader {
  std::uint32_t magic;
  std::uint32_t fds_total;  // of the whole batch
  std::uint32_t fds_here;
  std::uint32_t payload_bytes;  // of this packet: all of it in the first packet
};

/// Waits for `events`; throws Error(timeout) naming `what`.
void wait_for(int fd, short events, Deadline deadline, const char* what) {
  for (;;) {
    pollfd entry = {fd, events, 0};
    int ready = ::poll(&entry, 1, deadline.poll_timeout());
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_errno(cat("polling a Unix socket while ", what));
    if (ready <= 0 && deadline.expired()) {
      throw Error(Code::timeout, cat("The deadline passed while ", what, " over a Unix socket."),
                  "see whether the other process of this host still runs, or raise "
                  "MARROW_BOOTSTRAP_TIMEOUT.");
    }
  }
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof(address.sun_path)) {
    throw Error(Code::internal, cat("Unix socket name of ", name.size(), " characters."));
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("creating a Unix socket");
  return fd;
}

}  // namespace

Fd unix_listen(const std::string& name, int backlog) {
  Fd fd = unix_socket();
  socklen_t length = 0;
  sockaddr_un address = abstract_address(name, length);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw_errno(cat("binding Unix socket @", name));
  }
  if (::listen(fd.get(), backlog) != 0) throw_errno(cat("listening on Unix socket @", name));
  return fd;
}

Fd unix_connect(const std::string& name, Deadline deadline) {
  socklen_t length = 0;
  sockaddr_un address = abstract_address(name, length);
  for (;;) {
    Fd fd = unix_socket();
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) {
      check_peer_user(fd.get());
      return fd;
    }
    // EAGAIN is a full backlog, and connect(2) on a Unix socket cannot be polled for: wait a
    // moment.
    if (errno != EAGAIN && errno != EINTR) throw_errno(cat("connecting to Unix socket @", name));
    if (deadline.expired()) {
      throw Error(Code::timeout, cat("The deadline passed while connecting to Unix socket @", name),
                  "see whether the process that listens there is stopped.");
    }
    ::usleep(1000);
  }
}

Fd unix_accept_waiting(int listener) {
  for (;;) {
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return Fd();
      throw_errno("accepting a connection on a Unix socket");
    }
    try {
      check_peer_user(fd.get());
    } catch (const Error& error) {
      MARROW_WARN(bootstrap, error.what());
      continue;
    }
    return fd;
  }
}

Fd unix_accept(int listener, Deadline deadline) {
  for (;;) {
    wait_for(listener, POLLIN, deadline, "accepting a connection");
    if (Fd fd = unix_accept_waiting(listener)) return fd;
  }
}

std::pair<Fd, Fd> unix_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
    throw_errno("creating a pair of Unix sockets");
  }
  return {Fd(fds[0]), Fd(fds[1])};
}

void check_peer_user(int socket) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    throw_errno("reading the user of a Unix socket's peer");
  }
  if (credentials.uid != ::geteuid()) {
    throw Error(Code::authentication,
                cat("Process ", credentials.pid, " of user ", credentials.uid,
                    " connected to a Unix socket of user ", ::geteuid(), "; it was refused."),
                "run all ranks of a job as one user.");
  }
}

void send_fds(int socket, std::span<const int> fds, std::span<const std::byte> payload,
              Deadline deadline) {
  if (fds.size() > kMaxFds || payload.size() > kMaxFdPayload) {
    throw Error(Code::invalid_argument,
                cat("Cannot pass ", fds.size(), " file descriptors with ", payload.size(),
                    " bytes; at most ", kMaxFds, " and ", kMaxFdPayload, "."));
  }
  std::size_t sent_fds = 0;
  bool first = true;
  while (first || sent_fds < fds.size()) {
    std::size_t count = std::min(kFdsPerPacket, fds.size() - sent_fds);
    PacketHeader header = {kMagic, static_cast<std::uint32_t>(fds.size()),
                           static_cast<std::uint32_t>(count),
                           first ? static_cast<std::uint32_t>(payload.size()) : 0};
    std::array<iovec, 2> parts = {
        iovec{&header, sizeof(header)},
        iovec{const_cast<std::byte*>(payload.data()), header.payload_bytes}};
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = header.payload_bytes != 0 ? 2 : 1;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kFdsPerPacket * sizeof(int))> control{};
    if (count != 0) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(head), fds.data() + sent_fds, count * sizeof(int));
    }
    ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == ETOOMANYREFS) {
        // ETOOMANYREFS: too many descriptors in flight for this user; they drain as peers receive.
        if (errno == ETOOMANYREFS) ::usleep(1000);
        wait_for(socket, POLLOUT, deadline, "sending file descriptors");
        if (deadline.expired()) wait_for(socket, 0, deadline, "sending file descriptors");
        continue;
      }
      if (errno == EPIPE || errno == ECONNRESET) {
        throw Error(Code::peer_failed,
                    "The other process closed the Unix socket while file "
                    "descriptors were being sent.",
                    "look for the first error of the other ranks of this host.");
      }
      throw_errno(cat("sending ", count, " file descriptors"));
    }
    sent_fds += count;
    first = false;
  }
}

FdMessage receive_fds(int socket, Deadline deadline) {
  FdReceiver receiver;
  for (;;) {
    wait_for(socket, POLLIN, deadline, "receiving file descriptors");
    if (std::optional<FdMessage> message = receiver.take(socket)) return std::move(*message);
  }
}

std::optional<FdMessage> FdReceiver::take(int socket) {
  while (!begun_ || message_.fds.size() < total_) {
    PacketHeader header = {};
    std::array<std::byte, kMaxFdPayload> payload;
    std::array<iovec, 2> parts = {iovec{&header, sizeof(header)},
                                  iovec{payload.data(), payload.size()}};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kFdsPerPacket * sizeof(int))> control;
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return std::nullopt;
    if (got < 0 && errno != ECONNRESET) throw_errno("receiving file descriptors");
    if (got <= 0) {
      throw Error(Code::peer_failed,
                  "The other process closed the Unix socket before it sent its file descriptors.",
                  "look for the first error of the other ranks of this host.");
    }
    // Take ownership first: a malformed packet must not leak what came with it.
    std::size_t before = message_.fds.size();
    for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
         head = CMSG_NXTHDR(&message, head)) {
      if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
      std::size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
        message_.fds.emplace_back(fd);
      }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0) {
      throw Error(Code::out_of_memory, "File descriptors were lost on arrival.",
                  "raise the descriptor limit (ulimit -n).");
    }
    std::size_t body = static_cast<std::size_t>(got) - std::min<std::size_t>(got, sizeof(header));
    if (static_cast<std::size_t>(got) < sizeof(header) || header.magic != kMagic ||
        (message.msg_flags & MSG_TRUNC) != 0 || header.payload_bytes != body ||
        header.fds_here != message_.fds.size() - before || header.fds_total > kMaxFds ||
        (begun_ && header.fds_total != total_) || header.fds_total < message_.fds.size() ||
        (header.fds_here == 0 && header.fds_total != 0)) {  // would go on for ever
      throw Error(Code::network, "A malformed message came over a Unix socket.",
                  "see whether all ranks run the same version of Marrow.");
    }
    total_ = header.fds_total;
    if (!begun_) {
      message_.payload.assign(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(body));
    }
    begun_ = true;
  }
  begun_ = false;
  return std::exchange(message_, {});
}

}  // namespace marrow::base
