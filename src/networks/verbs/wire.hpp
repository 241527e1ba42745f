// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other before their queue pairs stand: the endpoint's address, which the caller
// carries, and two frames over a socket. Both ends of a job run one build of Marrow, or are refused.
#pragma once

#include <cstdint>

#include "marrow/network.h"
#include "networks/shm/host_identity.hpp"
#include "verbs/ports.hpp"

namespace marrow::networks::rdma {

inline constexpr std::uint32_t kAddressMagic = 0x4d565231;
inline constexpr std::uint32_t kKeyMagic = 0x4d564b31;
inline constexpr std::uint32_t kHelloMagic = 0x4d564831;
inline constexpr std::uint32_t kAnswerMagic = 0x4d564132;
/// Of everything in this file. Change it with any of them.
inline constexpr std::uint16_t kProtocol = 1;
inline constexpr int kMostIps = 4;

struct Address {
  std::uint32_t magic;
  std::uint16_t protocol;
  std::uint8_t emulated;  ///< softnic: one host
  std::uint8_t ips;       ///< how many of `ip`
  std::uint32_t rank;
  std::uint16_t tcp_port;
  std::uint16_t reserved;
  shm::HostIdentity host;
  std::uint8_t ip[kMostIps][16];
  std::uint8_t token[16];           ///< who knows it may connect
  char socket_name[32];             ///< abstract Unix socket, for ranks of the same host
  marrow::verbs::PortAddress port;  ///< all 0 for softnic
};
static_assert(sizeof(Address) <= MARROW_NETWORK_MAX_ADDRESS);

/// A queue pair, and the memory through which its two ends keep each other informed.
struct End {
  std::uint32_t qpn;
  std::uint32_t psn;
  marrow::verbs::PortAddress port;
  std::uint64_t control;  ///< address of ControlWords
  std::uint32_t control_rkey;
  std::uint32_t credits;      ///< receives that are posted
  std::uint16_t max_answers;  ///< READs and atomics it answers at a time
  std::uint16_t max_asked;    ///< and asks at a time
  std::uint32_t reserved;
};

/// First words of the memory behind End::control.
struct ControlWords {
  /// Written by the peer: how many of our sends it has received and posted a new receive for.
  alignas(64) std::uint64_t returned;
  /// Read by the peer, to be sure that its writes before are placed.
  alignas(64) std::uint64_t read_me;
};

/// hello: from who connects; answer: from who was connected to; then one kReady byte from the first.
struct Frame {
  std::uint32_t magic;
  std::uint16_t protocol;
  std::uint16_t refused;  ///< answer: Refusal
  std::uint32_t from;
  std::uint32_t to;
  End end;
  char why[160];         ///< of a refusal
  std::uint8_t mac[32];  ///< of all before, keyed with the token of who was connected to
};
enum Refusal : std::uint16_t { kTaken = 0, kOursStands = 1, kCannot = 2 };
inline constexpr char kReady = 'R';
inline constexpr char kGoodbye = 'B';  ///< the endpoint is closed on purpose

/// A region's key.
struct Key {
  std::uint32_t magic;
  std::uint32_t rkey;
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint32_t gpu;
  std::uint32_t reserved;
};
static_assert(sizeof(Key) <= MARROW_NETWORK_MAX_KEY);

}  // namespace marrow::networks::rdma
