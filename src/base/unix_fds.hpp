// SPDX-License-Identifier: Apache-2.0
// Passing open files (shared memory, exported GPU memory) between processes of one host and one
// user. Abstract Unix sockets: no file to leave behind; anyone on the host (in the network
// namespace) can connect to one, so names are unpredictable and each end checks the other's user.
// Sequenced packets, so that a descriptor batch and its payload cannot be torn apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/fd.hpp"

namespace marrow::base {

/// Limit of one send_fds payload, in bytes.
constexpr std::size_t kMaxFdPayload = 4096;
/// Limit of one send_fds batch.
constexpr std::size_t kMaxFds = 16384;

/// What one send_fds delivered.
struct FdMessage {
  std::vector<Fd> fds;             ///< close-on-exec, owned by the receiver
  std::vector<std::byte> payload;  ///< at most kMaxFdPayload bytes
};

/// A listening abstract socket; `name` without the leading NUL. Throws Error(system).
Fd unix_listen(const std::string& name, int backlog = 128);

/// Connects to unix_listen(name); retries a full backlog until the deadline. The peer must run as
/// this process's effective user. Throws Error(timeout, authentication, system).
Fd unix_connect(const std::string& name, Deadline deadline);

/// Accepts one connection of this user; connections of other users are closed and logged (WARN).
/// Throws Error(timeout, system).
Fd unix_accept(int listener, Deadline deadline);

/// The same without a wait: invalid when nobody of this user waits there. Throws Error(system).
Fd unix_accept_waiting(int listener);

/// A connected pair in this process or for a child. Throws Error(system).
std::pair<Fd, Fd> unix_pair();

/// Throws Error(authentication) unless the other end runs as this process's effective user.
void check_peer_user(int socket);

/// Sends copies of `fds` (at most kMaxFds) and `payload`. The caller keeps its descriptors.
/// Throws Error(timeout, peer_failed when the other end closed, invalid_argument, system).
void send_fds(int socket, std::span<const int> fds, std::span<const std::byte> payload,
              Deadline deadline);

/// Receives one send_fds. Throws Error(timeout, peer_failed, out_of_memory, network on a malformed
/// message).
FdMessage receive_fds(int socket, Deadline deadline);

/// One socket's next send_fds as it comes in, without waiting: for who listens to several at once.
class FdReceiver {
 public:
  /// Takes what lies there. @return the message once it is whole, then begins anew
  /// Throws Error(peer_failed, out_of_memory, network on a malformed message).
  std::optional<FdMessage> take(int socket);

 private:
  FdMessage message_;
  std::size_t total_ = 0;  ///< descriptors of the whole batch
  bool begun_ = false;
};

}  // namespace marrow::base
