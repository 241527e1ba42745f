// SPDX-License-Identifier: Apache-2.0
// What is inside a UniqueId, and the listeners that wait for its rank 0.
//
// Layout, little-endian: magic u32, version u16, address count u8, flags u8, session u64, secret 32,
// port u16, reserved 6, addresses 4 x 16, checksum 8 (the start of SHA-256 of all before it: a damaged
// broadcast is recognised, not secured).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/parameters.hpp"
#include "bootstrap/channel.hpp"
#include "bootstrap/sockets.hpp"
#include "marrow/unique_id.hpp"

namespace marrow::bootstrap {

constexpr std::size_t kMaxAddresses = 4;

struct IdContent {
  Credentials credentials{};
  std::vector<IpAddress> addresses;  ///< of rank 0; at most kMaxAddresses
  std::uint16_t port = 0;
  /// The secret is no secret: listeners bind to the given addresses only.
  bool restricted = false;
  /// Rank 0 listened before anybody could have the id, so "refused" means it is gone. Not so for
  /// tcp:// rendezvous, where each rank works the id out for itself.
  bool listener_first = false;
};

UniqueId encode(const IdContent& content);
/// Throws like UniqueId::from_bytes.
IdContent decode(const UniqueId& id);

/// A rank's two listeners.
struct Listener {
  base::Fd tcp;
  base::Fd unix_socket;  ///< invalid when another process holds the name: then there is only TCP
  std::uint16_t port = 0;
  std::vector<IpAddress> addresses;
  std::string rendezvous_file;  ///< removed by rank 0 once everybody joined; may be empty
  pid_t owner = 0;
};

/// Name of a rank's abstract Unix socket; unpredictable without the secret.
std::string unix_name(const Credentials& credentials, int rank);

/// Opens a rank's listeners. `restrict_to`: bind to this address only.
Listener open_listener(const Credentials& credentials, int rank, std::vector<IpAddress> addresses,
                       const std::optional<IpAddress>& restrict_to, std::uint16_t port = 0);

/// Makes an id with a fresh secret and keeps rank 0's listener for take_listener().
UniqueId create_id(const base::Parameters& parameters, const std::string& rendezvous_file = {});

/// Keeps a listener until rank 0's Bootstrap of this process takes it.
void keep_listener(std::uint64_t session, Listener listener);
/// For rank 0: the kept listener, if this process (or the parent it was forked from) has it.
std::optional<Listener> take_listener(std::uint64_t session);
/// For the other ranks: closes the copy that a fork of rank 0's process inherited.
void drop_inherited_listener(std::uint64_t session);

}  // namespace marrow::bootstrap
