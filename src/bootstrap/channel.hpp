// SPDX-License-Identifier: Apache-2.0
// One authenticated connection of the bootstrap: frames in, frames out, nothing else.
//
//   client                                  server
//   hello {nonce_c}  MAC: hello key    -->  knows the job's secret (or is a replay)
//                                      <--  hello {nonce_s}  MAC: session key (covers both nonces)
//   any frame        MAC: session key  -->  fresh: now, and only now, big frames are allowed
//
// The hello key follows from the secret, the session key from the secret and both nonces. A frame is
// header (24 bytes: magic, version, type, length, sequence), payload, MAC (32 bytes: HMAC-SHA-256 of
// direction, header and payload). Length is checked before anything is allocated; the sequence, one
// counter per direction, makes replay, loss and reordering visible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/sha256.hpp"
#include "bootstrap/fork_guard.hpp"
#include "bootstrap/wire.hpp"
#include "marrow/error.hpp"

namespace marrow::bootstrap {

constexpr std::uint32_t kFrameMagic = 0x4657524d;  // "MRWF" in memory
constexpr std::uint16_t kProtocolVersion = 2;
constexpr std::size_t kHeaderBytes = 24;
constexpr std::size_t kMacBytes = 32;
/// Largest payload before and after the other side proved that it is fresh.
constexpr std::size_t kMaxStrangerPayload = 64 << 10;
constexpr std::size_t kMaxPayload = std::size_t{256} << 20;

enum class FrameType : std::uint16_t {
  hello = 1,
  reject = 2,   ///< code, sentence, next step: the receiver does not belong (any more)
  join = 3,     ///< first contact with rank 0, or with a new root after the old one died
  welcome = 4,  ///< the table of all ranks, or what the new root knows
  heartbeat = 5,
  contribute = 6,  ///< one rank's part of a collective
  result = 7,
  query = 8,   ///< "who is missing?", asked when a deadline passed
  status = 9,  ///< the answer
  state = 10,  ///< a peer became slow, alive or failed
  revoke = 11,
  agree = 12,    ///< one rank's vote in agree_failures
  decide = 13,   ///< the agreed mask
  leave = 14,    ///< the sender goes without the collective close
  goodbye = 15,  ///< the sender goes after the collective close
  admit = 16,    ///< one rank's vote in admit
  admitted = 17  ///< who takes which rank's place, or why nobody does
};

struct Frame {
  FrameType type;
  Bytes payload;
};

/// Why a connection must be dropped.
struct ChannelError : std::runtime_error {
  ChannelError(Code why, const std::string& sentence) : std::runtime_error(sentence), code(why) {}
  Code code;
};

/// The secret of one job together with its session number.
struct Credentials {
  std::array<std::byte, 32> secret;
  std::uint64_t session;
};

class Channel {
 public:
  enum class Role { client, server };

  /// Takes a connected (or connecting) non-blocking stream socket. A client queues its hello;
  /// `probe` says that it only wants to know whether somebody is there.
  Channel(base::Fd fd, std::string where, Role role, const Credentials& credentials,
          bool probe = false);

  int fd() const { return fd_.get(); }
  const std::string& where() const { return where_; }

  /// Both hellos were exchanged: send() is allowed.
  bool established() const { return established_; }
  /// The other side only asked whether this one lives.
  bool probe() const { return probe_; }
  bool wants_write() const { return !out_.empty(); }
  std::size_t bytes_received() const { return bytes_received_; }

  /// Queues a frame. A client may send only once established().
  void send(FrameType type, std::span<const std::byte> payload);
  /// Queues a reject that the other side can read although no key is shared.
  void send_unauthenticated_reject(Code code, const std::string& sentence);

  /// Writes what the socket takes now. False when the connection is gone.
  bool write_some();
  /// Reads what is there and appends complete frames. False at the end of the stream. Throws
  /// ChannelError or Malformed; then nothing of this connection may be believed any more.
  bool read_some(std::vector<Frame>& out);

 private:
  void parse(std::vector<Frame>& out);
  void on_hello(std::span<const std::byte> payload);
  base::Digest mac(std::span<const std::byte> key, bool from_client,
                   std::span<const std::byte> header, std::span<const std::byte> payload) const;
  void queue(FrameType type, std::span<const std::byte> payload, const base::Digest* key,
             std::uint64_t sequence);
  void derive_session_key();

  base::Fd fd_;
  ForkGuard guard_;  // destroyed before fd_
  std::string where_;
  Role role_;
  Credentials credentials_;
  bool probe_;
  bool established_ = false;
  bool fresh_ = false;  // the other side's MAC covered my nonce
  std::array<std::byte, 32> client_nonce_{};
  std::array<std::byte, 32> server_nonce_{};
  base::Digest hello_key_{};
  base::Digest session_key_{};
  std::uint64_t send_sequence_ = 1;  // 0 is the hello
  std::uint64_t receive_sequence_ = 1;
  std::size_t bytes_received_ = 0;
  Bytes in_;
  std::size_t in_used_ = 0;  // bytes of in_ that hold data
  std::deque<Bytes> out_;
  std::size_t out_offset_ = 0;  // of out_.front()
};

}  // namespace marrow::bootstrap
